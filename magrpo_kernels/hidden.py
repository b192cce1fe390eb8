"""The policy-gradient loss from hidden states, a chunk of tokens at a time: the (N, V) logits never exist as a whole.

For each chunk, a library matrix product computes the logits, the row operation turns them in place into their gradient,
and library products carry the gradient to the hidden states and, if it trains, to the head. Nothing is computed twice:
a trained head takes 6 N D V floating-point operations, a frozen one 4 N D V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from magrpo_kernels.backward import keep_gradients, scale_gradients, wants_gradient
from magrpo_kernels.inputs import LossOptions, TokenInputs
from magrpo_kernels.row import PolicyLoss, row_loss, wide_dtype

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits in a chunk, by device: enough for fast matrix products, yet little memory."""
_CHUNK_ROWS = {False: 2048, True: 8192}
"""Fewest rows of a chunk on CUDA, by whether the head trains: its gradient is read and written for each chunk."""
_ROW_MULTIPLE = 256
"""Rows of a chunk are a multiple of this on CUDA: the rows of a tile of the matrix products."""
_STRIDE_MULTIPLE = 64
"""Strides between rows of logits are a multiple of this on CUDA, so that 16 bytes are read at a time."""


def group_policy_loss(
    hidden: Float[Tensor, "N D"],
    lm_head_weight: Float[Tensor, "V D"],
    inputs: TokenInputs,
    options: LossOptions = LossOptions(),
    *,
    bias: Float[Tensor, " V"] | None = None,
) -> PolicyLoss:
    """The summed loss of ``N`` tokens with logits ``hidden @ lm_head_weight.T + bias``, capped if options say so.

    For equations, support and ids see :func:`~magrpo_kernels.row.policy_loss_from_logits`. Gradients flow to those of
    ``hidden``, ``lm_head_weight`` and ``bias`` that require them; the head's is accumulated in float32.

    Raises:
        ValueError: options do not fit the inputs.
    """
    options.check_inputs(inputs)
    wants = [wants_gradient(leaf) for leaf in (hidden, lm_head_weight, bias)]
    loss, logps = _LossFromHidden.apply(hidden, lm_head_weight, bias, inputs, options, wants)  # type: ignore[no-untyped-call]
    return PolicyLoss(loss, logps)


class _LossFromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: TokenInputs,
        options: LossOptions,
        wants: Sequence[bool],
    ) -> tuple[Tensor, Tensor]:
        loss, logps, gradients = _sum_chunks(hidden, weight, bias, inputs, options, wants)
        ctx.mark_non_differentiable(logps)
        leaves = [hidden, weight, bias]
        keep_gradients(ctx, leaves, [gradients.hidden, gradients.weight, gradients.bias], once=options.backward_once)
        return loss, logps

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return *scale_gradients(ctx, grad_loss), None, None, None


@dataclass(slots=True)
class _Gradients:
    """The gradients of the loss; None if they are not needed. Those of the head are summed in float32 or wider."""

    hidden: Tensor | None  # (N, D)
    weight: Tensor | None  # (V, D)
    bias: Tensor | None  # (V,)

    @classmethod
    def allocate(cls, rows: Tensor, weight: Tensor, wants: Sequence[bool]) -> _Gradients:
        """Allocate the gradients of hidden states, weight and bias that ``wants`` names."""
        wide = wide_dtype(rows.dtype)
        return cls(
            rows.new_empty(rows.shape) if wants[0] else None,
            weight.new_zeros(weight.shape, dtype=wide) if wants[1] else None,
            weight.new_zeros(len(weight), dtype=wide) if wants[2] else None,
        )

    def add_chunk(self, part: slice, gradient: Tensor, rows: Tensor, weight: Tensor) -> None:
        """Carry the gradient of a chunk's logits to hidden states, weight and bias."""
        if self.hidden is not None:
            torch.mm(gradient, weight, out=self.hidden[part])
        if self.weight is not None:
            add_product_(self.weight, gradient.t(), rows[part])
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)


def _sum_chunks(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: TokenInputs,
    options: LossOptions,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, _Gradients]:
    """The loss (), logps (N,) and gradients."""
    wide = wide_dtype(rows.dtype)
    loss = rows.new_zeros((), dtype=wide)
    logps = rows.new_zeros(len(rows), dtype=wide)
    gradients = _Gradients.allocate(rows, weight, wants)
    parts = slice_chunks(len(rows), len(weight), weight.device, trains_head=wants[1])
    is_wide = options.float32_logits or options.soft_cap is not None
    logits_buffer = allocate_logits(rows, weight, parts, wide if is_wide else rows.dtype)
    gradient_buffer = None
    if any(wants):
        # The gradient has the dtype of the model. It overwrites the logits unless they are wider, or still needed.
        overwrites = logits_buffer.dtype == rows.dtype and options.soft_cap is None
        gradient_buffer = logits_buffer if overwrites else allocate_logits(rows, weight, parts)
    for part in parts:
        size = part.stop - part.start
        logits = logits_buffer[:size]
        gradient = None if gradient_buffer is None else gradient_buffer[:size]
        compute_logits(rows[part], weight, bias, logits)
        if options.soft_cap is not None:
            logits.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
        losses, logps[part] = row_loss(logits, inputs.select_tokens(part), options, gradient)
        loss += losses.sum()
        if gradient is not None:
            if options.soft_cap is not None:
                # The derivative of the cap, 1 - tanh^2; logits outside the support are -inf.
                gradient.mul_(logits.div_(options.soft_cap).clamp_(-1, 1).square_().neg_().add_(1))
            gradients.add_chunk(part, gradient, rows, weight)
    return loss, logps, gradients


def compute_logits(rows: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """Compute ``logits = rows @ weight.T + bias`` in the dtype of ``logits``, which may be wider than the factors."""
    if logits.dtype == rows.dtype:
        if bias is None:
            torch.mm(rows, weight.t(), out=logits)
        else:
            torch.addmm(bias, rows, weight.t(), out=logits)
        return
    if rows.is_cuda:
        torch.ops.aten.mm.dtype_out(rows, weight.t(), logits.dtype, out=logits)
    else:
        torch.mm(rows.to(logits.dtype), weight.to(logits.dtype).t(), out=logits)
    if bias is not None:
        logits += bias


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` in the dtype of ``total``, which may be wider than the factors; rounds no products."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def slice_chunks(num_tokens: int, vocabulary: int, device: torch.device, *, trains_head: bool) -> list[slice]:
    """Slice ``num_tokens`` rows into chunks whose logits are computed at once; no chunk is longer than the first.

    On CUDA, chunks are of equal length, except for the last, and end at the end of a tile of the matrix products.
    """
    size = max(1, _CHUNK_ELEMENTS.get(device.type, 1 << 25) // vocabulary)
    if device.type == "cuda" and num_tokens:
        num_chunks = math.ceil(num_tokens / max(size, _CHUNK_ROWS[trains_head]))
        size = _round_up(math.ceil(num_tokens / num_chunks), _ROW_MULTIPLE)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def allocate_logits(rows: Tensor, weight: Tensor, parts: list[slice], dtype: torch.dtype | None = None) -> Tensor:
    """One buffer (C, V) for the logits of all chunks, because fresh memory is slow; with padded rows on CUDA."""
    vocabulary = len(weight)
    width = _round_up(vocabulary, _STRIDE_MULTIPLE) if rows.is_cuda else vocabulary
    return rows.new_empty(parts[0].stop if parts else 0, width, dtype=dtype)[:, :vocabulary]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
