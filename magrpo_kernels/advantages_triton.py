"""Group-relative advantages as one Triton launch: one program for each group, which fits in one block."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ESTIMATORS = {"magrpo": 0, "marloo": 1, "maremax": 2, "mareinforce": 3}


@triton.jit  # type: ignore[untyped-decorator]
def advantages_kernel(  # type: ignore[no-untyped-def]
    returns_ptr,  # (N,) float32 or float64
    offsets_ptr,  # (P+1,) int64
    out_ptr,  # (N,)
    ESTIMATOR: tl.constexpr,
    STD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0)
    start = tl.load(offsets_ptr + group)
    count = (tl.load(offsets_ptr + group + 1) - start).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < count
    returns = tl.load(returns_ptr + start + lanes, mask=inside, other=0.0)
    high = tl.max(tl.where(inside, returns, float("-inf")), 0)
    low = tl.min(tl.where(inside, returns, float("inf")), 0)
    size = tl.maximum(count, 1).to(returns.dtype)
    centred = tl.where(inside, returns - tl.sum(returns, 0) / size, 0.0)
    if ESTIMATOR == 0:
        advantages = centred
    elif ESTIMATOR == 1:
        advantages = centred * (size / tl.maximum(size - 1, 1))
    elif ESTIMATOR == 2:
        advantages = returns - high
    else:
        advantages = returns
    if STD:
        variance = tl.sum(centred * centred, 0) / size
        # high < low in an empty group, whose lanes would divide 0 by 0.
        advantages = advantages / tl.where(high <= low, 1.0, tl.sqrt(variance))
    if ESTIMATOR != 3 or STD:  # mareinforce keeps its returns in a group of equal ones
        advantages = tl.where(high == low, 0.0, advantages)
    tl.store(out_ptr + start + lanes, advantages, mask=inside)


def group_advantages_triton(returns: Tensor, group_offsets: Tensor, estimator: str, normalize: str) -> Tensor:
    """See :func:`magrpo_kernels.advantages.group_advantages`; arguments are checked."""
    returns = returns.contiguous()
    out = torch.empty_like(returns)
    if len(returns):
        largest = int(group_offsets.diff().max())
        block: Any = triton.next_power_of_2(largest)
        advantages_kernel[(len(group_offsets) - 1,)](
            returns,
            group_offsets.to(torch.int64).contiguous(),
            out,
            ESTIMATOR=ESTIMATORS[estimator],
            STD=normalize == "std",
            BLOCK=block,
        )
    return out
