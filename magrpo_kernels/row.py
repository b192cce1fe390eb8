"""The row operation: from the logits of a token to its loss and to the gradient with respect to those logits.

For one token with logits ``z`` (V,), temperature ``t``, sampled id ``y`` and ``p = softmax(z / t)``::

    logp = z_y / t - logsumexp(z / t)
    loss = -c logp                                                    strictly on-policy (REINFORCE)
         = -min(r c, clip(r, 1 - low, 1 + high) c), r = exp(logp - old_logp)     PPO, arXiv 1707.06347
         + k (exp(d) - d - 1),              d = ref_logp - logp                  k3, joschu.net/blog/kl-approx.html
    dloss/dz = (g / t) (onehot(y) - p),     g = dloss/dlogp

With a support ``S``, the ids that truncated sampling (top-k, nucleus) drew from, ``z`` is -inf outside ``S``: the
log-sum-exp is over ``S``, and so is the gradient (the "keep sampling mask" of DeepSeek-V3.2, arXiv 2512.02556).

``c`` is advantage * mask / normaliser. It is known before the forward pass, so ``g`` needs nothing from the backward
pass and the gradient overwrites the logits in the pass that reads them: they are read twice and written once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Impl = Literal["auto", "triton", "torch"]


class PolicyLoss(NamedTuple):
    """``loss`` is differentiable; ``logps`` and ``entropy`` (natural logarithms, float32 or wider) are not."""

    loss: Tensor
    """()"""
    logps: Tensor
    """(N,); 0 for tokens that were skipped."""
    entropy: Tensor | None
    """(N,) on request; 0 for tokens that were skipped."""


class Support(NamedTuple):
    """The ids that each of ``N`` tokens was drawn from, one token after the other."""

    ids: Tensor
    """(M,); each token's own without repetition, the token among them."""
    bounds: Tensor
    """(N + 1,) from 0 to M: token ``i`` has ``ids[bounds[i]:bounds[i + 1]]``."""


class RowOptions(NamedTuple):
    """What all tokens of a call share."""

    temperature: float = 1.0
    clip_low: float | None = None
    clip_high: float | None = None
    entropy: bool = False
    impl: Impl = "auto"


ROW_SCHEMA = (
    "Tensor token_ids, Tensor coefficients, Tensor? old_logps, Tensor? ref_logps, Tensor? kl_coefficients, "
    "Tensor? support_ids, Tensor? support_bounds, "
    "float temperature, float? clip_low, float? clip_high, bool entropy, str impl"
)
"""Of :class:`RowInputs` and :class:`RowOptions`, as arguments of a registered operation."""


class RowInputs(NamedTuple):
    """What belongs to each token: (N,) each, but for the two of a :class:`Support`."""

    token_ids: Tensor
    coefficients: Tensor
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    kl_coefficients: Tensor | None = None
    support_ids: Tensor | None = None
    support_bounds: Tensor | None = None

    def select(self, index: Tensor | slice) -> RowInputs:
        """The same for some of the tokens."""

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index]

        return RowInputs(
            self.token_ids[index],
            self.coefficients[index],
            pick(self.old_logps),
            pick(self.ref_logps),
            pick(self.kl_coefficients),
            *self._select_support(index),
        )

    def _select_support(self, index: Tensor | slice) -> tuple[Tensor | None, Tensor | None]:
        if self.support_ids is None or self.support_bounds is None:
            return None, None
        starts, ends = self.support_bounds[:-1][index], self.support_bounds[1:][index]
        bounds = torch.cat([starts.new_zeros(1), (ends - starts).cumsum(0)])
        places = torch.arange(int(bounds[-1]), device=bounds.device)
        return self.support_ids[places + (starts - bounds[:-1]).repeat_interleave(ends - starts)], bounds

    def counted(self) -> Tensor:
        """Which tokens the loss depends on: (N,) bool."""
        counted = self.coefficients != 0
        return counted if self.kl_coefficients is None else counted | (self.kl_coefficients != 0)


