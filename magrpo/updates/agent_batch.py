"""One agent's samples of one update in micro-batches, the sums that a pass over them fills, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor, nn

from magrpo.config.sections import AlgoConfig
from magrpo.interfaces import Progress
from magrpo.model.collate import Row
from magrpo.types import Sample
from magrpo_kernels import Groups

_IMPORTANCE_SUMS = {
    "importance": "importance_mean",
    "importance_capped": "importance_capped_frac",
    "importance_squared": "importance_square",
}
"""Sums over tokens that the loss returns, with the names of their means."""
MEANS_OF_AGENTS = {"sampling_gap", "importance_mean", "importance_capped_frac", "importance_ess_frac"}
"""Per-agent metrics that are also logged as a mean over agents."""


@dataclass(frozen=True)
class AgentBatch:
    """One agent's samples of one update, split into micro-batches of rows."""

    agent: str
    samples: Sequence[Sample]
    groups: Groups | None
    """The groups of the samples, with the returns of all siblings. None: the loss takes the stored advantages."""
    micro_batches: Sequence[Sequence[Row]]
    divisor: float
    """Divisor of the loss, which is a sum over tokens."""
    numbers: Sequence[int]
    """The number of each sample among all samples of the update, those without advantage included."""

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each completion."""
        return [len(sample.completion_ids) for sample in self.samples]

    def put_values(self, table: Tensor, completions: Sequence[int], values: Tensor) -> None:
        """Write ``values``, one for each token of the given completions, into the table of all completions' tokens."""
        slots = torch.split(table, self.lengths)
        lengths = [self.lengths[i] for i in completions]
        for i, completion_values in zip(completions, torch.split(values, lengths), strict=True):
            slots[i].copy_(completion_values)

    @property
    def is_smallest(self) -> bool:
        """Whether every micro-batch holds a single completion, so that none can be split further."""
        return all(len(rows) == 1 and len(rows[0]) == 1 for rows in self.micro_batches)


@dataclass(slots=True)
class PartialSums:
    """This rank's share of the sums over one agent's micro-batches. Several threads may fill it."""

    sums: Tensor
    """Loss and metric sums, [name, micro-batch]; 0 where another rank computes them."""
    logps: Tensor
    """Log-probabilities of the agent's sampled tokens; 0 where another rank computes them."""
    branch: Tensor | None = None
    """The gradient summed over this rank's lanes (:func:`~magrpo.updates.lanes.take_gradient`). None: the rank has no
    lanes, or the gradient is already in the parameters."""


@dataclass
class OrderedGradient:
    """Sums the gradients of micro-batches that several threads compute.

    Gradients are added in the order of the micro-batches, whichever thread finishes first, so the sum is bit for bit
    that of a single thread.
    """

    parameters: Sequence[nn.Parameter]
    _waiting: dict[int, Sequence[Tensor | None]] = field(default_factory=dict)
    """Gradients that are computed but not yet added, by the number of their micro-batch."""
    _num_added: int = 0
    _adding: Lock = field(default_factory=Lock)

    def add(self, number: int, loss: Tensor) -> None:
        """Compute the gradient of the loss of micro-batch ``number``, from 0, and add it when its turn comes."""
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        with self._adding:
            self._waiting[number] = gradients
            while self._num_added in self._waiting:
                for parameter, gradient in zip(self.parameters, self._waiting.pop(self._num_added), strict=True):
                    if gradient is None:
                        continue
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
                self._num_added += 1


@dataclass
class CompletionCounter:
    """Reports each finished completion once, even if the pass starts over. Several threads may count."""

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


def uses_ratio(algo: AlgoConfig) -> bool:
    """Whether later epochs use the clipped probability ratio; preferences need none."""
    return algo.update_epochs > 1 and algo.loss == "policy_gradient"


def list_sums(algo: AlgoConfig, lag: int) -> list[str]:
    """The names of the sums that a micro-batch contributes to."""
    names = ["loss", "tokens", "sampling_gap"]
    if uses_ratio(algo):
        names.append("clipped")
    if algo.beta > 0:
        names.append("kl")
    if lag:
        names += _IMPORTANCE_SUMS
    return names


def summarize_agent(totals: Mapping[str, float], samples: Sequence[Sample]) -> dict[str, float]:
    """Means over trained tokens. ``entropy`` is estimated from the sampled tokens: minus their mean log-probability."""
    tokens = totals.get("tokens", 0.0)
    num_sampled = sum(len(sample.completion_ids) for sample in samples)
    metrics = {
        "loss": totals.get("loss", 0.0),
        "grad_norm": totals.get("grad_norm", 0.0),
        "tokens": tokens,
        "sampling_gap": totals["sampling_gap"] / tokens if tokens else 0.0,
        "entropy": -math.fsum(logp for sample in samples for logp in sample.sampling_logps) / max(num_sampled, 1),
    }
    for total, mean in (("clipped", "clip_frac"), ("kl", "kl"), *_IMPORTANCE_SUMS.items()):
        if total in totals:
            metrics[mean] = totals[total] / max(tokens, 1.0)
    if square := metrics.pop("importance_square", 0.0):
        metrics["importance_ess_frac"] = metrics["importance_mean"] ** 2 / square
    return metrics
