"""Score: run the programs that the reward requests in the sandbox, then price every joint action.

Execution is data. A failure of the sandbox itself (``infra_error``) masks a joint action; it is never a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from magrpo.interfaces import Progress, Reward, Sandbox
from magrpo.stages.backend import Cache, ScoreStats, Team
from magrpo.types import PENDING, Execution, ExecutionReport, JointReward, Problem, RolloutGroup, ScoredTurn, Turn


@dataclass(frozen=True, slots=True)
class Scored:
    """The price of one joint action and the reports it is based on. ``masked``: the sandbox failed on it."""

    reward: JointReward
    reports: dict[str, ExecutionReport]
    masked: bool


_PENDING = Scored(PENDING, {}, masked=False)


def score(
    groups: Sequence[RolloutGroup[Turn]], team: Team, sandbox: Sandbox, cache: Cache, progress: Progress | None = None
) -> tuple[list[RolloutGroup[ScoredTurn]], ScoreStats]:
    """Price every joint action of every group.

    The reward sees the latest text of every role, from this turn or an earlier one. Until every role has written, the
    reward of a joint action is :data:`~magrpo.types.PENDING`.
    """
    roles = team.roles
    latest_texts = [(group.problem, group.latest(turn)) for group in groups for turn in group.turns]
    complete = [texts.keys() == roles.keys() for _, texts in latest_texts]
    items = [
        (problem, {roles[agent]: text for agent, text in texts.items()})
        for (problem, texts), is_complete in zip(latest_texts, complete, strict=True)
        if is_complete
    ]
    priced, stats = score_texts(items, reward=team.reward, sandbox=sandbox, cache=cache, progress=progress)
    prices = iter(priced)
    results = iter([next(prices) if is_complete else _PENDING for is_complete in complete])
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

    The reward is asked for executions until it requests none; each round runs as one sandbox batch.
    """
    stats = ScoreStats()
    reports: list[dict[str, ExecutionReport]] = [{} for _ in items]
    open_items = list(range(len(items)))
    while open_items:
        wanted = {i: dict(reward.executions(*items[i], reports[i])) for i in open_items}
        wanted = {i: executions for i, executions in wanted.items() if executions}
        _run_new(
            {e: None for executions in wanted.values() for e in executions.values()}, sandbox, cache, stats, progress
        )
        for i, executions in wanted.items():
            stats.wanted += len(executions)
            reports[i] |= {name: cache[execution] for name, execution in executions.items()}
        open_items = [i for i in wanted if not _any_infra_error(reports[i])]
    results = []
    for (problem, texts), item_reports in zip(items, reports, strict=True):
        masked = _any_infra_error(item_reports)
        price = JointReward(0.0, {}) if masked else reward.price(problem, texts, item_reports)
        results.append(Scored(price, item_reports, masked))
    return results, stats


def _run_new(
    wanted: Mapping[Execution, None], sandbox: Sandbox, cache: Cache, stats: ScoreStats, progress: Progress | None
) -> None:
    new = [execution for execution in wanted if execution not in cache or _has_infra_error(cache[execution])]
    if not new:
        return
    started = perf_counter()
    for execution, report in zip(new, sandbox.run(new, progress), strict=True):
        cache[execution] = report
        stats.ran[execution] = report
    stats.seconds += perf_counter() - started


def _scored_turn(turn: Turn, scored: Scored, roles: Mapping[str, str]) -> ScoredTurn:
    local_by_role = scored.reward.local
    local = {agent: local_by_role[role] for agent, role in roles.items() if role in local_by_role}
    return ScoredTurn(turn.picks, replace(scored.reward, local=local), scored.reports, scored.masked)


def _has_infra_error(report: ExecutionReport) -> bool:
    return report.status == "infra_error" or any(case.status == "infra_error" for case in report.cases)


def _any_infra_error(reports: Mapping[str, ExecutionReport]) -> bool:
    return any(_has_infra_error(report) for report in reports.values())
