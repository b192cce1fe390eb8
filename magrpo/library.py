"""The library for notebooks and scripts: train runs, read them, price joint actions, sample from an engine.

``import magrpo`` offers everything here. Heavy libraries load with the first call that needs them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magrpo.asking.answers import Answer, open_asked_agents
from magrpo.asking.problems import write_problem
from magrpo.asking.teams import find_asked_team
from magrpo.checks import runners
from magrpo.config.agents import start_weights
from magrpo.config.run import RunConfig, load_config  # noqa: F401  # load_config: a name of the package
from magrpo.config.validate import validate_config
from magrpo.errors import ConfigError
from magrpo.model.host import EngineHost
from magrpo.process.environment import prepare_environment
from magrpo.progress.state import was_refused
from magrpo.run.files import (
    checkpoint_weights,
    choose_checkpoint,
    committed_iterations,
    find_evaluations,
    read_evaluation,
    read_scored,
)
from magrpo.run.steps import Step
from magrpo.run.store import RunStore, check_run_name, merge_metrics, sort_stages
from magrpo.sandboxes.none import NoSandbox
from magrpo.stages.backend import Backend, Team
from magrpo.stages.rollout import rollout, root_nodes
from magrpo.stages.score import Scored, score_texts
from magrpo.types import Problem, TrajectoryStep

if TYPE_CHECKING:
    from pandas import DataFrame

    from magrpo.gateway.player import EpisodePlayer
    from magrpo.interfaces import Served
    from magrpo.model.lineup import Lineup
    from magrpo.training.one_iteration import Iteration


def build_config(sections: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Build a configuration from nested dictionaries with the keys of a TOML file, as :func:`load_config` does.

    >>> model = "coopcode-base"
    >>> config = build_config({
    ...     "agents": [{"name": role, "role": role, "model": model} for role in ("helper", "main")],
    ...     "problems": {"kind": "coopcode"},
    ...     "env": {"kind": "coding", "prompt": "bare"},
    ...     "reward": {"kind": "coding"},
    ...     "sandbox": {"kind": "pool"},
    ...     "engine": {"kind": "transformers"},
    ... }, ["train.num_iterations=2"])
    """
    return validate_config(RunConfig, _copy_tree(sections), overrides, "build_config")


def _copy_tree(value: Any) -> Any:
    """Copy nested dictionaries and lists, with lists for tuples, so that overrides change only the copy."""
    if isinstance(value, Mapping):
        return {key: _copy_tree(item) for key, item in value.items()}
    return [_copy_tree(item) for item in value] if isinstance(value, list | tuple) else value


def run_iteration(config: RunConfig) -> Iteration:
    """Train untrained agents for one iteration in memory; returns its joint actions, samples and metrics.

    >>> iteration = run_iteration(load_config("pipelines/configs/embedded.toml", ["rollout.problems_per_iteration=2"]))
    >>> iteration.metrics["reward/joint"]
    """
    from magrpo.training.one_iteration import run_once  # torch and transformers

    return run_once(config)


def train_run(config: RunConfig, name: str | None = None) -> Run:
    """Train a whole run in this process, without Prefect, in ``config.root``; resumes the run if it exists.

    A new run that is refused before it has sampled anything is removed, so that its name stays free.

    In a script, call it under ``if __name__ == "__main__":``, because the processes that call the reward of large
    batches import the script.

    Raises:
        ConfigError: the run has another configuration, another process works on it, or ``config`` is unusable here.
    """
    if name and (found := RunStore(config.root, check_run_name(name))).exists():
        store, is_new, stored = found, False, found.config()
        if stored != _copy_settled_values(config, stored):
            raise ConfigError(f"run {store.run_id} has another configuration: choose another name")
    else:
        store, is_new = RunStore.create(config, name), True
    prepare_environment()
    from magrpo.training.execute import execute  # torch: the environment must be prepared before
    from magrpo.training.removal import remove_run

    try:
        execute(config.root, store.run_id, lambda run_step: run_step, {})
    except ConfigError as error:
        if is_new and was_refused(store, error):
            remove_run(store)
        raise
    return Run(store)


