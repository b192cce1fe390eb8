"""Score: run what the reward asks for in the sandbox, then price every joint action.

Execution is data. A failure of the sandbox itself (``infra_error``) masks a joint action; it is never a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from magrpo.interfaces import Progress, Reward, Sandbox
from magrpo.sandboxes import STRENGTH
from magrpo.types import PENDING, Execution, ExecutionReport, JointReward, Problem, RolloutGroup, ScoredTurn, Turn

Cache = MutableMapping[Execution, ExecutionReport]
"""Reports of the run so far: identical programs are executed once."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The price of one joint action and the reports it follows from. ``masked``: the sandbox failed on it."""

    reward: JointReward
    reports: dict[str, ExecutionReport]
    masked: bool


_PENDING = Scored(PENDING, {}, masked=False)


@dataclass(slots=True)
class ScoreStats:
    """What scoring took: executions wanted, those really run with their reports, seconds in the sandbox."""

    wanted: int = 0
    seconds: float = 0.0
    ran: dict[Execution, ExecutionReport] = field(default_factory=dict)

    def add(self, other: ScoreStats) -> None:
        """Take up what happened afterwards."""
        self.wanted += other.wanted
        self.seconds += other.seconds
        self.ran |= other.ran

    def metrics(self) -> dict[str, float]:
        """Sandbox metrics of the stage. A share counts a program once if any of its cases has the status."""
        number = len(self.ran)
        statuses = [{report.status, *(case.status for case in report.cases)} for report in self.ran.values()]
        metrics = {
            "sandbox/executions": float(number),
            "sandbox/reused_frac": 1 - number / self.wanted if self.wanted else 0.0,
            "sandbox/candidates_per_s": number / self.seconds if self.seconds else 0.0,
        }
        for status in ("timeout", "crash", "memory", "infra_error"):
            metrics[f"sandbox/{status}_frac"] = sum(status in seen for seen in statuses) / max(number, 1)
        if self.ran:
            metrics["sandbox/level"] = float(min(STRENGTH[report.level] for report in self.ran.values()))
        return metrics


def score(
    groups: Sequence[RolloutGroup[Turn]],
    *,
    roles: Mapping[str, str],
    reward: Reward,
    sandbox: Sandbox,
    cache: Cache,
    progress: Progress | None = None,
) -> tuple[list[RolloutGroup[ScoredTurn]], ScoreStats]:
    """Price every joint action of every group; ``roles`` maps agent names to roles.

    The reward sees what every role wrote last, in this turn or an earlier one. A joint action after which a role has
    not written anything yet is :data:`~magrpo.types.PENDING`.
    """
    latest = [(group.problem, group.latest(turn)) for group in groups for turn in group.turns]
    items = [
        (problem, {roles[agent]: text for agent, text in texts.items()})
        for problem, texts in latest
        if texts.keys() == roles.keys()
    ]
    priced, stats = score_texts(items, reward=reward, sandbox=sandbox, cache=cache, progress=progress)
    prices = iter(priced)
    results = iter([next(prices) if texts.keys() == roles.keys() else _PENDING for _, texts in latest])
    scored = [
        RolloutGroup(
            group.problem,
            group.path,
            group.history,
            group.prompts,
            group.actions,
            tuple(_scored_turn(turn, next(results), roles) for turn in group.turns),
        )
        for group in groups
    ]
    return scored, stats


def score_texts(
    items: Sequence[tuple[Problem, Mapping[str, str]]],
    *,
    reward: Reward,
    sandbox: Sandbox,
    cache: Cache,
    progress: Progress | None = None,
) -> tuple[list[Scored], ScoreStats]:
    """Price joint actions given as (problem, text by role), in order.

    The reward is asked what still has to run until it wants nothing more; each round runs as one sandbox batch.
    """
    stats = ScoreStats()
    reports: list[dict[str, ExecutionReport]] = [{} for _ in items]
    open_items = list(range(len(items)))
    while open_items:
        wanted = {i: dict(reward.executions(*items[i], reports[i])) for i in open_items}
        wanted = {i: executions for i, executions in wanted.items() if executions}
        _run({e: None for executions in wanted.values() for e in executions.values()}, sandbox, cache, stats, progress)
        for i, executions in wanted.items():
            stats.wanted += len(executions)
            reports[i] |= {name: cache[execution] for name, execution in executions.items()}
        open_items = [i for i in wanted if not _failed(reports[i])]
    results = []
    for (problem, texts), item_reports in zip(items, reports, strict=True):
        masked = _failed(item_reports)
        price = JointReward(0.0, {}) if masked else reward.price(problem, texts, item_reports)
        results.append(Scored(price, item_reports, masked))
    return results, stats


def _run(
    wanted: Mapping[Execution, None], sandbox: Sandbox, cache: Cache, stats: ScoreStats, progress: Progress | None
) -> None:
    new = [execution for execution in wanted if execution not in cache or _infra(cache[execution])]
    if not new:
        return
    started = perf_counter()
    for execution, report in zip(new, sandbox.run(new, progress), strict=True):
        cache[execution] = report
        stats.ran[execution] = report
    stats.seconds += perf_counter() - started


def _scored_turn(turn: Turn, scored: Scored, roles: Mapping[str, str]) -> ScoredTurn:
    given = scored.reward.local
    local = {agent: given[role] for agent, role in roles.items() if role in given}
    return ScoredTurn(turn.picks, replace(scored.reward, local=local), scored.reports, scored.masked)


def _infra(report: ExecutionReport) -> bool:
    return report.status == "infra_error" or any(case.status == "infra_error" for case in report.cases)


def _failed(reports: Mapping[str, ExecutionReport]) -> bool:
    return any(_infra(report) for report in reports.values())
