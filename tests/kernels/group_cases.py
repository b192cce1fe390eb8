"""Groups of returns, their advantages by the stage that stores them, and the inputs of tokens that belong to them."""

from __future__ import annotations

import torch

from magrpo.algo.advantages import group_advantages
from magrpo.types import Normalize
from magrpo_kernels import Groups, TokenInputs

SIZES = (4, 1, 7, 2, 130, 3, 16, 5)
"""Of groups; the one of 3 is all equal, and so is that of 1."""


def group_inputs(normalize: Normalize, num_tokens: int, device: str) -> tuple[TokenInputs, TokenInputs]:
    """The inputs of tokens with their groups, and with the stored advantages: those of ``credit``, in float32.

    Of the tokens, 16 or more, some belong to each group.
    """
    generator = torch.Generator().manual_seed(5)
    groups = [
        (torch.full((size,), 0.1) if size == 3 else torch.randn(size, generator=generator)).double() * 3.7
        + 100 * (i % 2)
        for i, size in enumerate(SIZES)
    ]
    stored = [value for returns in groups for value in group_advantages(returns.tolist(), "magrpo", normalize)]
    sizes = torch.tensor(SIZES)
    ends = sizes.cumsum(0)
    edges = torch.cat([ends - sizes, ends - 1])  # the first and the last sequence of each group
    drawn = torch.randint(len(stored), (num_tokens - len(edges),), generator=generator)
    sequences = torch.cat([edges, drawn])
    ids = torch.randint(9, (num_tokens,), generator=generator).to(device)
    weights = torch.rand(num_tokens, generator=generator)
    starts, ends = (ends - sizes).repeat_interleave(sizes), ends.repeat_interleave(sizes)
    table = Groups(sequences, torch.cat(groups), starts, ends, divides_by_std=normalize == "std")
    fused = TokenInputs(ids, weights.to(device), groups=table.move_to(torch.device(device)))
    return fused, TokenInputs(ids, weights.to(device), torch.tensor(stored)[sequences].to(device))
