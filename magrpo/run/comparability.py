"""Whether the results of two configurations can be compared."""

from collections.abc import Mapping
from typing import Any

from magrpo.config.run import BaselineRow, RunConfig
from magrpo.interfaces import RewardPlugin
from magrpo.rewards.common import ProgramReward, ScaledReward

HasReward = RunConfig | BaselineRow
"""A configuration with a reward and penalties."""
_SECTIONS = ("eval", "env", "reward", "penalty", "sandbox", "engine", "model", "rollout")
"""Sections of a configuration on which an evaluation depends."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")
"""Keys of ``rollout`` on which an evaluation depends."""


def select_protocol(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Select from the sections of a configuration what an evaluation depends on, except problems and agents."""
    protocol = {name: dict(tree[name]) for name in _SECTIONS}
    protocol["eval"].pop("every", None)
    protocol["rollout"] = {key: value for key, value in protocol["rollout"].items() if key in _SAMPLING}
    return protocol


def score_alike(first: HasReward, other: HasReward) -> bool:
    """Whether equal texts earn equal shares of the maximum, whoever wrote them: ``writing_solo`` scores as ``writing``.

    Then returns can be compared. Scale and shift do not matter, as returns are fractions of the maximum.
    """
    one, two = first.reward, other.reward
    are_related = isinstance(one, type(two)) or isinstance(two, type(one))
    return (
        are_related
        and type(one).price is type(two).price
        and dict(one.maxima) == dict(two.maxima)
        and _list_terms(one) == _list_terms(two)
        and first.penalty == other.penalty
    )


def _list_terms(reward: RewardPlugin) -> dict[str, object]:
    """The fields of a reward that change returns."""
    unscored = reward.unscored if isinstance(reward, ScaledReward) else frozenset()
    return {field: value for field, value in reward.model_dump().items() if field not in {"kind", *unscored}}


def pass_alike(first: HasReward, other: HasReward) -> bool:
    """Whether a program that passes in one also passes in the other, so that pass@1 can be compared."""
    rewards = [config.reward for config in (first, other)]
    return len({reward.refuse_forgeable for reward in rewards if isinstance(reward, ProgramReward)}) < 2
