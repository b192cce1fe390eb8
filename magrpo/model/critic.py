"""Critics: linear value heads on the hidden states of the frozen bases, and their file.

The base without adapter never changes, so neither do the features of a prompt: a head is all that trains. Heads are on
the CPU in float32, whatever device runs the base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from magrpo.errors import ConfigError, quote_error
from magrpo.model.collate import collate, make_probe_sample, plan_batches
from magrpo.model.forward import head_weights, hidden_states
from magrpo.model.policy import Policy


@torch.no_grad()
def encode_prompts(
    policy: Policy,
    agent: str,
    prompts: Sequence[tuple[int, ...]],
    micro_batch_tokens: int,
    progress: Callable[[int], None],
) -> Float[Tensor, "N D"]:
    """The features of prompts: the last hidden state of the agent's frozen base at the last token, normalised.

    Equal prompts are computed once. ``progress`` counts prompts.
    """
    distinct = list(dict.fromkeys(prompts))
    asked = [make_probe_sample(prompt_ids, (0,)) for prompt_ids in distinct]  # the first token is asked
    features: dict[tuple[int, ...], Tensor] = {}
    for rows in plan_batches(asked, micro_batch_tokens, share_prompts=False):
        batch = collate(asked, rows, policy.device)
        with policy.reference(agent) as model:
            states = hidden_states(model, batch).float().cpu()
        states = nn.functional.layer_norm(states, states.shape[1:])
        features |= {distinct[i]: state for i, state in zip(batch.samples, states, strict=True)}
        progress(len(batch.samples))
    progress(len(prompts) - len(distinct))
    return torch.stack([features[prompt_ids] for prompt_ids in prompts])


def count_features(policy: Policy, agent: str) -> int:
    """The width ``D`` of the features of an agent's prompts."""
    with policy.reference(agent) as model:
        return head_weights(model)[0].shape[1]


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a critic fits the returns of an iteration, before it learnt from them."""

    loss: float
    """Mean squared error."""
    explained_variance: float | None
    """The share of the variance of the returns that the values explain; below 0: a constant would be better. None: all
    returns are equal."""

    @classmethod
    def of(cls, values: Sequence[float], targets: Sequence[float]) -> Fit:
        """Compare values with the returns that came."""
        returns = torch.tensor(targets, dtype=torch.float64)
        loss = float((torch.tensor(values, dtype=torch.float64) - returns).square().mean())
        variance = float(returns.var(correction=0))
        varies = _remove_rounding(variance**0.5, float(returns.mean())) > 0
        return cls(loss, 1 - loss / variance if varies else None)


def _remove_rounding(std: float, mean: float) -> float:
    """The deviation of numbers with this mean; 0 if they are equal, and only the mean is rounded."""
    return std if std > 1e-12 * abs(mean) else 0.0


class Critic:
    """One value head, ``V = mean + std * (w x + b)``, with its optimizer.

    ``mean`` and ``std`` are those of all returns seen so far. When they change, ``w`` and ``b`` change so that no value
    does (PopArt, arXiv 1602.07714), and so one learning rate suits rewards of any scale. ``w`` and ``b`` begin at 0.
    """

    def __init__(self, num_features: int, lr: float) -> None:
        self._head = nn.Linear(num_features, 1)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=lr, weight_decay=0.0)
        self._count, self._mean, self._std = 0, 0.0, 0.0

    @property
    def _scale(self) -> float:
        """The deviation by which values are normalised: 1 as long as all returns are equal."""
        return self._std or 1.0

    @property
    def has_learnt(self) -> bool:
        """Whether it has seen any return; before, it values everything at 0."""
        return self._count > 0

    @torch.no_grad()
    def value(self, features: Float[Tensor, "N D"]) -> list[float]:
        """The values of observations."""
        normalised: list[float] = self._head(features)[:, 0].tolist()
        return [self._mean + self._scale * value for value in normalised]

    def fit(self, features: Float[Tensor, "N D"], targets: Sequence[float], epochs: int) -> None:
        """Take ``epochs`` optimizer steps on the mean squared error of all observations."""
        self._rescale(targets)
        wanted = (torch.tensor(targets, dtype=torch.float64) - self._mean) / self._scale
        for _ in range(epochs):
            self._optimizer.zero_grad()
            loss = (self._head(features)[:, 0] - wanted.float()).square().mean()
            loss.backward()
            self._optimizer.step()

    @torch.no_grad()
    def _rescale(self, targets: Sequence[float]) -> None:
        """Count ``targets`` in ``mean`` and ``std``, and keep all values."""
        earlier_scale = self._scale
        new = torch.tensor(targets, dtype=torch.float64)
        count = self._count + len(targets)
        mean = (self._count * self._mean + float(new.sum())) / count
        old_squares = self._count * (self._std**2 + (self._mean - mean) ** 2)
        squares = old_squares + float((new - mean).square().sum())
        moved = self._mean - mean if self.has_learnt else 0.0
        self._count, self._mean, self._std = count, mean, _remove_rounding((squares / count) ** 0.5, mean)
        if self.has_learnt:
            self._head.weight.mul_(earlier_scale / self._scale)
            self._head.bias.mul_(earlier_scale / self._scale).add_(moved / self._scale)

    def state(self) -> dict[str, Any]:
        """Everything that :meth:`restore` needs, as ``torch.save`` takes it."""
        returns = {"count": self._count, "mean": self._mean, "std": self._std}
        return {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict(), "returns": returns}

    @classmethod
    def restore(cls, state: Mapping[str, Any], lr: float) -> Critic:
        """The critic of :meth:`state`, bit for bit, with this learning rate."""
        critic = cls(state["head"]["weight"].shape[1], lr)
        critic._head.load_state_dict(state["head"])
        critic._optimizer.load_state_dict(state["optimizer"])
        critic._optimizer.param_groups[0]["lr"] = lr
        returns = state["returns"]
        critic._count, critic._mean, critic._std = returns["count"], returns["mean"], returns["std"]
        return critic


def write_critics(path: Path, critics: Mapping[str, Critic]) -> None:
    """Write the critics of a run, by name."""
    torch.save({name: critic.state() for name, critic in critics.items()}, path)


def read_critics(path: Path, lr: float) -> dict[str, Critic]:
    """Read the critics that :func:`write_critics` wrote. Raises ConfigError if the file is missing or damaged.

    Code in the file is never run.
    """
    try:
        states: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{path}: holds no critics: {quote_error(error)}") from error
    return {name: Critic.restore(state, lr) for name, state in states.items()}
