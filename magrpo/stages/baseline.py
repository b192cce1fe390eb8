"""Baseline: one row of the table of baselines, evaluated like the agents of a run, and timed.

A row may draw several answers and keep one. ``majority`` runs them on the tests' inputs and keeps one of the largest
set that behave alike (Wang et al. 2022, arXiv 2203.11171, with behaviour for the answer): it sees inputs, not what is
right. ``best`` keeps the one with the largest reward: an oracle, for it is told what the tests say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

from magrpo.config import BaselineRow, EvalConfig, RolloutConfig
from magrpo.interfaces import Engine, Progress
from magrpo.stages.evaluate import eval_rows, held_out, spread_problems, summarise
from magrpo.stages.play import Arena, play
from magrpo.stages.rollout import sampling_params
from magrpo.stages.score import score_texts
from magrpo.types import (
    HEADLINE,
    Action,
    EvalReport,
    EvalRow,
    ExecutionReport,
    Mode,
    Problem,
    Request,
    SamplingParams,
    Split,
    TimedAnswer,
)

Behaviour = Callable[[EvalRow], Hashable]
"""What a row's program did, equal for programs that did the same; None if it never returned a value."""


def baseline(
    arena: Arena,
    row: BaselineRow,
    splits: Mapping[Split, Sequence[Problem]],
    config: EvalConfig,
    rollout_config: RolloutConfig,
    *,
    num_votes: int,
    timed_problems: int,
) -> tuple[EvalReport, list[TimedAnswer]]:
    """Evaluate the weights that the engine holds as ``row`` says; and the time of answers asked for one at a time.

    Every trajectory takes all its turns, unless the row has an oracle that ends it (``stop_above``). ``num_votes``
    answers are drawn for one vote; rows that vote or try again have no greedy mode, in which all answers would be the
    same. ``timed_problems`` problems of ``test``, evenly spread over levels, are timed, after one that is not.
    """
    clock = Clock(arena.engine)
    arena = replace(arena, engine=clock)
    per_trajectory = num_votes if row.votes != "none" else 1
    sampled = replace(sampling_params(rollout_config), max_new_tokens=row.max_new_tokens, keep_support=False)
    modes: dict[Mode, tuple[SamplingParams, int]] = {"sampled": (sampled, config.num_samples * per_trajectory)}
    if row.votes == "none" and row.max_tries == 1:
        modes["greedy"] = (SamplingParams(temperature=0.0, max_new_tokens=row.max_new_tokens), 1)
    starts = held_out(splits, config, modes)
    play_from = partial(
        play, arena, row, config=rollout_config, seed=config.seed, stop_above=row.stop_above, max_tries=row.max_tries
    )
    rows = eval_rows(play_from(starts), row.reward)
    if row.votes != "none":
        rows = vote(rows, num_votes, None if row.votes == "best" else behaviour(rows, row, splits, arena))
    by_task = {s.node.problem.task_id: s for s in starts if (s.split, s.mode) == ("test", "sampled")}
    chosen = spread_problems([start.node.problem for start in by_task.values()], timed_problems)
    timed = []
    for start in [by_task[problem.task_id] for problem in [chosen[0], *chosen]]:
        clock.restart()
        alone = replace(start, node=replace(start.node, group_size=per_trajectory))
        play_from([alone])
        timed.append(TimedAnswer(start.node.problem.task_id, clock.seconds, clock.tokens))
    return EvalReport(0, tuple(rows), summarise(rows, row.reward, config.seed)), timed[1:]


class Clock:
    """An engine that measures another: seconds of sampling and tokens sampled since :meth:`restart`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.restart()

    def restart(self) -> None:
        """Begin to count anew."""
        self.seconds, self.tokens = 0.0, 0

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        """As the engine."""
        started = perf_counter()
        actions = self._engine.generate(requests, progress)
        self.seconds += perf_counter() - started
        self.tokens += sum(len(action.token_ids) for action in actions)
        return actions

    def load(self, policy_version: int, weights: Mapping[str, Path]) -> None:
        """As the engine."""
        self._engine.load(policy_version, weights)

    def sleep(self) -> None:
        """As the engine."""
        self._engine.sleep()

    def wake(self) -> None:
        """As the engine."""
        self._engine.wake()

    def close(self) -> None:
        """As the engine."""
        self._engine.close()


def num_votes(reports: Mapping[str, EvalReport], voter: str) -> int:
    """As many answers of ``voter`` as take the tokens of one answer of the costliest other row; at least one.

    ``reports`` by row; the mean tokens of all turns on ``test``, sampled, count.
    """
    cost = {name: report.summary[HEADLINE]["generated_tokens"].mean for name, report in reports.items()}
    return max(1, round(max(cost.values()) / cost[voter]))


def vote(rows: Sequence[EvalRow], num_votes: int, behaviour: Behaviour | None) -> list[EvalRow]:
    """One row for every ``num_votes`` of a problem, by majority of ``behaviour``; without one the best by return.

    The first of equals wins. A program that never returned a value has no vote. Tokens are those of all answers.
    """
    ballots: dict[tuple[Split, Mode, str, int], list[EvalRow]] = defaultdict(list)
    for row in rows:
        ballots[row.split, row.mode, row.task_id, row.index // num_votes].append(row)
    elected = []
    for (*_, index), ballot in ballots.items():
        if behaviour is None:
            winner = max(ballot, key=lambda row: row.returns[-1])
        else:
            seen = [behaviour(row) for row in ballot]
            counts = Counter(what for what in seen if what is not None)
            winner = ballot[seen.index(counts.most_common(1)[0][0])] if counts else ballot[0]
        spent = sum(row.generated_tokens for row in ballot)
        elected.append(replace(winner, index=index, response_tokens=spent, generated_tokens=spent))
    return elected


def behaviour(
    rows: Sequence[EvalRow], row: BaselineRow, splits: Mapping[Split, Sequence[Problem]], arena: Arena
) -> Behaviour:
    """What the programs of ``rows`` came to on each test's input: the verdict and the value got, from their reports."""
    roles = {agent.name: agent.role for agent in row.agents}
    problems = {problem.task_id: problem for members in splits.values() for problem in members}
    items = [(problems[one.task_id], {roles[agent]: text for agent, text in one.texts.items()}) for one in rows]
    scored, _ = score_texts(items, reward=row.reward, sandbox=arena.sandbox, cache=arena.cache)
    seen = {_key(one): _outcome(result.reports) for one, result in zip(rows, scored, strict=True)}
    return lambda one: seen[_key(one)]


def _key(row: EvalRow) -> tuple[Split, Mode, str, int]:
    return row.split, row.mode, row.task_id, row.index


def _outcome(reports: Mapping[str, ExecutionReport]) -> Hashable:
    report = reports.get("program")
    answered = report is not None and any(case.status in ("pass", "wrong") for case in report.cases)
    return report.cases if report is not None and answered else None
