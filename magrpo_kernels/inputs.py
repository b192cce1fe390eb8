"""The records that the losses take: the inputs of each token, its group, the options of a call, and their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from magrpo_kernels.advantages import Normalize, advantages_by_group

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
class Groups:
    """The returns that the tokens' advantages are formed from; see :mod:`magrpo_kernels.advantages`."""

    sequences: Int[Tensor, " N"]
    """For each token the place of its sequence's return in ``returns``."""
    returns: Float[Tensor, " S"]
    """Float64, group by group."""
    bounds: Int[Tensor, " P+1"]
    """From 0 to S: group ``p`` holds ``returns[bounds[p]:bounds[p + 1]]``."""
    estimators: Int[Tensor, " P"]
    """Of each group, as the index in :data:`magrpo_kernels.advantages.ESTIMATORS`."""

    def list_groups(self) -> Tensor:
        """(S,): the group of each return."""
        sizes = self.bounds.diff()
        return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=len(self.returns))

    def move_to(self, device: torch.device) -> Groups:
        """The same on a device."""
        return Groups(*(getattr(self, name).to(device) for name in Groups.__slots__))

    def select_tokens(self, index: Tensor | slice) -> Groups:
        """The groups of some of the tokens."""
        return replace(self, sequences=self.sequences[index])


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The inputs of ``N`` sampled tokens. A token counts if its coefficient or its KL coefficient is not 0."""

    token_ids: Int[Tensor, " N"]
    coefficients: Float[Tensor, " N"]
    """The ``c`` of :mod:`magrpo_kernels.row`; with ``groups`` what the advantage over the divisor is multiplied by."""
    old_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the policy before this update: turns on the clipped ratio."""
    ref_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the reference policy: turns on the k3 penalty."""
    kl_coefficients: Float[Tensor, " N"] | None = None
    """Weight of each token's k3 penalty."""
    sampling_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the policy that drew the tokens: turns on the truncated importance weight."""
    groups: Groups | None = None
    """Turns on the advantage, formed from the returns of the token's group."""
    support: Support | None = None

    @property
    def columns(self) -> dict[str, Any]:
        """The tensors that hold one value for each token, by name, without those of ``groups``."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def select_tokens(self, index: Tensor | slice) -> TokenInputs:
        """The inputs of some of the tokens."""
        columns = self.columns
        columns |= {name: values[index] for name, values in columns.items() if values is not None}
        columns["groups"] = None if self.groups is None else self.groups.select_tokens(index)
        if self.support is None:
            return TokenInputs(**columns)
        starts, ends = self.support.bounds[:-1][index], self.support.bounds[1:][index]
        bounds = torch.cat([starts.new_zeros(1), (ends - starts).cumsum(0)])
        places = torch.arange(int(bounds[-1]), device=bounds.device)
        ids = self.support.ids[places + (starts - bounds[:-1]).repeat_interleave(ends - starts)]
        return TokenInputs(**columns, support=Support(ids, bounds))

    def form_advantages(self, options: LossOptions) -> TokenInputs:
        """The same inputs with the advantages in the coefficients, and without groups."""
        if self.groups is None:
            return self
        groups = self.groups
        advantages = advantages_by_group(groups.returns, groups.bounds, groups.estimators, options.normalize)
        coefficients = advantages[groups.sequences].float() / options.divisor * self.coefficients
        return replace(self, coefficients=coefficients, groups=None)

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
    normalize: Normalize = "none"
    """Whether advantages are divided by the standard deviation of their group."""
    divisor: float = 1.0
    """What advantages are divided by."""
    importance_cap: float | None = None
    """Upper bound of the importance weight, needed with ``sampling_logps``."""
    soft_cap: float | None = None
    """Bound of logits that the model caps: ``soft_cap tanh(z / soft_cap)``; for logits from hidden states."""
    float32_logits: bool = False
    """Whether logits from hidden states in half precision are float32, as ``soft_cap`` makes them in any case."""
    entropy: bool = False
    """Whether to return each token's entropy."""
    checked: bool = False
    """Every token counts and every id is in the vocabulary: the call does not wait for the device to find out."""
    backward_once: bool = False
    """Backward runs at most once, so that it may scale the gradients where they lie."""
    impl: Impl = "auto"
    """``torch`` runs anywhere, ``triton`` needs CUDA tensors; ``auto`` chooses by the tensors' device."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper clip range, both given."""
        assert self.clip_low is not None
        assert self.clip_high is not None
        return self.clip_low, self.clip_high

    def uses_triton(self, values: Tensor) -> bool:
        """Whether the row operation on ``values`` is Triton's, whose arithmetic is float32.

        Raises:
            ValueError: Triton was chosen for float64.
        """
        if self.impl == "triton" and values.dtype == torch.float64:
            raise ValueError("impl 'triton' computes in float32 and takes no float64; choose torch or auto")
        return self.impl == "triton" or (self.impl == "auto" and values.is_cuda and values.dtype != torch.float64)


