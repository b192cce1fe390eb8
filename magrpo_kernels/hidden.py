"""The policy-gradient loss from hidden states, a chunk of tokens at a time: the (N, V) logits never exist.

For each chunk: a library matrix product gives its logits, the row operation turns them in place into their gradient,
and library products carry that to the hidden states and, if it trains, to the head. Nothing is computed twice: with a
trained head 6 N D V floating-point operations, with a frozen one 4 N D V. Tokens that do not count (masked, or in a
group without advantage) are dropped before the first product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magrpo_kernels.inputs import (
    DEFAULTS,
    SCHEMA,
    LossOptions,
    TokenInputs,
    flatten_arguments,
    read_arguments,
)
from magrpo_kernels.row import PolicyLoss, row_loss, scatter_rows, wide_dtype

if TYPE_CHECKING:
    from jaxtyping import Float

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits in a chunk, by device: enough for full speed of the matrix products, and little memory."""
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def policy_loss_from_hidden(
    hidden: Float[Tensor, "N D"],
    lm_head_weight: Float[Tensor, "V D"],
    inputs: TokenInputs,
    options: LossOptions = DEFAULTS,
    *,
    bias: Float[Tensor, " V"] | None = None,
) -> PolicyLoss:
    """The summed loss of ``N`` tokens whose logits are ``hidden @ lm_head_weight.T + bias``.

    Equations, support and skipping as in :func:`~magrpo_kernels.row.policy_loss_from_logits`. Gradients flow to
    whichever of ``hidden``, ``lm_head_weight`` and ``bias`` require them; the head's is accumulated in float32.

    Raises:
        ValueError: shapes or options do not fit together, or the id of a token that counts is outside the vocabulary.
    """
    _check_head(hidden, lm_head_weight, bias)
    arguments = flatten_arguments(inputs, options, len(hidden))
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, lm_head_weight, bias)]
    loss, logps, entropy, *_ = torch.ops.magrpo.policy_loss_from_hidden(hidden, lm_head_weight, bias, *arguments, wants)
    return PolicyLoss(loss, logps.detach(), entropy.detach() if options.entropy else None)


# ------------------------------------------------------------------------------------------- registered operations
@torch.library.custom_op(
    "magrpo::policy_loss_from_hidden",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor? bias, {SCHEMA}, bool[] wants)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _policy_loss_from_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Outputs:
    """Loss (), logps (N,), entropy (N,), and the gradients of ``wants``: (N, D), (V, D), (V,); (0,) if not wanted."""
    inputs, options = read_arguments(arguments)
    wants = arguments[12]
    index = inputs.find_counted(len(weight))
    rows = hidden if index is None else hidden[index]
    counted = inputs if index is None else inputs.select_tokens(index)
    wide = wide_dtype(hidden.dtype)
    to_rows = torch.empty_like(rows) if wants[0] else hidden.new_empty(0)
    to_weight = torch.zeros_like(weight, dtype=wide) if wants[1] else hidden.new_empty(0)
    to_bias = torch.zeros_like(weight[:, 0], dtype=wide) if wants[2] else hidden.new_empty(0)
    loss, logps = rows.new_zeros((), dtype=wide), rows.new_zeros(len(rows), dtype=wide)
    entropy = torch.zeros_like(logps)
    parts = slice_chunks(len(rows), weight)
    # One buffer for all chunks: fresh pages are slow.
    buffer = rows.new_empty(parts[0].stop if parts else 0, len(weight))
    for part in parts:
        logits = buffer[: part.stop - part.start]
        if bias is None:
            torch.mm(rows[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, rows[part], weight.t(), out=logits)
        out = logits if any(wants) else None
        losses, logps[part], entropy[part] = row_loss(logits, counted.select_tokens(part), options, out)
        loss += losses.sum()
        if wants[0]:
            torch.mm(logits, weight, out=to_rows[part])
        if wants[1]:
            add_product_(to_weight, logits.t(), rows[part])
        if wants[2]:
            to_bias += logits.sum(0, dtype=wide)
    if index is not None:
        logps, entropy = scatter_rows(logps, index, len(hidden)), scatter_rows(entropy, index, len(hidden))
        to_rows = scatter_rows(to_rows, index, len(hidden)) if wants[0] else to_rows
    return loss, logps, entropy, to_rows, to_weight, to_bias


@_policy_loss_from_hidden.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Outputs:
    wide, wants = wide_dtype(hidden.dtype), arguments[12]
    logps = hidden.new_empty(len(hidden), dtype=wide)
    to_rows = torch.empty_like(hidden) if wants[0] else hidden.new_empty(0)
    to_weight = torch.empty_like(weight, dtype=wide) if wants[1] else hidden.new_empty(0)
    to_bias = hidden.new_empty(len(weight), dtype=wide) if wants[2] else hidden.new_empty(0)
    return logps.new_empty(()), logps, torch.empty_like(logps), to_rows, to_weight, to_bias


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    ctx.save_for_backward(*output[3:])
    ctx.wants, ctx.dtypes = inputs[-1], [None if t is None else t.dtype for t in inputs[:3]]


def _loss_backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    scaled = [
        (gradient * grad_output.to(gradient.dtype)).to(dtype) if wanted else None
        for gradient, dtype, wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.wants, strict=True)
    ]
    return *scaled, *[None] * 13


_policy_loss_from_hidden.register_autograd(_loss_backward, setup_context=_keep_gradients)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` with ``total`` in float32 whatever the factors are in."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def slice_chunks(num_tokens: int, weight: Tensor) -> list[slice]:
    """The slices of ``num_tokens`` rows whose logits are computed at once, the first at least as long as the others."""
    size = max(1, _CHUNK_ELEMENTS.get(weight.device.type, 1 << 25) // len(weight))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden (N, D) and lm_head_weight (V, D) do not fit: {hidden.shape}, {weight.shape}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, lm_head_weight is {weight.dtype}; give both the same dtype")
    if bias is not None and bias.shape != (len(weight),):
        raise ValueError(f"bias must have shape ({len(weight)},), got {tuple(bias.shape)}")
