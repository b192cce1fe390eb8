"""The credit of nodes by settings of which most tests need few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from magrpo.algo.advantages import EstimatorName
from magrpo.config.sections import AlgoConfig, RolloutConfig
from magrpo.stages.credit import CreditRules, credit
from magrpo.types import RolloutGroup, Sample, ScoredTurn

ALIGNED = RolloutConfig()


def credit_with(
    groups: Sequence[RolloutGroup[ScoredTurn]],
    algo: AlgoConfig,
    agents: Sequence[str],
    estimators: Mapping[str, EstimatorName] | None = None,
    *,
    rollout: RolloutConfig = ALIGNED,
    num_turns: int = 1,
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """See :func:`magrpo.stages.credit.credit`. No agent has a critic."""
    return credit(groups, agents, CreditRules(algo, estimators or {}, rollout, num_turns))
