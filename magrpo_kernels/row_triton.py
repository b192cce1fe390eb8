"""The row operation in Triton, one program for each token.

The first pass takes an online log-sum-exp, each thread with a running maximum and sum of its own, which are reduced
once, after the loop; the second writes the gradient, over the logits if asked to, from the end of the row to its
beginning: the end was read last, so it may still be in the cache. Exponents are ``(x - base) * scale`` with ``scale =
log2(e) / temperature``: the difference of neighbouring floats is exact, whether or not the compiler contracts the
product with an addition. The sampled token's element is patched after the second pass instead of being compared for at
every element. Arithmetic is float32 whatever the logits are stored in. Row offsets are 64-bit: N * V passes 2^31 at
14,135 tokens of a vocabulary of 151,936.
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
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Where a running maximum starts: finite, so that a difference to it is never ``inf - inf``."""
FARTHEST = tl.constexpr(-1e30)
"""The least exponent of an entropy's terms: ``exp2`` of it is 0, and 0 times it is 0, not NaN as with -inf."""


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
    LANES: tl.constexpr,  # neighbouring elements of one thread: 16 bytes
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    # Before the first pass, whose barriers put these loads before any store of the second: ``out`` may be the logits.
    token = tl.load(ids_ptr + row)
    target = tl.load(logits_ptr + token).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    # One value for each thread and vector that it loads of a block.
    high = tl.full((BLOCK // LANES,), LOWEST, tl.float32)  # running maximum of the raw logits
    total = tl.zeros((BLOCK // LANES,), tl.float32)  # sum of exp2((x - high) * scale)
    weighted = tl.zeros((BLOCK // LANES,), tl.float32)  # the same, weighted by (x - high) * scale
    for start in range(0, vocabulary, BLOCK):
        offsets = start + lanes
        x = tl.load(logits_ptr + offsets, mask=offsets < vocabulary, other=float("-inf")).to(tl.float32)
        x = tl.reshape(x, (BLOCK // LANES, LANES))
        base = tl.maximum(high, tl.max(x, 1))
        exponent = (x - base[:, None]) * scale
        shift = tl.maximum(high - base, FARTHEST) * scale
        shrink = tl.exp2(shift)
        if ENTROPY:
            exponent = tl.maximum(exponent, FARTHEST)
            power = tl.exp2(exponent)
            weighted = (weighted + shift * total) * shrink + tl.sum(power * exponent, 1)
        else:
            power = tl.exp2(exponent)
        total = total * shrink + tl.sum(power, 1)
        high = base
    base = tl.max(high, 0)
    shift = tl.maximum(high - base, FARTHEST) * scale
    shrink = tl.exp2(shift)
    if ENTROPY:
        weighted = tl.sum((weighted + shift * total) * shrink, 0)
    log2_total = tl.log2(tl.sum(total * shrink, 0))
    logp2 = (target - base) * scale - log2_total
    logp = logp2 * LN2
    tl.store(logps_ptr + row, logp)
    if ENTROPY:
        tl.store(entropy_ptr + row, (log2_total - weighted / tl.exp2(log2_total)) * LN2)

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
        num_blocks = tl.cdiv(vocabulary, BLOCK)
        for number in range(0, num_blocks):
            offsets = (num_blocks - 1 - number) * BLOCK + lanes
            inside = offsets < vocabulary
            x = tl.load(logits_ptr + offsets, mask=inside, other=float("-inf"), eviction_policy="evict_first")
            gradient = -slope * tl.exp2((x.to(tl.float32) - base) * scale - log2_total)
            tl.store(
                out_ptr + offsets, gradient.to(out_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first"
            )
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
            LANES=min(block, 16 // logits.element_size()),
            num_warps=warps,
        )
    return losses, logps, entropy


def launch_shape(vocabulary: int) -> tuple[int, int]:
    """Elements in a block, and warps: 16 elements a thread, as far as the vocabulary fills them."""
    block: Any = min(4096, max(128, triton.next_power_of_2(vocabulary)))
    return block, max(1, block // 512)
