"""Groups of returns, from which the paper's advantages are formed (arXiv 2508.04652, section 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """The returns of ``S`` sequences, and the sequence that each of ``N`` tokens belongs to."""

    sequences: Int[Tensor, " N"]
    """The sequence of each token, as an index into ``returns``."""
    returns: Float[Tensor, " S"]
    """The return of each sequence in float64, group by group."""
    starts: Int[Tensor, " S"]
    """Start, in ``returns``, of the group of each sequence, which includes the sequence itself."""
    ends: Int[Tensor, " S"]
    """End, in ``returns``, of the group of each sequence."""
    divides_by_std: bool = False
    """Whether advantages are divided by the population standard deviation of the group."""

    def move_to(self, device: torch.device) -> Groups:
        """The same groups on ``device``."""
        return replace(
            self,
            sequences=self.sequences.to(device),
            returns=self.returns.to(device),
            starts=self.starts.to(device),
            ends=self.ends.to(device),
        )

    def select_tokens(self, index: Tensor | slice) -> Groups:
        """The groups of some of the tokens."""
        return replace(self, sequences=self.sequences[index])

    def form_advantages(self) -> Float[Tensor, " S"]:
        """The return of each sequence minus the mean of its group, in float64.

        It is exactly 0 if all returns of a group are equal. The Triton kernel is tested against this definition; both
        add the returns of a group from left to right.
        """
        count = (self.ends - self.starts).to(self.returns.dtype)
        # Each group keeps its sums in the slot of its first sequence.
        slots = torch.zeros_like(self.returns)
        total = slots.index_add(0, self.starts, self.returns)
        highest = slots.scatter_reduce(0, self.starts, self.returns, "amax", include_self=False)
        lowest = slots.scatter_reduce(0, self.starts, self.returns, "amin", include_self=False)
        equal = (highest == lowest)[self.starts]
        advantages = self.returns - total[self.starts] / count
        if self.divides_by_std:
            squares = slots.index_add(0, self.starts, advantages.square())[self.starts]
            deviation = (squares / count).sqrt()
            advantages = advantages / torch.where(equal, 1.0, deviation)
        return advantages.masked_fill(equal, 0.0)
