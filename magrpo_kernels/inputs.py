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
    """(M,); for each token its distinct candidates, the token included."""
    bounds: Tensor
    """(N + 1,) from 0 to M: token ``i`` was drawn from ``ids[bounds[i]:bounds[i + 1]]``."""

    def select_tokens(self, index: Tensor | slice) -> Support:
        """The candidates of some of the tokens."""
        starts, ends = self.bounds[:-1][index], self.bounds[1:][index]
        bounds = torch.cat([starts.new_zeros(1), (ends - starts).cumsum(0)])
        places = torch.arange(int(bounds[-1]), device=bounds.device)
        ids = self.ids[places + (starts - bounds[:-1]).repeat_interleave(ends - starts)]
        return Support(ids, bounds)


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The inputs of ``N`` sampled tokens. A token counts if its coefficient or its KL coefficient is not 0."""

    token_ids: Int[Tensor, " N"]
    coefficients: Float[Tensor, " N"]
    """The ``c`` of :mod:`magrpo_kernels.row`: the advantage over the divisor, times a weight. With ``groups``: the
    weight alone."""
    old_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the policy before this update: turns on the clipped ratio."""
    ref_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the reference policy: turns on the k3 penalty."""
    kl_coefficients: Float[Tensor, " N"] | None = None
    """Weight of each token's k3 penalty, needed with ``ref_logps``."""
    sampling_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the policy that drew the tokens: turns on the truncated importance weight."""
    groups: Groups | None = None
    """The returns that the paper's advantages are formed from; None: ``coefficients`` hold the advantages."""
    support: Support | None = None
    """The ids that truncated sampling drew the tokens from; None: the whole vocabulary."""

    def __post_init__(self) -> None:
        if (self.ref_logps is None) != (self.kl_coefficients is None):
            raise ValueError("ref_logps and kl_coefficients go together")

    def select_tokens(self, index: Tensor | slice) -> TokenInputs:
        """The inputs of some of the tokens."""
        selected: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value = value[index]
            elif value is not None:
                value = value.select_tokens(index)
            selected[field.name] = value
        return TokenInputs(**selected)

    def form_advantages(self, divisor: float) -> TokenInputs:
        """The same inputs with the advantages in the coefficients, and without groups."""
        if self.groups is None:
            return self
        advantages = self.groups.form_advantages()[self.groups.sequences].float()
        return replace(self, coefficients=advantages / divisor * self.coefficients, groups=None)

    def find_counted(self, vocabulary: int) -> Tensor | None:
        """Indices (n,) of the tokens that count; None if all do. Needs the advantages in the coefficients.

        Raises:
            ValueError: the id of a token that counts, or an id of the support, is outside the vocabulary.
        """
        assert self.groups is None
        counted = self.coefficients != 0
        if self.kl_coefficients is not None:
            counted = counted | (self.kl_coefficients != 0)
        ids = self.token_ids
        if bool((counted & ((ids < 0) | (ids >= vocabulary))).any()):
            raise ValueError(f"token_ids: an id that counts is outside the vocabulary of {vocabulary}")
        if self.support is not None:
            candidates = self.support.ids
            if bool(((candidates < 0) | (candidates >= vocabulary)).any()):
                raise ValueError(f"support: an id is outside the vocabulary of {vocabulary}")
        index = counted.nonzero().squeeze(1)
        return None if len(index) == len(ids) else index


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The options that all tokens of a call share."""

    temperature: float = 1.0
    clip_low: float | None = None
    """Clip range of the probability ratio, needed with ``old_logps``: ``1 - clip_low`` to ``1 + clip_high``."""
    clip_high: float | None = None
    divisor: float = 1.0
    """Divisor of the advantages that are formed from groups."""
    importance_cap: float | None = None
    """Upper bound of the importance weight, needed with ``sampling_logps``."""
    soft_cap: float | None = None
    """Bound of logits that the model caps: ``soft_cap tanh(z / soft_cap)``; for logits from hidden states."""
    float32_logits: bool = False
    """Whether logits from hidden states in half precision are float32, as ``soft_cap`` makes them in any case."""
    checked: bool = False
    """Promises that every token counts and every id is in the vocabulary, so that the call need not wait for the device
    to find out."""
    backward_once: bool = False
    """Promises that backward runs at most once, so that it may scale the gradients in place."""
    impl: Impl = "auto"
    """``torch`` runs anywhere, ``triton`` needs CUDA tensors; ``auto`` chooses by the tensors' device."""

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
        """Lower and upper clip range, both given."""
        assert self.clip_low is not None
        assert self.clip_high is not None
        return self.clip_low, self.clip_high

    def check_inputs(self, inputs: TokenInputs) -> None:
        """Raise ValueError if the inputs need an option that is not given, or the other way round."""
        if inputs.old_logps is not None and self.clip_low is None:
            raise ValueError("old_logps need clip_low and clip_high")
        if (inputs.sampling_logps is None) != (self.importance_cap is None):
            raise ValueError("sampling_logps and importance_cap go together")

    def uses_triton(self, values: Tensor) -> bool:
        """Whether the row operation on ``values`` is Triton's, whose arithmetic is float32.

        Raises:
            ValueError: Triton was chosen for float64.
        """
        if self.impl == "triton" and values.dtype == torch.float64:
            raise ValueError("impl 'triton' computes in float32 and takes no float64; choose torch or auto")
        return self.impl == "triton" or (self.impl == "auto" and values.is_cuda and values.dtype != torch.float64)
