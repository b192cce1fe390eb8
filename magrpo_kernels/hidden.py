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

from magrpo_kernels.backward import keep_gradients, scale_gradients
from magrpo_kernels.inputs import NUM_ARGUMENTS, SCHEMA, LossOptions, TokenInputs, flatten_arguments, read_arguments
from magrpo_kernels.row import PolicyLoss, row_loss, scatter_rows, select_counted, wide_dtype

if TYPE_CHECKING:
    from jaxtyping import Float

_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Logits in a chunk, by device: enough for full speed of the matrix products, and little memory."""
_CHUNK_ROWS = {False: 2048, True: 8192}
"""Rows that a chunk has at least on CUDA, by whether the head trains: its gradient is read and written once a chunk."""
_ROW_MULTIPLE = 256
"""Of the rows of a chunk on CUDA: the rows of a tile of the matrix products."""
_STRIDE_MULTIPLE = 64
"""Of the elements between rows of logits on CUDA, so that every row of an odd vocabulary is read 16 bytes at a time."""
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def group_policy_loss(
    hidden: Float[Tensor, "N D"],
    lm_head_weight: Float[Tensor, "V D"],
    inputs: TokenInputs,
    options: LossOptions = LossOptions(),
    *,
    bias: Float[Tensor, " V"] | None = None,
) -> PolicyLoss:
    """The summed loss of ``N`` tokens whose logits are ``hidden @ lm_head_weight.T + bias``, capped if options say so.

    Equations, support and skipping as in :func:`~magrpo_kernels.row.policy_loss_from_logits`. Gradients flow to
    whichever of ``hidden``, ``lm_head_weight`` and ``bias`` require them; the head's is accumulated in float32.

    Raises:
        ValueError: shapes or options do not fit together, or the id of a token that counts is outside the vocabulary.
    """
    _check_head(hidden, lm_head_weight, bias)
    arguments = flatten_arguments(inputs, options, len(hidden))
    options.uses_triton(hidden)
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, lm_head_weight, bias)]
    loss, logps, entropy, *_ = torch.ops.magrpo.group_policy_loss(hidden, lm_head_weight, bias, *arguments, wants)
    return PolicyLoss(loss, logps.detach(), entropy.detach() if options.entropy else None)


# ------------------------------------------------------------------------------------------- registered operations
@torch.library.custom_op(
    "magrpo::group_policy_loss",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor? bias, {SCHEMA}, bool[] wants)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _group_policy_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Outputs:
    """Loss (), logps (N,), entropy (N,), and the gradients of ``wants``: (N, D), (V, D), (V,); (0,) if not wanted."""
    inputs, options = read_arguments(arguments)
    wants = arguments[NUM_ARGUMENTS]
    counted, index = select_counted(inputs, options, hidden, len(weight))
    rows = hidden if index is None else hidden[index]
    wide = wide_dtype(hidden.dtype)
    to_rows = rows.new_empty(rows.shape if wants[0] else 0)
    to_weight = weight.new_zeros(weight.shape if wants[1] else 0, dtype=wide)
    to_bias = weight.new_zeros(len(weight) if wants[2] else 0, dtype=wide)
    loss, logps = rows.new_zeros((), dtype=wide), rows.new_zeros(len(rows), dtype=wide)
    entropy = torch.zeros_like(logps)
    parts = slice_chunks(len(rows), len(weight), weight.device, trains_head=wants[1])
    is_wide = options.float32_logits or options.soft_cap is not None
    buffer = allocate_logits(rows, weight, parts, wide if is_wide else rows.dtype)
    overwrites = buffer.dtype == rows.dtype and options.soft_cap is None
    gradients = buffer if overwrites or not any(wants) else allocate_logits(rows, weight, parts)
    for part in parts:
        size = part.stop - part.start
        logits, gradient = buffer[:size], gradients[:size]
        compute_logits(rows[part], weight, bias, logits)
        if options.soft_cap is not None:
            logits.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
        out = gradient if any(wants) else None
        losses, logps[part], entropy[part] = row_loss(logits, counted.select_tokens(part), options, out)
        loss += losses.sum()
        if options.soft_cap is not None and out is not None:
            slope = logits.div_(options.soft_cap).clamp_(-1, 1).square_().neg_().add_(1)  # -inf: outside the support
            gradient.mul_(slope)
        if wants[0]:
            torch.mm(gradient, weight, out=to_rows[part])
        if wants[1]:
            add_product_(to_weight, gradient.t(), rows[part])
        if wants[2]:
            to_bias += gradient.sum(0, dtype=wide)
    if index is not None:
        logps, entropy = scatter_rows(logps, index, len(hidden)), scatter_rows(entropy, index, len(hidden))
        to_rows = scatter_rows(to_rows, index, len(hidden)) if wants[0] else to_rows
    return loss, logps, entropy, to_rows, to_weight, to_bias


@_group_policy_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Outputs:
    wide, wants = wide_dtype(hidden.dtype), arguments[NUM_ARGUMENTS]
    logps = hidden.new_empty(len(hidden), dtype=wide)
    to_rows = hidden.new_empty(hidden.shape if wants[0] else 0)
    to_weight = weight.new_empty(weight.shape if wants[1] else 0, dtype=wide)
    to_bias = weight.new_empty(len(weight) if wants[2] else 0, dtype=wide)
    return logps.new_empty(()), logps, torch.empty_like(logps), to_rows, to_weight, to_bias


_group_policy_loss.register_autograd(scale_gradients, setup_context=keep_gradients)


def compute_logits(rows: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor) -> None:
    """``logits = rows @ weight.T + bias``, not rounded to the factors' dtype where ``logits`` has a wider one."""
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
    """``total += left @ right`` with ``total`` in float32 whatever the factors are in; products are not rounded."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def slice_chunks(num_tokens: int, vocabulary: int, device: torch.device, *, trains_head: bool) -> list[slice]:
    """The slices of ``num_tokens`` rows whose logits are computed at once, the first at least as long as the others.

    On CUDA they are equal, but for the last, and end where tiles of the matrix products end.
    """
    size = max(1, _CHUNK_ELEMENTS.get(device.type, 1 << 25) // vocabulary)
    if device.type == "cuda" and num_tokens:
        size = max(size, _CHUNK_ROWS[trains_head])
        size = _round_up(-(-num_tokens // -(-num_tokens // size)), _ROW_MULTIPLE)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def allocate_logits(rows: Tensor, weight: Tensor, parts: list[slice], dtype: torch.dtype | None = None) -> Tensor:
    """One buffer for the logits of every chunk, since fresh pages are slow: (C, V), with padded rows on CUDA."""
    vocabulary = len(weight)
    width = _round_up(vocabulary, _STRIDE_MULTIPLE) if rows.is_cuda else vocabulary
    return rows.new_empty(parts[0].stop if parts else 0, width, dtype=dtype)[:, :vocabulary]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden (N, D) and lm_head_weight (V, D) do not fit: {hidden.shape}, {weight.shape}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, lm_head_weight is {weight.dtype}; give both the same dtype")
    if len(weight) == 0:
        raise ValueError("lm_head_weight (V, D) has no rows: V must be 1 or more")
    if bias is not None and (bias.shape != (len(weight),) or bias.dtype != weight.dtype):
        got = f"{bias.dtype}, {tuple(bias.shape)}"
        raise ValueError(f"bias must have dtype and shape {weight.dtype}, ({len(weight)},), got {got}")