SCHEMA = (
    "Tensor token_ids, Tensor coefficients, Tensor? old_logps, Tensor? ref_logps, Tensor? kl_coefficients, "
    "Tensor? sampling_logps, "
    "Tensor? sequences, Tensor? returns, Tensor? group_bounds, Tensor? estimators, "
    "Tensor? support_ids, Tensor? support_bounds, "
    "float temperature, float? clip_low, float? clip_high, str normalize, float divisor, float? importance_cap, "
    "float? soft_cap, bool float32_logits, bool entropy, bool checked, bool backward_once, str impl"
)
"""Of :class:`TokenInputs` and :class:`LossOptions` as the arguments of a registered operation."""
NUM_ARGUMENTS = SCHEMA.count(",") + 1
_COLUMNS = ("token_ids", "coefficients", "old_logps", "ref_logps", "kl_coefficients", "sampling_logps")


def flatten_arguments(inputs: TokenInputs, options: LossOptions, num_tokens: int) -> tuple[Any, ...]:
    """Check the inputs and list the arguments of a registered operation, in the order of :data:`SCHEMA`."""
    check_inputs(inputs, options, num_tokens)
    flat_groups = [None if inputs.groups is None else getattr(inputs.groups, name) for name in Groups.__slots__]
    flat_options = tuple(getattr(options, name) for name in LossOptions.__slots__)
    return *inputs.columns.values(), *flat_groups, *(inputs.support or (None, None)), *flat_options


def read_arguments(arguments: tuple[Any, ...]) -> tuple[TokenInputs, LossOptions]:
    """The records from the arguments that :func:`flatten_arguments` made; arguments after them are ignored."""
    columns: dict[str, Any] = dict(zip(_COLUMNS, arguments[:6], strict=True))
    groups = None if arguments[6] is None else Groups(*arguments[6:10])
    support = None if arguments[10] is None else Support(*arguments[10:12])
    return TokenInputs(**columns, groups=groups, support=support), LossOptions(*arguments[12:NUM_ARGUMENTS])


def check_inputs(inputs: TokenInputs, options: LossOptions, num_tokens: int) -> None:
    """Raise ValueError for shapes, dtypes and options that do not fit together."""
    sized = [(name, values, num_tokens) for name, values in inputs.columns.items()]
    if inputs.support is not None:
        sized.append(("support_bounds", inputs.support.bounds, num_tokens + 1))
    if inputs.groups is not None:
        sized.append(("sequences", inputs.groups.sequences, num_tokens))
        sized.append(("estimators", inputs.groups.estimators, len(inputs.groups.bounds) - 1))
    for name, values, size in sized:
        if values is not None and values.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), got {tuple(values.shape)}")
        if name in ("token_ids", "sequences") and (values.is_floating_point() or values.dtype == torch.bool):
            raise ValueError(f"{name} must be integers, got {values.dtype}")
    if inputs.groups is not None and inputs.groups.returns.dtype != torch.float64:
        raise ValueError(f"returns must be float64, got {inputs.groups.returns.dtype}")
    for name in ("temperature", "divisor"):
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"{name} must be positive, got {getattr(options, name)}")
    if inputs.old_logps is not None and (options.clip_low is None or options.clip_high is None):
        raise ValueError("old_logps need clip_low and clip_high")
    if options.clip_low is not None and not 0 <= options.clip_low <= 1:
        raise ValueError(f"clip_low must be between 0 and 1, got {options.clip_low}")
    if options.clip_high is not None and not options.clip_high >= 0:
        raise ValueError(f"clip_high must be 0 or more, got {options.clip_high}")
    if (inputs.ref_logps is None) != (inputs.kl_coefficients is None):
        raise ValueError("ref_logps and kl_coefficients go together")
    if (inputs.sampling_logps is None) != (options.importance_cap is None):
        raise ValueError("sampling_logps and importance_cap go together")
    if options.importance_cap is not None and not options.importance_cap > 0:
        raise ValueError(f"importance_cap must be positive, got {options.importance_cap}")
    if options.soft_cap is not None and not 0 < options.soft_cap < math.inf:
        raise ValueError(f"soft_cap must be positive, got {options.soft_cap}")
    if options.normalize not in get_args(Normalize):
        raise ValueError(f"unknown normalize {options.normalize!r}: choose one of {', '.join(get_args(Normalize))}")
    if options.impl not in get_args(Impl):
        raise ValueError(f"unknown impl {options.impl!r}: auto, triton or torch")
