"""The row operation: from a token's logits to its loss and to the gradient with respect to these logits.

For one token with logits ``z`` (V,), temperature ``t``, sampled id ``y`` and ``p = softmax(z / t)``::

    logp = z_y / t - logsumexp(z / t)
    loss = -c logp                                                    strictly on-policy (REINFORCE)
         = -min(r c, clip(r, 1 - low, 1 + high) c), r = exp(logp - old_logp)     PPO, arXiv 1707.06347
         + k (exp(d) - d - 1),              d = ref_logp - logp                  k3, joschu.net/blog/kl-approx.html
    dloss/dz = (g / t) (onehot(y) - p),     g = dloss/dlogp

With a support ``S``, the ids that truncated sampling (top-k, nucleus) drew from, ``z`` is -inf outside ``S``. The
log-sum-exp and the gradient are then over ``S`` (the "keep sampling mask" of DeepSeek-V3.2, arXiv 2512.02556).

``c = w A / n * m`` is the advantage ``A`` over the divisor ``n``, times a mask or weight ``m``. ``A`` is given or, with
groups, the paper's advantage, formed from the returns of the token's group (:class:`magrpo_kernels.Groups`). ``w =
min(exp(b - sampling_logp), cap)`` is the truncated importance weight of V-trace, arXiv 1802.01561, for an engine whose
probabilities differ from the trainer's; ``b`` is the log-probability before the update: ``old_logp``, or on-policy
``logp`` itself. ``w`` and ``A`` have no gradient. All of it is known in the forward pass, so ``g`` needs nothing from
the backward pass, and the gradient overwrites the logits in the pass that reads them: they are read twice and written
once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from magrpo_kernels.backward import keep_gradients, scale_gradients, wants_gradient
from magrpo_kernels.inputs import LossOptions, TokenInputs

_BLOCK_ELEMENTS = 1 << 20
"""Logits that a CPU takes through all passes at once, few enough to stay in its cache."""


class PolicyLoss(NamedTuple):
    """The summed loss, which is differentiable, and log-probabilities, which are not."""

    loss: Tensor  # ()
    logps: Tensor  # (N,), natural logarithms, float32 or wider


def policy_loss_from_logits(
    logits: Float[Tensor, "N V"], inputs: TokenInputs, options: LossOptions = LossOptions()
) -> PolicyLoss:
    """The summed policy-gradient loss of ``N`` tokens from their logits; the module has the equations.

    The logits are not modified. Their gradient is written in the pass that reads them, into the buffer that backward
    returns. With a support, log-probabilities and gradient are those of the distribution over the support.

    Ids must be inside the vocabulary. A look at them would make the CPU wait for the GPU, so only torch checks them,
    where it indexes.

    Raises:
        ValueError: options do not fit the inputs.
    """
    options.check_inputs(inputs)
    if options.soft_cap is not None:
        raise ValueError("soft_cap is for logits from hidden states: these are the model's own, capped already")
    loss, logps = _LossFromLogits.apply(logits, inputs, options, wants_gradient(logits))  # type: ignore[no-untyped-call]
    return PolicyLoss(loss, logps)


class _LossFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, inputs: TokenInputs, options: LossOptions, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        rows = logits
        if inputs.support is not None:
            rows = logits.clone(memory_format=torch.contiguous_format)  # the row operation overwrites the rest
        gradient = None
        if wanted:
            gradient = torch.empty_like(logits, memory_format=torch.contiguous_format) if rows is logits else rows
        losses, logps = row_loss(rows, inputs, options, gradient)
        ctx.mark_non_differentiable(logps)
        keep_gradients(ctx, [logits], [gradient], once=options.backward_once)
        return losses.sum(), logps

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return *scale_gradients(ctx, grad_loss), None, None, None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over the vocabulary: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_loss(logits: Tensor, inputs: TokenInputs, options: LossOptions, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute losses and ``logps``, (N,) each, and write the gradient of the logits into ``out`` (N, V).

    ``out`` may be the logits themselves. Both must be contiguous in their last dimension. With a support, the logits
    outside it are overwritten by -inf.
    """
    if inputs.support is not None:
        rows = torch.arange(len(logits), device=logits.device).repeat_interleave(inputs.support.bounds.diff())
        places = rows, inputs.support.ids.long()
        kept = logits[places]
        logits.fill_(-torch.inf)
        logits[places] = kept
    if options.uses_triton(logits):
        from magrpo_kernels.row_triton import row_loss_triton  # triton, which not every machine has

        return row_loss_triton(logits, inputs, options, out)
    size = max(1, len(logits) if logits.is_cuda else _BLOCK_ELEMENTS // logits.shape[1])
    inputs = replace(inputs.form_advantages(), support=None)
    blocks = []
    for start in range(0, len(logits) or 1, size):
        part = slice(start, start + size)
        block = logits[part], inputs.select_tokens(part), options, None if out is None else out[part]
        blocks.append(_row_loss_torch(*block))
    losses, logps = map(torch.cat, zip(*blocks, strict=True))
    return losses, logps


def _row_loss_torch(
    logits: Tensor, inputs: TokenInputs, options: LossOptions, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = logits.to(wide_dtype(logits.dtype))
    target = inputs.token_ids[:, None]
    # Softmax may overwrite its input, unless that belongs to the caller and is not to hold the gradient.
    if out is not None and out.dtype == wide.dtype:
        buffer: Tensor | None = out
    else:
        buffer = None if wide is logits else wide
    if options.temperature != 1.0:
        wide = torch.div(wide, options.temperature, out=buffer)
    high = wide.amax(1, keepdim=True)
    chosen = (wide.gather(1, target) - high).squeeze(1)
    shares = torch.softmax(wide, 1, out=buffer)
    total = shares.sum(1)  # 1 up to the rounding of softmax's own sum, which is corrected below
    logps = chosen - (total / shares.amax(1)).log()  # the logarithm of the sum of exp(wide - high)
    losses, slope = loss_and_slope(logps, inputs, options)
    if out is not None:
        slope = slope / options.temperature
        shares.mul_((-slope / total)[:, None]).scatter_add_(1, target, slope[:, None])
        if shares is not out:
            out.copy_(shares)
    return losses, logps


def loss_and_slope(logps: Tensor, inputs: TokenInputs, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The loss of each token and its derivative with respect to the token's log-probability, (N,) each."""
    assert inputs.advantages is not None
    coefficients = (inputs.advantages / options.divisor * inputs.weights).to(logps.dtype)
    if inputs.sampling_logps is not None:
        before_update = logps if inputs.old_logps is None else inputs.old_logps
        coefficients = coefficients * (before_update - inputs.sampling_logps).exp().clamp(max=options.importance_cap)
    if inputs.old_logps is None:
        losses, slope = -coefficients * logps, -coefficients
    else:
        clip_low, clip_high = options.clip_range
        ratio = (logps - inputs.old_logps).exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
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