def policy_loss_from_logits(
    logits: Float[Tensor, "N V"],
    token_ids: Int[Tensor, " N"],
    coefficients: Float[Tensor, " N"],
    *,
    temperature: float = 1.0,
    old_logps: Float[Tensor, " N"] | None = None,
    ref_logps: Float[Tensor, " N"] | None = None,
    kl_coefficients: Float[Tensor, " N"] | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    support: Support | None = None,
    return_entropy: bool = False,
    impl: Impl = "auto",
) -> PolicyLoss:
    """The summed policy-gradient loss of ``N`` tokens from their logits; see this module for the equations.

    Tokens with coefficient 0 (and KL coefficient 0) are skipped: no gradient, ``logps`` 0, any id allowed. The logits
    are left alone; their gradient is written in the pass that reads them, into the one buffer that backward returns.
    With a ``support`` log-probabilities, entropy and gradient are those of the distribution over it.

    Raises:
        ValueError: shapes, devices or options do not fit together, or an id outside the vocabulary counts.
    """
    inputs = RowInputs(token_ids, coefficients, old_logps, ref_logps, kl_coefficients, *(support or (None, None)))
    options = RowOptions(temperature, clip_low, clip_high, return_entropy, impl)
    check(inputs, options, len(logits))
    gradient = torch.is_grad_enabled() and logits.requires_grad
    loss, logps, entropy, _ = torch.ops.magrpo.policy_loss_from_logits(logits, *inputs, *options, gradient)
    return PolicyLoss(loss, logps.detach(), entropy.detach() if return_entropy else None)


def check(inputs: RowInputs, options: RowOptions, num_tokens: int) -> None:
    """Refuse shapes and options that do not fit; see the public functions.

    Raises:
        ValueError: as they say.
    """
    for name, value in zip(inputs._fields, inputs, strict=True):
        size = num_tokens + (name == "support_bounds")
        if value is not None and name != "support_ids" and value.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), got {tuple(value.shape)}")
    if options.temperature <= 0:
        raise ValueError(f"temperature must be positive, got {options.temperature}")
    if inputs.old_logps is not None and (options.clip_low is None or options.clip_high is None):
        raise ValueError("old_logps need clip_low and clip_high")
    if (inputs.ref_logps is None) != (inputs.kl_coefficients is None):
        raise ValueError("ref_logps and kl_coefficients go together")
    if options.impl not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown impl {options.impl!r}: auto, triton or torch")


def counted_rows(inputs: RowInputs, vocabulary: int) -> Tensor | None:
    """Indices of the tokens that count, (n,); None if all of them do.

    Raises:
        ValueError: one of them has an id outside the vocabulary, or there is one in the support.
    """
    counted = inputs.counted()
    ids, support = inputs.token_ids, inputs.support_ids
    if bool((counted & ((ids < 0) | (ids >= vocabulary))).any()):
        raise ValueError(f"token_ids: an id that counts is outside the vocabulary of {vocabulary}")
    if support is not None and bool(((support < 0) | (support >= vocabulary)).any()):
        raise ValueError(f"support: an id is outside the vocabulary of {vocabulary}")
    index = counted.nonzero().squeeze(1)
    return None if len(index) == len(ids) else index