def _copy_settled_values(config: RunConfig, stored: RunConfig) -> RunConfig:
    """Return ``config`` with the stored precision, number of iterations and weights to start from, if a run sets them.

    A run sets them when it starts (``dtype = "auto"``, the champion) or when its limit of tokens ends training.
    """
    model, train, agents = config.model, config.train, config.agents
    if model.dtype == "auto":
        model = model.model_copy(update={"dtype": stored.model.dtype})
    if train.max_tokens is not None:
        train = train.model_copy(update={"num_iterations": stored.train.num_iterations})
    if config.registry.continue_from_champion and len(agents) == len(stored.agents):
        agents = tuple(
            agent.model_copy(update={"start_from": other.start_from})
            for agent, other in zip(agents, stored.agents, strict=True)
        )
    return config.model_copy(update={"model": model, "train": train, "agents": agents})


def open_run(folder: Path | str) -> Run:
    """Open the run in ``folder``. Raises ConfigError if there is none.

    >>> run = open_run("runs/my-run")
    >>> run.read_metrics()["reward/joint"].plot()
    """
    folder = Path(folder).resolve()
    store = RunStore(folder.parent, folder.name)
    return Run(store if store.exists() else RunStore.open(folder.parent, folder.name))


@dataclass(frozen=True)
class Run:
    """A run directory, read as data frames."""

    store: RunStore

    @property
    def config(self) -> RunConfig:
        return self.store.config()

    def read_metrics(self) -> DataFrame:
        """The metrics of every stage, one row for each iteration; ``time/*`` are summed over turns."""
        import pandas  # half a second

        rows: dict[int, dict[str, float]] = defaultdict(dict)
        for iteration, _, metrics in sort_stages(self.store.stage_metrics()):
            merge_metrics(rows[iteration], metrics)
        return pandas.DataFrame.from_dict(rows, orient="index").rename_axis("iteration").sort_index()

    def read_evaluations(self) -> DataFrame:
        """The summaries of all evaluations, one row for each quantity: fractions of their maximum, except tokens."""
        import pandas  # half a second

        rows = [
            (iteration, *key.split("/"), quantity, interval.mean, interval.low, interval.high)
            for iteration, pointer in find_evaluations(self.store).items()
            for key, quantities in read_evaluation(self.store.folder(pointer)).summary.items()
            for quantity, interval in quantities.items()
        ]
        return pandas.DataFrame(rows, columns=["iteration", "split", "mode", "quantity", "mean", "low", "high"])

    def read_answers(self, iteration: int | None = None) -> DataFrame:
        """The answers of an evaluation, by default the last; ``return`` is a fraction of the maximum.

        The text of each agent is in the column ``text/AGENT``, so that no agent's name hides another column.
        """
        import pandas  # half a second

        evaluations = find_evaluations(self.store)
        chosen = max(evaluations, default=None) if iteration is None else iteration
        if chosen not in evaluations:
            listed = ", ".join(map(str, evaluations)) or "none"
            raise ConfigError(f"run {self.store.run_id}: no evaluation after iteration {chosen}; there are: {listed}")
        fraction = self.config.reward.fraction
        return pandas.DataFrame(
            {
                "task_id": row.task_id,
                "split": row.split,
                "mode": row.mode,
                "return": fraction(row.returns[-1]),
                "passed": row.passed[-1],
                **_name_text_columns(row.texts),
            }
            for row in read_evaluation(self.store.folder(evaluations[chosen])).rows
        )

    def read_joint_actions(self, iteration: int) -> DataFrame:
        """The joint actions sampled in a trained iteration, with rewards and a column ``text/AGENT`` for each agent."""
        import pandas  # half a second

        if iteration == 0 or iteration not in committed_iterations(self.store, "update"):
            raise ConfigError(f"run {self.store.run_id}: iteration {iteration} has not been trained")
        scores = [Step("score", iteration, str(turn)).output for turn in range(self.config.env.num_turns)]
        pointers = filter(None, map(self.store.find, scores))
        return pandas.DataFrame(
            {
                "task_id": group.problem.task_id,
                "turn": len(group.path) + 1,
                "reward": turn.reward.total,
                "masked": turn.masked,
                **{f"reward/{part}": value for part, value in turn.reward.parts.items()},
                **_name_text_columns(
                    {agent: action.text for agent, action in TrajectoryStep.of(group, index).latest_actions.items()}
                ),
            }
            for pointer in pointers
            for group in read_scored(self.store.folder(pointer))
            for index, turn in enumerate(group.turns)
        )

    def ask_agents(self, problem: Problem | str, iteration: int | None = None, seed: int | None = None) -> Answer:
        """Ask the agents, as they were after ``iteration`` (by default the last), to solve a problem.

        ``problem`` may be a description in words. Answers are greedy, or sampled with ``seed``. The base model is
        loaded for each call; :func:`magrpo.asking.answers.open_asked_agents` keeps it loaded for several problems.

        >>> run.ask_agents("def double_total(xs):").texts
        """
        asked = find_asked_team(str(self.store.path), self.store.path.parent, iteration)
        if isinstance(problem, str):
            problem = write_problem(problem, (), self.config.reward, self.config.problems)
        with open_asked_agents(asked, with_untrained=False) as agents:
            *_, answer = agents.answer_problem(agents.trained, problem, seed)
        return answer

    def find_weights(self, iteration: int | None = None) -> dict[str, Path]:
        """The folders of trained weights, by agent, after ``iteration``, by default the last.

        Raises ConfigError if the weights of that iteration are not there.
        """
        weights = checkpoint_weights(self.store, choose_checkpoint(self.store, iteration))
        return {agent.name: weights / agent.name for agent in self.config.agents}


