"""The policy-gradient loss from hidden states, a chunk of tokens at a time: the (N, V) logits never exist.

For each chunk: a library matrix product gives its logits, the row operation turns them in place into their gradient,
and library products take that to the hidden states and, if it trains, to the head. Nothing is computed twice: with a
trained head 6 N D V floating-point operations, with a frozen one 4 N D V. Tokens that do not count (masked, or in a
group without advantage) are dropped before the first product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magrpo_kernels.row import Impl, PolicyLoss, RowInputs, RowOptions, check, row_loss_, spread

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Logits in a chunk: on a CPU it should stay near the cache, on a GPU fill the matrix units."""


def policy_loss_from_hidden(
    hidden: Float[Tensor, "N D"],
    lm_head_weight: Float[Tensor, "V D"],
    token_ids: Int[Tensor, " N"],
    coefficients: Float[Tensor, " N"],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    old_logps: Float[Tensor, " N"] | None = None,
    ref_logps: Float[Tensor, " N"] | None = None,
    kl_coefficients: Float[Tensor, " N"] | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    return_entropy: bool = False,
    impl: Impl = "auto",
) -> PolicyLoss:
    """The summed loss of ``N`` tokens whose logits are ``hidden @ lm_head_weight.T + bias``.

    Equations and skipping as in :func:`~magrpo_kernels.row.policy_loss_from_logits`. Gradients flow to whichever of
    ``hidden``, ``lm_head_weight`` and ``bias`` require them; the head's is accumulated in float32.

    Raises:
        ValueError: shapes or options do not fit together, or an id outside the vocabulary counts.
    """
    _check_head(hidden, lm_head_weight, bias)
    inputs = RowInputs(token_ids, coefficients, old_logps, ref_logps, kl_coefficients)
    options = check(inputs, len(hidden), len(lm_head_weight), temperature, clip_low, clip_high, return_entropy, impl)
    loss, logps, entropy = _FromHidden.apply(hidden, lm_head_weight, bias, inputs, options)  # type: ignore[no-untyped-call]
    return PolicyLoss(loss, logps, entropy if return_entropy else None)


@torch.no_grad()
def token_logps(
    hidden: Float[Tensor, "N D"],
    lm_head_weight: Float[Tensor, "V D"],
    token_ids: Int[Tensor, " N"],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, " N"]:
    """Log-probabilities of tokens, without gradient: for old and reference policies. float32, or wider inputs' dtype.

    Raises:
        ValueError: shapes do not fit together, or an id is outside the vocabulary.
    """
    _check_head(hidden, lm_head_weight, bias)
    inputs = RowInputs(token_ids, torch.ones_like(token_ids, dtype=_wide(hidden.dtype)))
    options = check(inputs, len(hidden), len(lm_head_weight), temperature, None, None, False, impl)
    logps = hidden.new_empty(len(hidden), dtype=_wide(hidden.dtype))
    for part in _chunks(len(hidden), lm_head_weight):
        logits = _logits(hidden[part], lm_head_weight, bias)
        logps[part] = row_loss_(logits, inputs.select(part), options, gradient=False)[1]
    return logps


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, inputs: RowInputs, options: RowOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        index = inputs.counted().nonzero().squeeze(1)
        rows, inputs = hidden.detach()[index], inputs.select(index)
        wants = ctx.needs_input_grad[:3]
        wide = _wide(hidden.dtype)
        to_rows = torch.empty_like(rows) if wants[0] else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wants[1] else None
        to_bias = torch.zeros_like(weight[:, 0], dtype=wide) if wants[2] else None
        loss, logps = rows.new_zeros((), dtype=wide), rows.new_zeros(len(rows), dtype=wide)
        entropy = torch.zeros_like(logps)
        for part in _chunks(len(rows), weight):
            logits = _logits(rows[part], weight.detach(), bias)
            losses, logps[part], entropy[part] = row_loss_(logits, inputs.select(part), options, any(wants))
            loss += losses.sum()
            if to_rows is not None:
                torch.mm(logits, weight.detach(), out=to_rows[part])
            if to_weight is not None:
                _add_product_(to_weight, logits.t(), rows[part])
            if to_bias is not None:
                to_bias += logits.sum(0, dtype=wide)
        ctx.shape, ctx.dtypes = hidden.shape, (weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(index, to_rows, to_weight, to_bias)
        logps, entropy = spread(logps, index, len(hidden)), spread(entropy, index, len(hidden))
        ctx.mark_non_differentiable(logps, entropy)
        return loss, logps, entropy

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        index, to_rows, to_weight, to_bias = ctx.saved_tensors
        to_hidden = None
        if to_rows is not None:
            scaled = to_rows * grad_output.to(to_rows.dtype)
            to_hidden = scaled.new_zeros(ctx.shape).index_copy_(0, index, scaled)
        if to_weight is not None:
            to_weight = (to_weight * grad_output).to(ctx.dtypes[0])
        if to_bias is not None:
            to_bias = (to_bias * grad_output).to(ctx.dtypes[1])
        return to_hidden, to_weight, to_bias, None, None


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight.t() if bias is None else torch.addmm(bias.detach(), rows, weight.t())


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` with ``total`` in float32 whatever the factors are in."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(num_tokens: int, weight: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS.get(weight.device.type, 1 << 22) // len(weight))
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden (N, D) and lm_head_weight (V, D) do not fit: {hidden.shape}, {weight.shape}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, lm_head_weight is {weight.dtype}; give both the same dtype")
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias must have shape ({len(weight)},), got {tuple(bias.shape)}")
