"""Lanes: partial sums of an agent's gradient, shared among ranks and added in an order that no number of ranks changes.

An update deals the micro-batches of an agent to ``optim.lanes`` lanes and sums the gradient of each lane alone. Lanes
are then added in pairs, these in pairs again, and so on. As their number is a power of two, the lanes of one rank are a
whole branch of that tree, whatever the number of ranks: a rank hands on one partial sum of each agent, and the bits of
the total depend on the number of lanes only.
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
    """The processes that compute one update together; each calls the same methods in the same order."""

    @property
    def number(self) -> int:
        """The number of this one, from 0."""

    @property
    def count(self) -> int:
        """How many there are."""

    def agree_on(self, fits: bool) -> bool:
        """Whether ``fits`` is true on all of them."""

    def fill_in(self, table: Tensor) -> Tensor:
        """The whole float32 table, of which each element is non-zero on one rank at most. May change ``table``."""

    def add_branches(self, branch: Tensor | None, owners: Sequence[int], size: int) -> Tensor:
        """The sum over ``owners`` of their float32 vectors of ``size``, by :func:`add_in_pairs`, on every rank.

        ``branch`` is this rank's vector, None if it is no owner.
        """


@dataclass(frozen=True, slots=True)
class OneRank:
    """An update in one process, which does nothing when ranks exchange."""

    number: int = 0
    count: int = 1

    def agree_on(self, fits: bool) -> bool:
        return fits

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
    """Blocks of neighbouring lanes that an agent's lanes are split into, each on another rank."""
    agents_at_once: int
    """Number of agents that are computed at the same time, on different ranks."""

    @classmethod
    def make(cls, num_lanes: int, num_agents: int, num_ranks: int) -> LanePlan:
        """Split lanes first, agents only where there are fewer lanes than ranks: lanes are of like length.

        ``num_ranks`` must divide ``num_lanes`` (a power of two) times ``num_agents``: see :mod:`magrpo.planning.fit`.
        """
        num_blocks = math.gcd(num_lanes, num_ranks)
        agents_at_once = num_ranks // num_blocks
        assert num_agents % agents_at_once == 0, "check_place refuses other numbers of ranks"
        return cls(num_lanes, num_blocks, agents_at_once)

    @property
    def is_trivial(self) -> bool:
        """Whether one rank sums every gradient in one lane."""
        return self.num_lanes == self.num_blocks * self.agents_at_once == 1

    def find_owners(self, agent: int) -> list[int]:
        """The ranks that compute the lanes of an agent, by its position, in the order of lanes."""
        return [block * self.agents_at_once + agent % self.agents_at_once for block in range(self.num_blocks)]

    def lanes_of(self, agent: int, rank: int) -> range:
        """The lanes of an agent, by its position, that a rank computes."""
        owners = self.find_owners(agent)
        if rank not in owners:
            return range(0)
        length, block = self.num_lanes // self.num_blocks, owners.index(rank)
        return range(block * length, (block + 1) * length)


def deal_batches(sizes: Sequence[int], num_lanes: int) -> list[list[int]]:
    """The micro-batches of each lane, by number: in their order, each to the lane with the least work so far."""
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    work = [0] * num_lanes
    for number, size in enumerate(sizes):
        lane = work.index(min(work))
        lanes[lane].append(number)
        work[lane] += size
    return lanes


def add_in_pairs(vectors: Iterable[Tensor]) -> Tensor:
    """Add neighbours, then neighbouring sums, and so on; their number is a power of two. May change the vectors.

    Holds one vector for each level of the tree if ``vectors`` is an iterator.
    """
    sums: list[tuple[int, Tensor]] = []  # each of a branch, and its level; levels descend
    for vector in vectors:
        level = 0
        while sums and sums[-1][0] == level:
            vector = sums.pop()[1].add_(vector)
            level += 1
        sums.append((level, vector))
    ((_, total),) = sums
    return total


def take_gradient(parameters: Sequence[nn.Parameter]) -> Float[Tensor, " n"]:
    """The gradients as one vector, removed from the parameters; at its end a 1 for each parameter that has one."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    for parameter in parameters:
        parameter.grad = None
    return torch.cat([*(gradient.flatten() for gradient in gradients), present])


def put_gradient(vector: Float[Tensor, " n"], parameters: Sequence[nn.Parameter]) -> None:
    """Undo :func:`take_gradient`; parameters that had a gradient in no lane get none."""
    sizes = [parameter.numel() for parameter in parameters]
    *gradients, present = torch.split(vector, [*sizes, len(sizes)])
    for parameter, gradient, count in zip(parameters, gradients, present.tolist(), strict=True):
        parameter.grad = gradient.view_as(parameter) if count else None