@torch.library.custom_op(
    "magrpo::policy_loss_from_logits",
    mutates_args=(),
    schema=f"(Tensor logits, {ROW_SCHEMA}, bool gradient) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss_from_logits(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss (), logps (N,), entropy (N,) and, with ``gradient``, dloss/dlogits (N, V), else (0,)."""
    inputs, options, gradient = RowInputs(*arguments[:7]), RowOptions(*arguments[7:12]), arguments[12]
    index = counted_rows(inputs, logits.shape[1])
    none = logits.new_empty(0)
    if index is None and inputs.support_ids is None:
        whole = torch.empty_like(logits, memory_format=torch.contiguous_format) if gradient else None
        losses, logps, entropy = row_loss(logits, inputs, options, whole)
        return losses.sum(), logps, entropy, none if whole is None else whole
    # A copy, overwritten by its gradient.
    rows = logits.clone(memory_format=torch.contiguous_format) if index is None else logits[index]
    losses, logps, entropy = row_loss(
        rows, inputs if index is None else inputs.select(index), options, rows if gradient else None
    )
    if index is not None:
        logps, entropy = spread(logps, index, len(logits)), spread(entropy, index, len(logits))
        rows = spread(rows, index, len(logits)) if gradient else none
    return losses.sum(), logps, entropy, rows if gradient else none


@_policy_loss_from_logits.register_fake
def _(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    per_token = logits.new_empty(len(logits), dtype=wide_dtype(logits.dtype))
    gradient = logits.new_empty(logits.shape) if arguments[12] else logits.new_empty(0)
    return per_token.new_empty(()), per_token, torch.empty_like(per_token), gradient


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[3])


def _logits_backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return gradient * grad_output.to(gradient.dtype), *[None] * 13


_policy_loss_from_logits.register_autograd(_logits_backward, setup_context=_keep_gradient)


def spread(values: Tensor, index: Tensor, size: int) -> Tensor:
    """``values`` at ``index`` of ``size`` rows of zeros."""
    return values.new_zeros(size, *values.shape[1:]).index_copy_(0, index, values)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over the vocabulary are kept in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_loss(
    logits: Tensor, inputs: RowInputs, options: RowOptions, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, ``logps`` and entropies (0 unless asked for), (N,) each; ``out`` (N, V) becomes the logits' gradient.

    ``out`` may be the logits themselves. Both must be contiguous in their last dimension. With a support the logits
    outside it are overwritten by -inf.
    """
    if inputs.support_ids is not None and inputs.support_bounds is not None:
        restrict_(logits, inputs.support_ids, inputs.support_bounds)
    impl = options.impl
    if impl == "auto":
        impl = "triton" if logits.is_cuda else "torch"
    if impl == "triton":
        from magrpo_kernels.row_triton import row_loss_triton

        return row_loss_triton(logits, inputs, options, out)
    return _row_loss_torch(logits, inputs, options, out)


def restrict_(logits: Tensor, support_ids: Tensor, support_bounds: Tensor) -> None:
    """Overwrite the logits (N, V) outside a :class:`Support` by -inf."""
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(support_bounds.diff())
    places = rows, support_ids.long()
    kept = logits[places]
    logits.fill_(-torch.inf)
    logits[places] = kept


def _row_loss_torch(
    logits: Tensor, inputs: RowInputs, options: RowOptions, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.to(wide_dtype(logits.dtype))
    target = inputs.token_ids[:, None]
    high = wide.amax(1, keepdim=True)
    high = torch.where(high.isfinite(), high, torch.zeros_like(high))
    space = out if out is not None and out.dtype == wide.dtype else wide if wide is not logits else None
    scaled = torch.sub(wide, high, out=space)
    if options.temperature != 1.0:
        scaled = scaled.div_(options.temperature)
    chosen = scaled.gather(1, target).squeeze(1)
    weighted = (scaled.exp() * scaled.masked_fill(scaled == -torch.inf, 0.0)).sum(1) if options.entropy else None
    scaled = scaled.exp_()
    total = scaled.sum(1)
    log_total = total.log()
    logps = chosen - log_total
    entropy = torch.zeros_like(logps) if weighted is None else log_total - weighted / total
    losses, slope = loss_and_slope(logps, inputs, options)
    if out is not None:
        slope = slope / options.temperature
        scaled.mul_((-slope / total)[:, None])
        scaled.scatter_add_(1, target, slope[:, None])
        if scaled is not out:
            out.copy_(scaled)
    return losses, logps, entropy


def loss_and_slope(logps: Tensor, inputs: RowInputs, options: RowOptions) -> tuple[Tensor, Tensor]:
    """The loss of each token and its derivative with respect to the token's log-probability, (N,) each."""
    coefficients = inputs.coefficients.to(logps.dtype)
    if inputs.old_logps is None:
        losses, slope = -coefficients * logps, -coefficients
    else:
        assert options.clip_low is not None
        assert options.clip_high is not None
        ratio = (logps - inputs.old_logps).exp()
        clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
        inside = ratio * coefficients <= clipped * coefficients
        losses = -torch.minimum(ratio * coefficients, clipped * coefficients)
        slope = torch.where(inside, -coefficients * ratio, torch.zeros_like(ratio))
    if inputs.ref_logps is not None:
        assert inputs.kl_coefficients is not None
        weight = inputs.kl_coefficients.to(logps.dtype)
        difference = inputs.ref_logps - logps
        grown = difference.expm1()
        losses = losses + weight * (grown - difference)
        slope = slope - weight * grown
    return losses, slope
