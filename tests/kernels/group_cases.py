"""Groups of returns, their advantages by the stage that stores them, and the inputs of tokens that belong to them."""

from __future__ import annotations

import torch

from magrpo.algo.advantages import group_advantages
from magrpo_kernels import Groups, TokenInputs
from magrpo_kernels.advantages import ESTIMATORS, Normalize

SIZES = (4, 1, 7, 2, 130, 3, 16, 5)
"""Of groups; the one of 3 is all equal, and so is that of 1."""


def group_inputs(normalize: Normalize, num_tokens: int, device: str) -> tuple[TokenInputs, TokenInputs]:
    """The inputs of tokens with their groups, and with the stored advantages: those of ``credit``, in float32.

    Every estimator has a group of several returns, and the last holds advantages already.
    """
    generator = torch.Generator().manual_seed(5)
    names = [ESTIMATORS[number % 4] for number in range(len(SIZES) - 1)] + ["given"]
    groups = [
        (torch.full((size,), 0.1) if size == 3 else torch.randn(size, generator=generator)).double() * 3.7
        + 100 * (i % 2)
        for i, size in enumerate(SIZES)
    ]
    stored: list[float] = []
    for name, returns in zip(names, groups, strict=True):
        stored += returns.tolist() if name == "given" else group_advantages([returns.tolist()], name, normalize)[0]
    returns = torch.cat(groups).to(device)
    bounds = torch.tensor([0, *SIZES], device=device).cumsum(0)
    estimators = torch.tensor([ESTIMATORS.index(name) for name in names], device=device)
    sequences = torch.randint(len(stored), (num_tokens,), generator=generator)
    ids = torch.randint(9, (num_tokens,), generator=generator).to(device)
    weights = torch.rand(num_tokens, generator=generator)
    fused = TokenInputs(ids, weights.to(device), groups=Groups(sequences.to(device), returns, bounds, estimators))
    # On the CPU: on a GPU torch multiplies by the reciprocal of 12, which is not the quotient to the last bit.
    coefficients = torch.tensor(stored)[sequences] / 12 * weights
    return fused, TokenInputs(ids, coefficients.to(device))
