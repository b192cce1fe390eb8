"""The row operation: from the logits of a token to its loss and to the gradient with respect to those logits.

For one token with logits ``z`` (V,), temperature ``t``, sampled id ``y`` and ``p = softmax(z / t)``::

    logp = z_y / t - logsumexp(z / t)
    loss = -c logp                                                    strictly on-policy (REINFORCE)
         = -min(r c, clip(r, 1 - low, 1 + high) c), r = exp(logp - old_logp)     PPO, arXiv 1707.06347
         + k (exp(d) - d - 1),              d = ref_logp - logp                  k3, joschu.net/blog/kl-approx.html
    dloss/dz = (g / t) (onehot(y) - p),     g = dloss/dlogp

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


class RowOptions(NamedTuple):
    """What all tokens of a call share."""

    temperature: float = 1.0
    clip_low: float | None = None
    clip_high: float | None = None
    entropy: bool = False
    impl: Impl = "auto"


class RowInputs(NamedTuple):
    """What belongs to each token: (N,) each."""

    token_ids: Tensor
    coefficients: Tensor
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    kl_coefficients: Tensor | None = None

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
        )

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
    return_entropy: bool = False,
    impl: Impl = "auto",
) -> PolicyLoss:
    """The summed policy-gradient loss of ``N`` tokens from their logits; see this module for the equations.

    Tokens with coefficient 0 (and KL coefficient 0) are skipped: no gradient, ``logps`` 0, any id allowed. The logits
    are left alone: the gradient is written into a copy of the rows that count.

    Raises:
        ValueError: shapes, devices or options do not fit together, or an id outside the vocabulary counts.
    """
    inputs = RowInputs(token_ids, coefficients, old_logps, ref_logps, kl_coefficients)
    options = check(inputs, logits.shape[0], logits.shape[1], temperature, clip_low, clip_high, return_entropy, impl)
    loss, logps, entropy = _FromLogits.apply(logits, inputs, options)  # type: ignore[no-untyped-call]
    return PolicyLoss(loss, logps, entropy if return_entropy else None)


def check(
    inputs: RowInputs,
    num_tokens: int,
    vocabulary: int,
    temperature: float,
    clip_low: float | None,
    clip_high: float | None,
    return_entropy: bool,
    impl: Impl,
) -> RowOptions:
    """Refuse what cannot be computed; see the public functions.

    Raises:
        ValueError: as they say.
    """
    for name, value in zip(inputs._fields, inputs, strict=True):
        if value is not None and value.shape != (num_tokens,):
            raise ValueError(f"{name} must have shape ({num_tokens},), got {tuple(value.shape)}")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if inputs.old_logps is not None and (clip_low is None or clip_high is None):
        raise ValueError("old_logps need clip_low and clip_high")
    if (inputs.ref_logps is None) != (inputs.kl_coefficients is None):
        raise ValueError("ref_logps and kl_coefficients go together")
    if impl not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown impl {impl!r}: auto, triton or torch")
    ids = inputs.token_ids
    if bool((inputs.counted() & ((ids < 0) | (ids >= vocabulary))).any()):
        raise ValueError(f"token_ids: an id that counts is outside the vocabulary of {vocabulary}")
    return RowOptions(temperature, clip_low, clip_high, return_entropy, impl)


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, inputs: RowInputs, options: RowOptions) -> tuple[Tensor, Tensor, Tensor]:
        index = inputs.counted().nonzero().squeeze(1)
        rows = logits.detach()[index]  # a copy, overwritten by its gradient
        gradient = ctx.needs_input_grad[0]
        losses, row_logps, row_entropy = row_loss_(rows, inputs.select(index), options, gradient)
        if gradient:
            ctx.save_for_backward(index, rows)
        ctx.shape = logits.shape
        logps, entropy = spread(row_logps, index, len(logits)), spread(row_entropy, index, len(logits))
        ctx.mark_non_differentiable(logps, entropy)
        return losses.sum(), logps, entropy

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        index, rows = ctx.saved_tensors
        full = rows.new_zeros(ctx.shape)
        return full.index_copy_(0, index, rows * grad_output.to(rows.dtype)), None, None


def spread(values: Tensor, index: Tensor, size: int) -> Tensor:
    """``values`` at ``index`` of a vector of zeros."""
    return values.new_zeros(size).index_copy_(0, index, values)


def row_loss_(logits: Tensor, inputs: RowInputs, options: RowOptions, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, ``logps`` and entropies (0 unless asked for), (N,) each; with ``gradient`` the logits (N, V) become it.

    The logits must be contiguous in their last dimension.
    """
    impl = options.impl
    if impl == "auto":
        impl = "triton" if logits.is_cuda else "torch"
    if impl == "triton":
        from magrpo_kernels.row_triton import row_loss_triton_

        return row_loss_triton_(logits, inputs, options, gradient)
    return _row_loss_torch_(logits, inputs, options, gradient)


def _row_loss_torch_(
    logits: Tensor, inputs: RowInputs, options: RowOptions, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    target = inputs.token_ids[:, None]
    high = wide.amax(1, keepdim=True)
    high = torch.where(high.isfinite(), high, torch.zeros_like(high))
    scaled = torch.sub(wide, high, out=wide if gradient else None)
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
    if gradient:
        slope = slope / options.temperature
        scaled.mul_((-slope / total)[:, None])
        scaled.scatter_add_(1, target, slope[:, None])
        if scaled.data_ptr() != logits.data_ptr():
            logits.copy_(scaled)
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
