"""Preferences between joint actions, as advantages of the completions in them: the loss ``madpo`` of an update.

The gradient of the DPO loss with respect to one agent's weights is a policy gradient: every completion is pushed by a
number that depends on the log-probabilities of all agents. It is computed before an epoch from the weights that all
agents have then, so every epoch takes the exact gradient of the joint loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from magrpo.algo.loss import preference_loss
from magrpo.types import Comparison, Sample

CompletionLogps = Mapping[str, Mapping[int, Tensor]]
"""By holder of weights and number of the sample: the log-probabilities of the sample's tokens."""


@dataclass(frozen=True, slots=True)
class Pushes:
    """The advantages of one epoch by holder, and the loss that they follow from."""

    advantages: Mapping[str, Tensor]
    loss: float
    """The mean over nodes with pairs of the mean over their pairs."""
    accuracy: float
    """The mean over nodes of the share of their pairs whose better joint action has become more likely than the worse
    one; ties count half."""


class Preferences:
    """The comparisons of one update. Numbers of samples are those among all samples of a holder of weights."""

    def __init__(
        self,
        comparisons: Sequence[Comparison],
        samples: Mapping[str, Mapping[str, Sequence[Sample]]],
        beta: float,
    ) -> None:
        self._beta = beta
        self._sizes = {holder: sum(map(len, parts.values())) for holder, parts in samples.items()}
        starts: dict[str, tuple[str, int]] = {}
        for holder, parts in samples.items():
            position = 0
            for agent, agent_samples in parts.items():
                starts[agent] = holder, position
                position += len(agent_samples)
        self._nodes: list[tuple[Tensor, list[tuple[str, Tensor]]]] = []
        """For each node with a pair at which an agent that trains acts: the returns of its joint actions, and the
        samples in them by holder."""
        for comparison in comparisons:
            members = [
                (starts[agent][0], torch.tensor(numbers) + starts[agent][1])
                for agent, numbers in comparison.samples.items()
                if agent in starts
            ]
            if members and len(set(comparison.returns)) > 1:
                self._nodes.append((torch.tensor(comparison.returns, dtype=torch.float64), members))

    def list_paired(self, holder: str) -> list[int]:
        """The samples of a holder that are part of a pair, in order."""
        members = [numbers for _, node in self._nodes for name, numbers in node if name == holder]
        return sorted(set(torch.cat(members).tolist())) if members else []

    def weigh(self, before: CompletionLogps, now: CompletionLogps) -> Pushes:
        """The advantages at the weights that gave ``now``; ``before`` are those of the reference."""
        log_ratios = {holder: torch.zeros(size, dtype=torch.float64) for holder, size in self._sizes.items()}
        for holder, by_sample in now.items():
            for number, logps in by_sample.items():
                difference = logps.double() - before[holder][number].double()
                log_ratios[holder][number] = difference.sum().cpu()
        advantages = {holder: torch.zeros_like(ratios) for holder, ratios in log_ratios.items()}
        losses, won = [], []
        for returns, members in self._nodes:
            joint = torch.stack([log_ratios[holder][numbers] for holder, numbers in members]).sum(0)
            found = preference_loss(returns, joint, self._beta)
            for holder, numbers in members:
                advantages[holder].index_add_(0, numbers, found.pushes)
            losses.append(float(found.losses.mean()))
            won.append(float((found.margins.sign() + 1).mean() / 2))
        if not losses:
            return Pushes(advantages, 0.0, 0.0)
        return Pushes(advantages, fmean(losses), fmean(won))
