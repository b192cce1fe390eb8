"""The records that the losses take: the inputs of each token, and the options that all tokens share.

Shapes in annotations are checked by the tests, which switch on jaxtyping and beartype, not in a training run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from magrpo_kernels.groups import Groups

Impl = Literal["auto", "triton", "torch"]


class Support(NamedTuple):
    """The ids that each of ``N`` tokens was drawn from, concatenated."""

    ids: Tensor
    """The distinct candidates of each token, itself included, one token after another: (M,)."""
    bounds: Tensor
    """Bounds from 0 to M, (N + 1,): token ``i`` was drawn from ``ids[bounds[i]:bounds[i + 1]]``."""

    def select_tokens(self, part: slice) -> Support:
        """Select the candidates of neighbouring tokens."""
        bounds = self.bounds[part.start : part.stop + 1]
        first, end = bounds[[0, -1]].tolist()
        return Support(self.ids[first:end], bounds - first)


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The inputs of ``N`` sampled tokens."""

    token_ids: Int[Tensor, " N"]
    weights: Float[Tensor, " N"]
    """Weight of each token's advantage. 0 leaves the token no gradient but that of the k3 penalty; its id must still be
    in the vocabulary, and its logit finite."""
    advantages: Float[Tensor, " N"] | None = None
    """Advantage of each token; None: it is formed from ``groups``."""
    groups: Groups | None = None
    """The returns from which the paper's advantages are formed; None: ``advantages`` are given."""
    old_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the policy before this update. They switch on the clipped ratio."""
    ref_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the reference policy. They switch on the k3 penalty."""
    kl_coefficients: Float[Tensor, " N"] | None = None
    """Weight of the k3 penalty of each token; required with ``ref_logps``."""
    sampling_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the policy that drew the tokens. They switch on the truncated importance weight."""
    support: Support | None = None
    """The ids from which truncated sampling drew the tokens; None: the whole vocabulary."""

    def __post_init__(self) -> None:
        if (self.advantages is None) == (self.groups is None):
            raise ValueError("give either advantages or groups")
        if (self.ref_logps is None) != (self.kl_coefficients is None):
            raise ValueError("ref_logps and kl_coefficients go together")

    def select_tokens(self, part: slice) -> TokenInputs:
        """Select the inputs of neighbouring tokens."""
        selected: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value = value[part]
            elif value is not None:
                value = value.select_tokens(part)
            selected[field.name] = value
        return TokenInputs(**selected)

    def form_advantages(self) -> TokenInputs:
        """The same inputs with advantages in place of groups."""
        if self.groups is None:
            return self
        return replace(self, advantages=self.groups.form_advantages()[self.groups.sequences].float(), groups=None)


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The options that all tokens of a call share."""

    temperature: float = 1.0
    clip_low: float | None = None
    """Clip range of the probability ratio, ``1 - clip_low`` to ``1 + clip_high``; required with ``old_logps``."""
    clip_high: float | None = None
    divisor: float = 1.0
    """Divisor of advantages."""
    importance_cap: float | None = None
    """Upper bound of the importance weight; required with ``sampling_logps``."""
    soft_cap: float | None = None
    """Bound of logits that a model caps, ``soft_cap tanh(z / soft_cap)``; only for logits from hidden states."""
    float32_logits: bool = False
    """Whether logits from half-precision hidden states are float32; with ``soft_cap`` they always are."""
    backward_once: bool = False
    """Whether the caller promises that backward runs at most once, so that it may scale the gradients in place."""
    impl: Impl = "auto"
    """``torch`` runs anywhere, ``triton`` needs CUDA tensors, and ``auto`` chooses by the device of the tensors."""

    def __post_init__(self) -> None:
        positive = {
            "temperature": self.temperature,
            "divisor": self.divisor,
            "importance_cap": self.importance_cap,
            "soft_cap": self.soft_cap,
        }
        for name, value in positive.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if (self.clip_low is None) != (self.clip_high is None):
            raise ValueError("clip_low and clip_high go together")
        if self.clip_low is not None and not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low must be between 0 and 1, got {self.clip_low}")
        if self.clip_high is not None and not self.clip_high >= 0:
            raise ValueError(f"clip_high must be 0 or more, got {self.clip_high}")

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lower and upper clip range, which must be set."""
        assert self.clip_low is not None
        assert self.clip_high is not None
        return self.clip_low, self.clip_high

    def check_inputs(self, inputs: TokenInputs) -> None:
        """Raise ValueError if the inputs need an option that is not set, or an option needs inputs that are missing."""
        if inputs.old_logps is not None and self.clip_low is None:
            raise ValueError("old_logps need clip_low and clip_high")
        if (inputs.sampling_logps is None) != (self.importance_cap is None):
            raise ValueError("sampling_logps and importance_cap go together")

    def uses_triton(self, values: Tensor) -> bool:
        """Whether to use Triton for the row operation on ``values``; its arithmetic is float32.

        Raises:
            ValueError: Triton was chosen for float64.
        """
        if self.impl == "triton" and values.dtype == torch.float64:
            raise ValueError("impl 'triton' computes in float32 and takes no float64; choose torch or auto")
        return self.impl == "triton" or (self.impl == "auto" and values.is_cuda and values.dtype != torch.float64)
