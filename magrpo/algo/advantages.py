"""Group-relative advantages: the definition over the kernel."""

from collections.abc import Sequence

import torch

import magrpo_kernels
from magrpo.types import Estimator, Normalize


def group_advantages(
    returns: Sequence[Sequence[float]], estimator: Estimator, normalize: Normalize = "none"
) -> list[list[float]]:
    """The advantage of every completion over its siblings: one inner list for each node and agent, ``G`` long or less.

    ``magrpo``: MAGRPO, arXiv 2508.04652, section 4; ``marloo``: leave-one-out, RLOO, arXiv 2402.14740; ``maremax``: the
    best sibling as baseline, after ReMax, arXiv 2310.10505; ``mareinforce``: REINFORCE, the returns themselves. The
    formulas are those of :func:`magrpo_kernels.group_advantages`, computed in float64.
    """
    sizes = torch.tensor([0, *(len(group) for group in returns)])
    flat = torch.tensor([value for group in returns for value in group], dtype=torch.float64)
    advantages = magrpo_kernels.group_advantages(flat, sizes.cumsum(0), estimator, normalize)
    return [part.tolist() for part in torch.split(advantages, sizes[1:].tolist())]
