"""The records that stages share: the team that acts, and the backend that runs models and programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

from magrpo.algo.stats import mean_or_zero
from magrpo.checks.runners import generate_completions
from magrpo.config.agents import AgentConfig
from magrpo.config.run import BaselineRow, RunConfig
from magrpo.config.sections import PenaltyConfig
from magrpo.envs.program import AgentProgram
from magrpo.interfaces import Env, Progress, Reward, Sandbox, Served
from magrpo.sandboxes import STRENGTH
from magrpo.types import UNJUDGED, Action, Execution, ExecutionReport, Observation, Problem, Request, Split

if TYPE_CHECKING:
    from magrpo.gateway.player import EpisodePlayer

Splits = Mapping[Split, Sequence[Problem]]
Cache = MutableMapping[Execution, ExecutionReport]
"""Execution reports of the run so far, so that identical programs are executed once."""
MAX_REPORTS = 200_000
"""Most reports that a run keeps, of about 2 kB each; a run of many iterations would otherwise fill the memory."""


def collect_reports(
    executions: Iterable[Execution], cache: Cache, run: Callable[[list[Execution]], Sequence[ExecutionReport]]
) -> tuple[dict[Execution, ExecutionReport], dict[Execution, ExecutionReport]]:
    """Return the reports of all programs, and the reports that ``run`` made because ``cache`` had none.

    A program on which the sandbox failed is run again; a test that cannot be run fails every time. Several threads may
    share ``cache``.
    """
    distinct = list(dict.fromkeys(executions))
    cached = {one: cache.get(one) for one in distinct}
    known = {one: report for one, report in cached.items() if report and "infra_error" not in report.statuses}
    new = [one for one in distinct if one not in known]
    ran = dict(zip(new, run(new), strict=True)) if new else {}
    cache.update(ran)
    if len(cache) > MAX_REPORTS:
        for oldest in list(cache)[: len(cache) - MAX_REPORTS // 2]:
            cache.pop(oldest, None)
    return known | ran, ran


@dataclass(frozen=True, slots=True)
class Team:
    """The agents, the environment they act in, and the reward of their joint actions with its penalty."""

    agents: Sequence[AgentConfig]
    env: Env
    reward: Reward
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    shuffled: bool = False
    """Whether each agent sees what its partners wrote on another problem instead of what they wrote on this one."""

    @classmethod
    def of(cls, config: RunConfig | BaselineRow) -> Team:
        """The team of a run, or that of one row of the table of baselines."""
        shuffled = isinstance(config, BaselineRow) and config.shuffled
        return cls(config.agents, config.env, config.reward, config.penalty, shuffled)

    @property
    def roles(self) -> dict[str, str]:
        """The role of each agent, by name."""
        return {agent.name: agent.role for agent in self.agents}

    def tolerate_failures(self) -> Team:
        """The same team; if its environment is a program, every episode of a batch may fail."""
        if isinstance(self.env, AgentProgram):
            return replace(self, env=self.env.model_copy(update={"max_failed_frac": 1.0}))
        return self


@dataclass(slots=True)
class ScoreStats:
    """The cost of scoring: executions requested, programs run with their reports, and seconds in the sandbox."""

    wanted: int = 0
    seconds: float = 0.0
    ran: dict[Execution, ExecutionReport] = field(default_factory=dict)

    def add(self, other: ScoreStats) -> None:
        """Add the costs of a later call."""
        self.wanted += other.wanted
        self.seconds += other.seconds
        self.ran |= other.ran

    def metrics(self) -> dict[str, float]:
        """The metrics ``sandbox/`` of the stage. A program counts once for each status among its cases.

        Variants count where their failure masks a joint action; what else befalls them is no fault of a program.
        """
        num_run = len(self.ran)
        programs = [report for execution, report in self.ran.items() if not execution.variant_of]
        metrics = {
            "sandbox/executions": float(num_run),
            "sandbox/reused_frac": 1 - num_run / self.wanted if self.wanted else 0.0,
            "sandbox/candidates_per_s": num_run / self.seconds if self.seconds else 0.0,
        }
        for status in ("timeout", "crash", "memory", "infra_error", "test_error"):
            counted = self.ran.values() if status in UNJUDGED else programs
            metrics[f"sandbox/{status}_frac"] = mean_or_zero([status in report.statuses for report in counted])
        metrics["sandbox/forgeable_frac"] = mean_or_zero([report.forgeable for report in programs])
        watched = [report.watched_calls > 0 for execution, report in self.ran.items() if execution.watch]
        if watched:
            metrics["sandbox/watched"] = float(len(watched))
            metrics["sandbox/called_frac"] = sum(watched) / len(watched)
        if self.ran:
            metrics["sandbox/level"] = float(min(STRENGTH[report.level] for report in self.ran.values()))
        return metrics


@dataclass(slots=True)
class SamplingStats:
    """The cost of sampling: seconds in the engine and tokens sampled."""

    seconds: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The engine and the sandbox that stages run on, and their accumulated costs in ``stats`` and ``sampling``."""

    engine: Served
    """Samples from one set of weights."""
    sandbox: Sandbox
    render: Callable[[str, Observation], tuple[int, ...]]
    """Turns the observation of a named agent into token ids."""
    player: EpisodePlayer | None = None
    """Plays the episodes of a program; None: the environment is not a program."""
    cache: Cache = field(default_factory=dict)
    progress: Progress | None = None
    stats: ScoreStats = field(default_factory=ScoreStats)
    sampling: SamplingStats = field(default_factory=SamplingStats)

    def generate(self, requests: Sequence[Request], progress: Progress | None) -> list[Action]:
        """Sample a completion for each request, and add the costs to ``sampling``."""
        started = perf_counter()
        actions = generate_completions(self.engine, requests, progress)
        self.sampling.seconds += perf_counter() - started
        self.sampling.num_tokens += sum(len(action.token_ids) for action in actions)
        return actions
