"""Group-relative advantages over a ragged list of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Estimator = Literal["magrpo", "marloo", "maremax", "mareinforce"]
Normalize = Literal["none", "std"]
ESTIMATORS = (*get_args(Estimator), "given")
"""What the advantage of a group's returns may be; ``given``: the returns themselves, whatever the normalisation."""


def group_advantages(
    returns: Float[Tensor, " N"],
    group_offsets: Int[Tensor, " P+1"],
    estimator: Estimator = "magrpo",
    normalize: Normalize = "none",
) -> Float[Tensor, " N"]:
    """The advantage of each return within its group: arXiv 2508.04652, section 4.

    ``magrpo``: ``R - mean``; ``marloo``: ``(G R - sum)/(G - 1)``; ``maremax``: ``R - max``; ``mareinforce``: ``R``.
    ``normalize = "std"`` divides by the group's population standard deviation, computed in two passes. A group whose
    returns are all equal (``max == min``) has advantage exactly 0, except that ``mareinforce`` without normalisation,
    which has no baseline, keeps its returns.

    Group ``p`` holds ``returns[group_offsets[p]:group_offsets[p + 1]]``; it may be empty.

    Raises:
        ValueError: an unknown estimator or normalisation, or offsets that do not cover the returns.
    """
    chosen = {"estimator": (estimator, Estimator), "normalize": (normalize, Normalize)}
    for name, (value, choices) in chosen.items():
        if value not in get_args(choices):
            raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(get_args(choices))}")
    advantages: Tensor = torch.ops.magrpo.group_advantages(returns, group_offsets, estimator, normalize)
    return advantages


def advantages_by_group(
    returns: Float[Tensor, " N"], bounds: Int[Tensor, " P+1"], estimators: Int[Tensor, " P"], normalize: Normalize
) -> Float[Tensor, " N"]:
    """:func:`group_advantages` with an estimator for each group, as its index in :data:`ESTIMATORS`."""
    advantages = returns
    of_return = estimators.repeat_interleave(bounds.diff())
    for index in sorted(set(estimators.tolist())):
        if ESTIMATORS[index] != "given":
            estimated = group_advantages(returns, bounds, ESTIMATORS[index], normalize)
            advantages = torch.where(of_return == index, estimated, advantages)
    return advantages


@torch.library.custom_op(
    "magrpo::group_advantages",
    mutates_args=(),
    schema="(Tensor returns, Tensor group_offsets, str estimator, str normalize) -> Tensor",
)
def _group_advantages(returns: Tensor, group_offsets: Tensor, estimator: str, normalize: str) -> Tensor:
    sizes = group_offsets.diff()
    if len(group_offsets) == 0 or int(group_offsets[0]) != 0 or bool((sizes < 0).any()):
        raise ValueError("group_offsets must rise from 0")
    if int(group_offsets[-1]) != len(returns):
        raise ValueError(f"group_offsets end at {int(group_offsets[-1])}, there are {len(returns)} returns")
    group = torch.repeat_interleave(torch.arange(len(sizes), device=returns.device), sizes)  # (N,)
    count = sizes.clamp(min=1).to(returns.dtype)
    empty = returns.new_zeros(len(sizes))
    mean = empty.index_add(0, group, returns) / count
    high = empty.scatter_reduce(0, group, returns, "amax", include_self=False)
    low = empty.scatter_reduce(0, group, returns, "amin", include_self=False)
    centred = returns - mean[group]
    advantages = {
        "magrpo": centred,
        "marloo": centred * (count / (count - 1).clamp(min=1))[group],
        "maremax": returns - high[group],
        "mareinforce": returns,
    }[estimator]
    equal = (high == low)[group]
    if normalize == "std":
        deviation = (empty.index_add(0, group, centred.square()) / count).sqrt()[group]
        advantages = advantages / torch.where(equal, torch.ones_like(deviation), deviation)
    keeps_equal = estimator == "mareinforce" and normalize == "none"
    return advantages.clone() if keeps_equal else advantages.masked_fill(equal, 0.0)


@_group_advantages.register_fake
def _(returns: Tensor, *_: object) -> Tensor:
    return torch.empty_like(returns)
