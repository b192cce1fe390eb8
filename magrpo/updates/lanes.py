"""Lanes: partial sums of an agent's gradient, shared among ranks and added in an order that the ranks do not change.

An update deals the micro-batches of an agent to ``optim.lanes`` lanes and sums the gradient of each lane by itself.
Lanes are then added in pairs, the pairs in pairs again, and so on. As the number of lanes is a power of two, the lanes
of one rank are a whole branch of that tree, whatever the number of ranks. A rank therefore passes on a single partial
sum for each agent, and the bits of the total depend only on the number of lanes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Ranks(Protocol):
    """The processes that compute one update together; all call the same methods in the same order."""

    @property
    def number(self) -> int:
        """The number of this rank, from 0."""

    @property
    def count(self) -> int:
        """The number of ranks."""

    def all_agree(self, flag: bool) -> bool:
        """Whether ``flag`` is true on all ranks."""

    def wait_for_all(self) -> None:
        """Return when all ranks have called this."""

    def fill_in(self, table: Tensor) -> Tensor:
        """The sum of the ranks' float32 tables, each element non-zero on one rank at most. May change ``table``."""

    def add_branches(self, branch: Tensor | None, owners: Sequence[int], size: int) -> Tensor:
        """The sum of the float32 vectors of the ranks ``owners``, by :func:`add_in_pairs`, on every rank.

        ``branch`` is the vector of this rank, of length ``size``; None if the rank is not an owner.
        """


@dataclass(frozen=True, slots=True)
class OneRank:
    """The only rank of an update in one process; there is nobody to exchange anything with."""

    number: int = 0
    count: int = 1

    def all_agree(self, flag: bool) -> bool:
        return flag

    def wait_for_all(self) -> None:
        pass

    def fill_in(self, table: Tensor) -> Tensor:
        return table

    def add_branches(self, branch: Tensor | None, owners: Sequence[int], size: int) -> Tensor:
        assert branch is not None, "one rank owns every lane"
        return branch


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Which rank computes which lanes of which agent. Made by :meth:`make`."""

    num_lanes: int
    num_blocks: int
    """Number of blocks of neighbouring lanes that the lanes of an agent are split into, each on another rank."""
    agents_at_once: int
    """Number of agents that are computed at the same time, on different ranks."""

    @classmethod
    def make(cls, num_lanes: int, num_agents: int, num_ranks: int) -> LanePlan:
        """Split the lanes over the ranks, and the agents as well if there are fewer lanes than ranks.

        Lanes come first because they have nearly equal lengths, and agents may not. ``num_ranks`` must divide
        ``num_lanes`` (a power of two) times ``num_agents``: see :mod:`magrpo.planning.place_check`.
        """
        num_blocks = math.gcd(num_lanes, num_ranks)
        agents_at_once = num_ranks // num_blocks
        assert num_agents % agents_at_once == 0, "check_place refuses other numbers of ranks"
        return cls(num_lanes, num_blocks, agents_at_once)

    @property
    def is_trivial(self) -> bool:
        """Whether one rank sums every gradient in one lane."""
        return self.num_lanes == 1 and self.num_blocks * self.agents_at_once == 1

    def find_owners(self, agent: int) -> list[int]:
        """The ranks that compute the lanes of the agent at position ``agent``, in the order of the lanes."""
        return [block * self.agents_at_once + agent % self.agents_at_once for block in range(self.num_blocks)]

    def lanes_of(self, agent: int, rank: int) -> range:
        """The lanes of the agent at position ``agent`` that ``rank`` computes."""
        owners = self.find_owners(agent)
        if rank not in owners:
            return range(0)
        length = self.num_lanes // self.num_blocks
        block = owners.index(rank)
        return range(block * length, (block + 1) * length)


def deal_batches(sizes: Sequence[int], num_lanes: int) -> list[list[int]]:
    """Deal micro-batches, in order, each to the lane with the least work so far; returns the numbers in each lane."""
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    work = [0] * num_lanes
    for number, size in enumerate(sizes):
        lane = work.index(min(work))
        lanes[lane].append(number)
        work[lane] += size
    return lanes


def add_in_pairs(vectors: Iterable[Tensor]) -> Tensor:
    """Add neighbouring vectors, then neighbouring sums, and so on. May change the vectors.

    The number of vectors is a power of two. If ``vectors`` is an iterator, only one vector for each level of the tree
    is in memory at a time.
    """
    sums: list[tuple[int, Tensor]] = []  # level and sum of each finished branch; levels descend
    for vector in vectors:
        level = 0
        while sums and sums[-1][0] == level:
            vector = sums.pop()[1].add_(vector)
            level += 1
        sums.append((level, vector))
    ((_, total),) = sums
    return total


def take_gradient(parameters: Sequence[nn.Parameter]) -> Float[Tensor, " n"]:
    """Remove the gradients from the parameters and join them; the vector ends in a flag, 0 or 1, for each parameter."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    for parameter in parameters:
        parameter.grad = None
    return torch.cat([*(gradient.flatten() for gradient in gradients), present])


def put_gradient(vector: Float[Tensor, " n"], parameters: Sequence[nn.Parameter]) -> None:
    """Undo :func:`take_gradient`. Summed flags count lanes: a parameter without gradient in any lane gets none."""
    sizes = [parameter.numel() for parameter in parameters]
    *gradients, present = torch.split(vector, [*sizes, len(sizes)])
    for parameter, gradient, count in zip(parameters, gradients, present.tolist(), strict=True):
        parameter.grad = gradient.view_as(parameter) if count else None
