"""Score: run the programs that the reward requests in the sandbox, then price every joint action.

The outcome of an execution is data, never an exception. A failure of the sandbox itself (``infra_error``) or of the
problem's own test (``test_error``) masks the joint action instead of giving it a reward.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from magrpo.checks.rewards import compute_price, request_executions
from magrpo.checks.runners import run_executions
from magrpo.envs.program import AgentProgram
from magrpo.errors import ConfigError, quote_value
from magrpo.interfaces import Progress, Reward, Sandbox
from magrpo.run import files
from magrpo.stages.backend import Cache, ScoreStats, Team, collect_reports
from magrpo.stages.context import Metrics, StageContext
from magrpo.stages.penalty import subtract_penalties
from magrpo.types import (
    PENDING,
    UNJUDGED,
    Episode,
    Execution,
    ExecutionReport,
    JointReward,
    Problem,
    Reports,
    RolloutGroup,
    ScoredTurn,
    Turn,
)

log = logging.getLogger(__name__)
JointTexts = tuple[Problem, Mapping[str, str]]
"""A joint action: its problem, and the text of each role."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The price of one joint action and the reports behind it. ``masked``: a report is unjudged."""

    reward: JointReward
    reports: dict[str, ExecutionReport]
    masked: bool


def score(
    groups: Sequence[RolloutGroup[Turn]],
    team: Team,
    sandbox: Sandbox,
    cache: Cache,
    progress: Progress | None = None,
) -> tuple[list[RolloutGroup[ScoredTurn]], ScoreStats]:
    """Price every joint action of every group, and subtract the penalty of its answers.

    The reward sees the latest text of every role, from this turn or an earlier one. Until every role has written, the
    reward of a joint action is :data:`~magrpo.types.PENDING`. An episode of a program has the texts, or the reward,
    that the program returned, and ``env.failure_reward`` if it failed.
    """
    roles = team.roles
    settled: list[Scored | None] = []
    items: list[JointTexts] = []
    for group in groups:
        for index, turn in enumerate(group.turns):
            texts = {roles[agent]: text for agent, text in group.latest(turn).items()}
            price = None if len(texts) == len(roles) else Scored(PENDING, {}, masked=False)
            if group.episodes:
                texts = group.episodes[index].texts
                price = _settle_episode(group.episodes[index], team)
            settled.append(price)
            if price is None:
                items.append((group.problem, texts))
    priced, stats = score_texts(items, reward=team.reward, sandbox=sandbox, cache=cache, progress=progress)
    prices = iter(priced)
    results = iter([next(prices) if price is None else price for price in settled])
    scored = []
    for group in groups:
        turns = tuple(_scored_turn(turn, next(results), roles) for turn in group.turns)
        scored.append(subtract_penalties(group.with_scores(turns), team))
    return scored, stats


def score_texts(
    items: Sequence[JointTexts],
    *,
    reward: Reward,
    sandbox: Sandbox,
    cache: Cache,
    progress: Progress | None = None,
) -> tuple[list[Scored], ScoreStats]:
    """Price joint actions, in order. The sandbox runs each round of executions that the reward requests as one batch.

    Prices do not include the penalty, which depends on more than the texts.

    Raises ConfigError, naming reward and problem, if the reward returns anything but a usable price.
    """
    stats = ScoreStats()
    reports: list[dict[str, ExecutionReport]] = [{} for _ in items]
    open_items = list(range(len(items)))

    def run_programs(new: list[Execution]) -> Sequence[ExecutionReport]:
        started = perf_counter()
        try:
            return run_executions(sandbox, new, progress)
        finally:
            stats.seconds += perf_counter() - started

    while open_items:
        requested = {i: request_executions(reward, *items[i], reports[i]) for i in open_items}
        wanted = [execution for executions in requested.values() for execution in executions.values()]
        found, ran = collect_reports(wanted, cache, run_programs)
        stats.ran |= ran
        stats.wanted += len(wanted)
        for i, executions in requested.items():
            reports[i] |= {name: found[execution] for name, execution in executions.items()}
        # The reward is asked again about items that had requests, until it requests nothing more.
        open_items = [i for i in open_items if requested[i] and not _is_unjudged(reports[i].values())]
    _warn_of_tests(items, reports)
    prices = {
        i: compute_price(reward, *item, reports[i])
        for i, item in enumerate(items)
        if not _is_unjudged(reports[i].values())
    }
    masked_price = JointReward(0.0, {})
    return [Scored(prices.get(i, masked_price), reports[i], i not in prices) for i in range(len(items))], stats


def _settle_episode(episode: Episode, team: Team) -> Scored | None:
    """The price of an episode that needs none of its texts; None if the reward prices them."""
    if episode.is_priced_by_texts:
        return None
    if episode.status == "infra_error":
        return Scored(JointReward(0.0, {}), {}, masked=True)
    if episode.returned is not None:
        return Scored(episode.returned, {}, masked=False)
    assert isinstance(team.env, AgentProgram)
    return Scored(JointReward(team.env.failure_reward, dict.fromkeys(team.reward.maxima, 0.0)), {}, masked=False)


def _scored_turn(turn: Turn, scored: Scored, roles: Mapping[str, str]) -> ScoredTurn:
    """The joint action with its price, in which local rewards are keyed by agent instead of role.

    A program that returns local rewards names the roles, too. Raises ConfigError if no agent has such a role, which is
    possible for a program whose texts the reward prices.
    """
    local_by_role = scored.reward.local
    if vacant := local_by_role.keys() - roles.values():
        raise ConfigError(
            f"reward: gives the roles {', '.join(sorted(vacant))} local rewards, but no agent has them; there are: "
            f"{', '.join(roles.values())}; give each of these roles an agent (agents.N.role; env.models maps the names "
            "that the program asks for), or turn local rewards off (reward.local_weight = 0)"
        )
    local = {agent: local_by_role[role] for agent, role in roles.items() if role in local_by_role}
    return ScoredTurn(turn.picks, replace(scored.reward, local=local), scored.reports, scored.masked)


def _is_unjudged(reports: Iterable[ExecutionReport]) -> bool:
    return any(report.statuses & UNJUDGED for report in reports)


def _warn_of_tests(items: Sequence[JointTexts], reports: Sequence[Reports]) -> None:
    """Warn of problems whose test cannot be run, naming the first."""
    faults = {
        problem.task_id: case.message
        for (problem, _), item_reports in zip(items, reports, strict=True)
        for report in item_reports.values()
        for case in report.cases
        if case.status == "test_error"
    }
    if faults:
        task_id, message = next(iter(faults.items()))
        others = f" (and {len(faults) - 1} more problems)" if len(faults) > 1 else ""
        log.warning("skipped the samples of problem %s%s: %s", quote_value(task_id), others, message)


def write_scored_groups(context: StageContext) -> Metrics:
    """Run the programs in the sandbox and score every joint action of one level of the trees."""
    groups = files.read_groups(context.store.folder(context.inputs[0]))
    resources = context.resources
    scored, stats = score(groups, context.team, resources.sandbox, context.memory.reports, context.advance)
    files.write_scores(context.folder, scored)
    metrics = stats.metrics()
    if metrics["sandbox/forgeable_frac"]:
        share = f"{metrics['sandbox/forgeable_frac']:.1%}"
        context.console.say(f"{share} of the programs that ran could forge their verdicts (docs/sandbox.md)")
    return metrics