def _name_text_columns(texts: Mapping[str, str]) -> dict[str, str]:
    return {f"text/{agent}": text for agent, text in texts.items()}


def price_joint_action(config: RunConfig, problem: Problem, texts: Mapping[str, str]) -> Scored:
    """Price one joint action, given as texts by role; programs run in the sandbox of ``config``.

    The price does not include the penalty, which also depends on prompts and on where answers were cut.
    """
    roles = config.env.roles()
    if sorted(texts) != sorted(roles):
        raise ConfigError(f"texts: needs one for each role {', '.join(roles)}; got {', '.join(texts) or 'none'}")
    with closing(runners.open_sandbox(config.sandbox)) as sandbox:
        [scored], _ = score_texts([(problem, texts)], reward=config.reward, sandbox=sandbox, cache={})
    return scored


@dataclass(frozen=True)
class Sampler:
    """An engine that holds the weights of a team."""

    config: RunConfig
    lineup: Lineup
    engine: Served
    player: EpisodePlayer | None = None
    """Plays the episodes of a program; None if the environment is not a program."""

    def sample_joint_actions(self, problem: Problem, number: int = 1, seed: int = 0) -> list[dict[str, str]]:
        """Sample joint actions of the first turn, each as texts by role."""
        config = self.config.rollout.model_copy(update={"group_size": number, "joint_mode": "aligned"})
        sandbox = NoSandbox().open()
        backend = Backend(engine=self.engine, sandbox=sandbox, render=self.lineup.render, player=self.player)
        team = Team.of(self.config)
        [group] = rollout(root_nodes([problem], config), team, backend, config, seed)
        if group.episodes:
            return [dict(episode.texts) for episode in group.episodes]
        return [{team.roles[name]: text for name, text in group.texts(turn).items()} for turn in group.turns]


@contextmanager
def open_engine(config: RunConfig, weights: Mapping[str, Path] | None = None) -> Iterator[Sampler]:
    """Open the engine of ``config`` with a folder of weights for each agent; None: untrained, or ``start_from``.

    >>> with open_engine(run.config, run.find_weights()) as sampler:
    ...     sampler.sample_joint_actions(problem, number=4)

    Raises ConfigError if ``weights`` names other agents than ``config``.
    """
    from magrpo.gateway.player import open_player  # aiohttp
    from magrpo.model.policy import Policy  # torch and transformers

    names = [agent.name for agent in config.agents]
    if weights and sorted(weights) != sorted(names):
        raise ConfigError(f"weights: needs a folder for each agent {', '.join(names)}; got {', '.join(weights)}")
    policy = Policy.open(config.agents, config.model, config.lora, config.train.seed)
    with (
        closing(runners.open_engine_plugin(config.engine, EngineHost.of(policy))) as engine,
        open_player(config.env, policy.lineup) as player,
    ):
        served = runners.serve_weights(engine, 1, weights or start_weights(config.agents))
        yield Sampler(config, policy.lineup, served, player)
