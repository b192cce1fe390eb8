"""The records that the losses take: the inputs of each token, the options of a call, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Impl = Literal["auto", "triton", "torch"]


class Support(NamedTuple):
    """The ids that each of ``N`` tokens was drawn from, concatenated."""

    ids: Tensor
    """(M,); for each token its distinct candidates, the token included."""
    bounds: Tensor
    """(N + 1,) from 0 to M: token ``i`` was drawn from ``ids[bounds[i]:bounds[i + 1]]``."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The inputs of ``N`` sampled tokens. A token counts if its coefficient or its KL coefficient is not 0."""

    token_ids: Int[Tensor, " N"]
    coefficients: Float[Tensor, " N"]
    """Advantage times weights over the divisor: the ``c`` of :mod:`magrpo_kernels.row`."""
    old_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the policy before this update: turns on the clipped ratio."""
    ref_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the reference policy: turns on the k3 penalty."""
    kl_coefficients: Float[Tensor, " N"] | None = None
    """Weight of each token's k3 penalty."""
    support: Support | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """The tensors that hold one value for each token, by name."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def select_tokens(self, index: Tensor | slice) -> TokenInputs:
        """The inputs of some of the tokens."""
        columns = self.columns
        columns |= {name: values[index] for name, values in columns.items() if values is not None}
        if self.support is None:
            return TokenInputs(**columns)
        starts, ends = self.support.bounds[:-1][index], self.support.bounds[1:][index]
        bounds = torch.cat([starts.new_zeros(1), (ends - starts).cumsum(0)])
        places = torch.arange(int(bounds[-1]), device=bounds.device)
        ids = self.support.ids[places + (starts - bounds[:-1]).repeat_interleave(ends - starts)]
        return TokenInputs(**columns, support=Support(ids, bounds))

    def find_counted(self, vocabulary: int) -> Tensor | None:
        """Indices (n,) of the tokens that count; None if all do.

        Raises:
            ValueError: the id of a token that counts, or an id of the support, is outside the vocabulary.
        """
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
    entropy: bool = False
    """Whether to return each token's entropy."""
    impl: Impl = "auto"
    """``torch`` runs anywhere, ``triton`` needs CUDA tensors; ``auto`` chooses by the tensors' device."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper clip range, both given."""
        assert self.clip_low is not None
        assert self.clip_high is not None
        return self.clip_low, self.clip_high


DEFAULTS = LossOptions()

SCHEMA = (
    "Tensor token_ids, Tensor coefficients, Tensor? old_logps, Tensor? ref_logps, Tensor? kl_coefficients, "
    "Tensor? support_ids, Tensor? support_bounds, "
    "float temperature, float? clip_low, float? clip_high, bool entropy, str impl"
)
"""Of :class:`TokenInputs` and :class:`LossOptions` as the twelve arguments of a registered operation."""
_COLUMNS = ("token_ids", "coefficients", "old_logps", "ref_logps", "kl_coefficients")


def flatten_arguments(inputs: TokenInputs, options: LossOptions, num_tokens: int) -> tuple[Any, ...]:
    """Check the inputs and list the arguments of a registered operation, in the order of :data:`SCHEMA`."""
    check_inputs(inputs, options, num_tokens)
    flat_options = options.temperature, options.clip_low, options.clip_high, options.entropy, options.impl
    return *inputs.columns.values(), *(inputs.support or (None, None)), *flat_options


def read_arguments(arguments: tuple[Any, ...]) -> tuple[TokenInputs, LossOptions]:
    """The records from the arguments that :func:`flatten_arguments` made; arguments after them are ignored."""
    support = None if arguments[5] is None else Support(*arguments[5:7])
    columns: dict[str, Any] = dict(zip(_COLUMNS, arguments[:5], strict=True))
    return TokenInputs(**columns, support=support), LossOptions(*arguments[7:12])


def check_inputs(inputs: TokenInputs, options: LossOptions, num_tokens: int) -> None:
    """Raise ValueError for shapes and options that do not fit together."""
    sized = [(name, values, num_tokens) for name, values in inputs.columns.items()]
    if inputs.support is not None:
        sized.append(("support_bounds", inputs.support.bounds, num_tokens + 1))
    for name, values, size in sized:
        if values is not None and values.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), got {tuple(values.shape)}")
    if options.temperature <= 0:
        raise ValueError(f"temperature must be positive, got {options.temperature}")
    if inputs.old_logps is not None and (options.clip_low is None or options.clip_high is None):
        raise ValueError("old_logps need clip_low and clip_high")
    if (inputs.ref_logps is None) != (inputs.kl_coefficients is None):
        raise ValueError("ref_logps and kl_coefficients go together")
    if options.impl not in get_args(Impl):
        raise ValueError(f"unknown impl {options.impl!r}: auto, triton or torch")
