"""Advantage estimators: how much better a completion's return is than the returns of its siblings.

To add an estimator, write one function here and its row in :data:`ESTIMATORS`. Configurations, their JSON schema and
``magrpo config show`` take the names from that table.

All sums run from left to right in float64. The fused loss forms the paper's advantage again, adding in the same order
(:class:`magrpo_kernels.Groups`), so both have the same bits. The built-in ``sum`` would not do, because since Python
3.12 it compensates for rounding.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from magrpo.algo.returns import join_ties
from magrpo.types import Normalize

CriticKind = Literal["none", "own", "central"]
"""``own``: each agent's value of its own observation; ``central``: the value of all agents' observations together."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """An advantage estimator and its properties."""

    estimate: Callable[[Sequence[float]], list[float]]
    """The advantages of a group, given its returns; the group has at least one."""
    has_baseline: bool = True
    """Whether returns are compared with those of siblings. Equal returns then have advantage 0, so a group of one
    completion, which has no siblings, never trains."""
    critic: CriticKind = "none"
    """The critic whose value of the node is subtracted from the returns before :attr:`estimate` takes them."""
    bias: str = ""
    """The reason why the gradient is biased; empty if it is unbiased up to scale. A run that chooses it warns."""

    def can_train(self, group_size: int, normalize: Normalize) -> bool:
        """Whether groups of this size can have advantages other than 0."""
        return group_size > 1 or not (self.has_baseline or normalize == "std")


def subtract_mean(returns: Sequence[float]) -> list[float]:
    """``R - mean(R)``: MAGRPO, arXiv 2508.04652, section 4. Its expectation is (G - 1)/G of the exact gradient."""
    mean = _add(returns) / len(returns)
    return [value - mean for value in returns]


def leave_one_out(returns: Sequence[float]) -> list[float]:
    """``R`` minus the mean of the other returns, ``(G R - sum R)/(G - 1)``: RLOO, arXiv 2402.14740. Unbiased."""
    size = len(returns)
    scale = size / max(size - 1, 1)
    return [advantage * scale for advantage in subtract_mean(returns)]


def subtract_max(returns: Sequence[float]) -> list[float]:
    """``R - max(R)``: the best sibling as baseline, after ReMax, arXiv 2310.10505."""
    best = max(returns)
    return [value - best for value in returns]


def keep_returns(returns: Sequence[float]) -> list[float]:
    """``R``: REINFORCE, the returns themselves."""
    return list(returns)


ESTIMATORS: Mapping[str, Estimator] = {
    "magrpo": Estimator(subtract_mean),
    "marloo": Estimator(leave_one_out),
    "maremax": Estimator(
        subtract_max,
        bias="the baseline, the best sibling's return, depends on the completion that it judges, so the gradient is "
        "biased",
    ),
    "mareinforce": Estimator(keep_returns, has_baseline=False),
    "iac": Estimator(keep_returns, has_baseline=False, critic="own"),
    "maac": Estimator(keep_returns, has_baseline=False, critic="central"),
}
"""The estimators by the name that configurations use (``algo.estimator``, ``agents.<name>.estimator``)."""

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[*ESTIMATORS]  # so that the schema lists the names and a misspelt one gets a suggestion


def group_advantages(returns: Sequence[float], estimator: EstimatorName, normalize: Normalize = "none") -> list[float]:
    """The advantages of one group: the completions of one agent that are compared with each other.

    ``returns`` are those less the values of a critic if the estimator has one.
    ``normalize = "std"`` divides by the population standard deviation of the returns. If all returns are equal, the
    advantages are exactly 0, unless the estimator has no baseline and nothing is divided.
    """
    if not returns:
        return []
    if normalize == "std":
        returns = join_ties(returns)  # the division would make rounding as large as any other difference
    chosen = ESTIMATORS[estimator]
    if all(value == returns[0] for value in returns) and (chosen.has_baseline or normalize == "std"):
        return [0.0] * len(returns)
    advantages = chosen.estimate(returns)
    if normalize == "std":
        deviation = math.sqrt(_add(distance * distance for distance in subtract_mean(returns)) / len(returns))
        advantages = [advantage / deviation for advantage in advantages]
    return advantages


def _add(values: Iterable[float]) -> float:
    """The sum, added from left to right."""
    total = 0.0
    for value in values:
        total += value
    return total
