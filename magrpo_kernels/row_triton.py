"""The row operation in Triton, one program for each token.

The first pass takes an online log-sum-exp, the second writes the gradient, over the logits if
asked to. ``exp2`` with log2(e)/temperature folded into one multiply-add keeps both passes within the issue slots that
memory leaves free; the sampled token's element is patched after the second pass instead of being compared for at every
element. Arithmetic is float32 whatever the logits are stored in. Row offsets are 64-bit: N * V passes 2^31 at 14,135
tokens of a vocabulary of 151,936.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from magrpo_kernels.inputs import LossOptions, TokenInputs

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2.0))


@triton.jit  # type: ignore[untyped-decorator]
def row_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # (N, V)
    stride,
    out_ptr,  # (N, V), takes the gradient if GRADIENT; may be the logits
    out_stride,
    ids_ptr,  # (N,) int64
    coefficients_ptr,  # (N,) float32, like all below
    old_ptr,
    ref_ptr,
    kl_ptr,
    losses_ptr,
    logps_ptr,
    entropy_ptr,
    scale,  # log2(e) / temperature
    inverse_temperature,
    clip_low,
    clip_high,
    vocabulary,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    GRADIENT: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    # Before the first pass, whose barriers put these loads before any store of the second: ``out`` may be the logits.
    token = tl.load(ids_ptr + row)
    target = tl.load(logits_ptr + token).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    high = float("-inf")  # running maximum of the raw logits
    total = 0.0  # sum of exp2((x - high) * scale)
    weighted = 0.0  # the same, weighted by (x - high) * scale
    for start in range(0, vocabulary, BLOCK):
        offsets = start + lanes
        x = tl.load(logits_ptr + offsets, mask=offsets < vocabulary, other=float("-inf")).to(tl.float32)
        new = tl.maximum(high, tl.max(x, 0))
        base = tl.where(new == float("-inf"), 0.0, new)  # a block of -inf must not give inf - inf
        power = tl.exp2(x * scale - base * scale)
        shrink = tl.where(high == float("-inf"), 0.0, tl.exp2((high - base) * scale))
        if ENTROPY:
            shift = tl.where(high == float("-inf"), 0.0, (high - base) * scale)
            exponent = tl.where(x == float("-inf"), 0.0, (x - base) * scale)
            weighted = (weighted + shift * total) * shrink + tl.sum(power * exponent, 0)
        total = total * shrink + tl.sum(power, 0)
        high = new
    log2_total = tl.log2(total)
    base = tl.where(high == float("-inf"), 0.0, high)
    logp2 = (target - base) * scale - log2_total
    logp = logp2 * LN2
    tl.store(logps_ptr + row, logp)
    if ENTROPY:
        tl.store(entropy_ptr + row, (log2_total - weighted / total) * LN2)

    c = tl.load(coefficients_ptr + row)
    if HAS_OLD:
        ratio = tl.exp2(logp2 - tl.load(old_ptr + row) / LN2)
        clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip_low), 1.0 + clip_high)
        loss = -tl.minimum(ratio * c, clipped * c)
        slope = tl.where(ratio * c <= clipped * c, -c * ratio, 0.0)
    else:
        loss = -c * logp
        slope = -c
    if HAS_REF:
        k = tl.load(kl_ptr + row)
        difference = tl.load(ref_ptr + row) - logp
        grown = tl.exp2(difference / LN2) - 1.0
        loss += k * (grown - difference)
        slope -= k * grown
    tl.store(losses_ptr + row, loss)

    if GRADIENT:
        slope *= inverse_temperature
        out_ptr += row * out_stride
        log2_norm = base * scale + log2_total
        for start in range(0, vocabulary, BLOCK):
            offsets = start + lanes
            inside = offsets < vocabulary
            x = tl.load(logits_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = -slope * tl.exp2(x * scale - log2_norm)
            tl.store(out_ptr + offsets, gradient.to(out_ptr.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # the element below was just written by some other thread
        patched = slope * (1.0 - tl.exp2(logp2))
        tl.store(out_ptr + token, patched.to(out_ptr.dtype.element_ty))


def row_loss_triton(
    logits: Tensor, inputs: TokenInputs, options: LossOptions, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`magrpo_kernels.row.row_loss`. The results are float32."""
    num_tokens, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    target = logits if out is None else out
    assert target.stride(1) == 1, "rows of the gradient must be contiguous"

    def column(values: Tensor | None) -> Tensor:
        return dummy if values is None else values.to(torch.float32).contiguous()

    losses, logps, entropy = (torch.zeros(num_tokens, dtype=torch.float32, device=logits.device) for _ in range(3))
    dummy = losses
    if num_tokens:
        block, warps = launch_shape(vocabulary)
        row_kernel[(num_tokens,)](
            logits,
            logits.stride(0),
            target,
            target.stride(0),
            inputs.token_ids.to(torch.int64).contiguous(),
            column(inputs.coefficients),
            column(inputs.old_logps),
            column(inputs.ref_logps),
            column(inputs.kl_coefficients),
            losses,
            logps,
            entropy,
            LOG2E / options.temperature,
            1.0 / options.temperature,
            options.clip_low or 0.0,
            options.clip_high or 0.0,
            vocabulary,
            HAS_OLD=inputs.old_logps is not None,
            HAS_REF=inputs.ref_logps is not None,
            GRADIENT=out is not None,
            ENTROPY=options.entropy,
            BLOCK=block,
            num_warps=warps,
        )
    return losses, logps, entropy


def launch_shape(vocabulary: int) -> tuple[int, int]:
    """Elements in a block, and warps: 16 elements a thread, as far as the vocabulary fills them."""
    block: Any = min(4096, max(128, triton.next_power_of_2(vocabulary)))
    return block, max(1, block // 512)
