"""Prepare: load the problem set and draw each iteration's problems."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magrpo.checks.envs import observe_problem
from magrpo.checks.problems import load_problems
from magrpo.config.run import RunConfig
from magrpo.config.sections import RolloutConfig
from magrpo.errors import ConfigError, quote_value
from magrpo.interfaces import Problems
from magrpo.problems.rows import one_line
from magrpo.process.environment import shorten_path
from magrpo.run.files import split_file
from magrpo.run.steps import Step
from magrpo.run.store import RunStore, read_records, write_records
from magrpo.seeds import derive_seed
from magrpo.stages.backend import Splits, Team
from magrpo.stages.context import Metrics, StageContext
from magrpo.text import format_count
from magrpo.types import Problem

if TYPE_CHECKING:
    from magrpo.model.lineup import Lineup

log = logging.getLogger(__name__)
_MAX_BYTES = 1000
"""Bytes of a prompt per token of the context window above which it is too long, whatever its number of tokens."""


@dataclass(frozen=True, slots=True)
class Room:
    """The context windows in which the first prompts of a problem must leave room for completions."""

    lineup: Lineup
    teams: Sequence[tuple[Team, int]]
    """The teams that answer the problems, each with the maximum length of its completions in tokens."""

    @classmethod
    def of(cls, config: RunConfig, lineup: Lineup) -> Room:
        """Make the room of a run: for its team, or for the teams of its rows of baselines."""
        rows = [(Team.of(row), row.max_new_tokens) for row in config.baselines.rows]
        return cls(lineup, rows or [(Team.of(config), config.rollout.max_new_tokens)])

    def find_fault(self, problem: Problem) -> str:
        """The reason why the first prompts of a problem do not fit; empty if they do.

        Tokens are counted only if the text has more than half as many bytes as there is room for tokens, because
        counting is slow.
        """
        for team, max_new_tokens in self.teams:
            acting = team.env.acting(0)
            acting_agents = [agent for agent in team.agents if agent.role in acting]
            for agent in acting_agents:
                window = self.lineup.max_length(agent.name)
                seen = observe_problem(team.env, problem, agent.role, (), agent.name)
                room = window - max_new_tokens
                size = sum(len(message.content.encode(errors="replace")) for message in seen.messages)
                if size > _MAX_BYTES * window:
                    length = f"{size:,} bytes"
                elif 2 * size > room and (tokens := len(self.lineup.render(agent.name, seen))) > room:
                    length = f"{tokens:,} tokens"
                else:
                    continue
                return (
                    f"the prompt of agent {agent.name!r} has {length}, which do not fit the context window of "
                    f"{window:,} together with a completion of {max_new_tokens:,}"
                )
        return ""


def prepare(
    problems: Problems, problems_per_iteration: int, room: Room | None = None, leave_out_long: bool = False
) -> Splits:
    """Load every split; ``leave_out_long`` drops problems that do not fit in ``room``, with a warning.

    Raises ConfigError if a problem does not fit, a split is empty or too small, or a ``task_id`` is used twice.
    """
    splits = load_problems(problems)
    faults: dict[str, str] = {}
    if room:
        for problem in itertools.chain.from_iterable(splits.values()):
            if fault := room.find_fault(problem):
                faults[problem.task_id] = fault
        if faults:
            message = _describe_faults(faults)
            if not leave_out_long:
                remedy = "set rollout.leave_out_long = true to skip such problems, or lower rollout.max_new_tokens"
                raise ConfigError(f"problems: {message}; {remedy}")
            log.warning("skipped %d problems: %s", len(faults), message)
            splits = {split: [p for p in members if p.task_id not in faults] for split, members in splits.items()}
    for split in ("train", "test"):
        if not splits.get(split):
            reason = "is empty; make it larger"
            if faults:
                reason = (
                    "is empty without the problems that do not fit the context window; lower rollout.max_new_tokens, "
                    "or take shorter problems"
                )
            raise ConfigError(f"problems: the split {split!r} {reason}")
    if len(splits["train"]) < problems_per_iteration:
        raise ConfigError(
            f"rollout.problems_per_iteration = {problems_per_iteration}, "
            f"but the train split has only {len(splits['train'])} problems"
        )
    seen: dict[str, str] = {}
    for split, members in splits.items():
        for problem in members:
            if problem.task_id in seen:
                name = quote_value(problem.task_id)
                raise ConfigError(f"problems: {name} is both in {seen[problem.task_id]} and in {split}")
            seen[problem.task_id] = split
    return splits


def _describe_faults(faults: Mapping[str, str]) -> str:
    (name, fault), *others = faults.items()
    more = f" (and {len(others)} more problems do not fit)" if others else ""
    return f"{quote_value(name)}: {fault}{more}"


def draw_problems(train: Sequence[Problem], iteration: int, count: int, seed: int) -> list[Problem]:
    """Draw the ``count`` distinct problems of ``iteration``, counted from 1; a pure function of its arguments.

    Every epoch goes through the training set in a fresh order, and ends when fewer than ``count`` problems are left.
    """
    per_epoch = len(train) // count
    epoch, position = divmod(iteration - 1, per_epoch)
    order = list(train)
    random.Random(derive_seed(seed, "draw", epoch)).shuffle(order)
    return order[position * count : (position + 1) * count]


def draw_spare_problems(
    train: Sequence[Problem], drawn: Sequence[Problem], iteration: int, rollout: RolloutConfig, seed: int
) -> list[Problem]:
    """Draw the problems that ``iteration`` takes in place of ``drawn`` ones; a pure function of its arguments.

    They are a random choice from the rest of the training set, whatever other iterations draw.
    """
    names = {problem.task_id for problem in drawn}
    rest = [problem for problem in train if problem.task_id not in names]
    count = min((rollout.max_draws - 1) * rollout.problems_per_iteration, len(rest))
    return random.Random(derive_seed(seed, "spare", iteration)).sample(rest, count)


def list_trained_before(config: RunConfig, splits: Splits) -> dict[str, list[str]]:
    """List the held-out problems that are training problems of the runs whose folders hold the agents' start weights.

    They are listed by the path of the run. A run may split its problems otherwise than the run before, for example
    after an edit of the file.
    """
    prepared = Step("prepare", 0).output
    stores: dict[Path, RunStore] = {}
    agents = [*config.agents, *(agent for row in config.baselines.rows for agent in row.agents)]
    for start in (agent.start_from for agent in agents if agent.start_from is not None):
        above = (RunStore(folder.parent, folder.name) for folder in start.resolve().parents)
        if store := next((store for store in above if store.is_committed(prepared)), None):
            stores[store.path] = store
    found: dict[str, list[str]] = {}
    for path, store in stores.items():
        file = store.stage_folder(prepared) / split_file("train")
        try:
            trained = {one_line(problem.prompt) for problem in read_records(file, Problem)}
        except ConfigError:  # a damaged file, which nothing but a warning depends on
            continue
        held_out = (problem for split, problems in splits.items() if split != "train" for problem in problems)
        if names := [problem.task_id for problem in held_out if one_line(problem.prompt) in trained]:
            found[shorten_path(path)] = names
    return found


def write_problems(context: StageContext) -> Metrics:
    """Write the problems of every split."""
    config = context.config
    lineup = context.resources.lineup
    if unused := lineup.find_unused_templates():
        context.console.say(f"warning: {unused}")
    room = Room.of(config, lineup)
    splits = prepare(config.problems, config.rollout.problems_per_iteration, room, config.rollout.leave_out_long)
    for run, names in list_trained_before(config, splits).items():
        context.console.say(
            f"warning: the training set of {run}, from which agents start, also holds "
            f"{format_count(len(names), 'held-out problems')} of this run, such as {names[0]}; give both runs the same "
            "problems.* keys and file"
        )
    for split, problems in splits.items():
        write_records(context.folder / split_file(split), problems)
    return {f"problems/{split}": float(len(problems)) for split, problems in splits.items()}
