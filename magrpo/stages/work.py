"""The work of an update: an agent's micro-batches, what a rank has computed of them, and when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor, nn

from magrpo.interfaces import Progress
from magrpo.model.collate import Row
from magrpo.types import Sample
from magrpo_kernels import Groups


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient is not a finite number; the message names the saved batch and remedies."""


class SamplingGapTooLarge(RuntimeError):
    """The samples were not drawn from the weights that they claim, or in another precision; see the message."""


class MicroBatchTooLarge(RuntimeError):
    """A rank that shares models with others ran out of memory; the message is how many tokens to try next."""


@dataclass(frozen=True)
class Work:
    """One agent's samples of one update, split into micro-batches of rows."""

    agent: str
    samples: Sequence[Sample]
    groups: Groups
    """Of the samples, with the returns of their siblings."""
    batches: Sequence[Sequence[Row]]
    divisor: float

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        return [len(sample.completion_ids) for sample in self.samples]

    def put_values(self, table: Tensor, completions: Sequence[int], values: Tensor) -> None:
        """Put the values of these completions' tokens where they belong in a table of all tokens."""
        slots = torch.split(table, self.lengths)
        for i, own in zip(completions, torch.split(values, [self.lengths[i] for i in completions]), strict=True):
            slots[i].copy_(own)

    @property
    def is_smallest(self) -> bool:
        """Whether every micro-batch is one completion."""
        return all(len(rows) == len(rows[0]) == 1 for rows in self.batches)


@dataclass(slots=True)
class Part:
    """What this rank has computed of one agent's gradient. Several threads may fill it."""

    sums: Tensor
    """Loss and metric sums, [name, micro-batch], 0 where another rank computes them."""
    logps: Tensor
    """Log-probabilities of the agent's sampled tokens, 0 where another rank computes them."""
    branch: Tensor | None = None
    """The sum of its lanes, as :func:`take_gradient` returns it; None: it has none, or left it in the parameters."""


@dataclass
class OrderedGradient:
    """The gradient of parameters, of which several threads compute micro-batches.

    These are added in their order, whoever is done first: the sum has the bits that one thread gives.
    """

    parameters: Sequence[nn.Parameter]
    _waiting: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)
    _num_added: int = 0
    _adding: Lock = field(default_factory=Lock)

    def add(self, number: int, loss: Tensor) -> None:
        """Add the gradient of the loss of a micro-batch, by number from 0."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        with self._adding:
            self._waiting[number] = gradients
            while self._num_added in self._waiting:
                for parameter, gradient in zip(self.parameters, self._waiting.pop(self._num_added), strict=True):
                    if gradient is not None:
                        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
                self._num_added += 1


@dataclass
class CompletionCounter:
    """Reports each completion once, even if the work starts over. Several threads may count."""

    progress: Progress | None
    num_done: int = 0
    num_reported: int = 0
    _counting: Lock = field(default_factory=Lock)

    def restart(self) -> None:
        self.num_done = 0

    def add(self, num_completions: int) -> None:
        with self._counting:
            self.num_done += num_completions
            if self.progress and self.num_done > self.num_reported:
                self.progress(self.num_done - self.num_reported)
                self.num_reported = self.num_done
