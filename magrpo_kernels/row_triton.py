"""The row operation in Triton, one program for each token.

The first pass computes an online log-sum-exp. Each thread has a running maximum and sum of its own, which are reduced
once, after the loop. The second pass writes the gradient, over the logits if asked to, from the end of the row to its
beginning: the end was read last, so it may still be in the cache.

Exponents are ``(x - base) * scale`` with ``scale = log2(e) / temperature``: the difference of neighbouring floats is
exact, whether or not the compiler contracts the product with an addition. The element of the sampled token is patched
after the second pass, instead of comparing every element with it. Arithmetic is float32 whatever the dtype of the
logits, except for the paper's advantage, which each program forms in float64 from the returns of its token's group. Row
offsets are 64-bit, because N * V exceeds 2^31 at 14,135 tokens of a vocabulary of 151,936.
"""

import math
from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from magrpo_kernels.inputs import LossOptions, TokenInputs

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2.0))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Start of a running maximum. It is finite, so that a difference to it is never ``inf - inf``."""
FARTHEST = tl.constexpr(-1e30)
"""Lower bound of differences of running maxima: ``exp2`` of it is 0, and times the scale it does not overflow."""
LAUNCH = Lock() if triton.knobs.runtime.interpret else nullcontext()
"""Held during a launch. The interpreter replaces functions of ``triton.language``, so only one thread may launch."""


@triton.jit  # type: ignore[untyped-decorator]
def add_block(x, high, total, scale, VECTORS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the logits of one more block to the running maximum and sum of each thread."""
    x = tl.reshape(x.to(tl.float32), (VECTORS, LANES))
    base = tl.maximum(high, tl.max(x, 1))
    power = tl.exp2((x - base[:, None]) * scale)
    shrink = tl.exp2(tl.maximum(high - base, FARTHEST) * scale)
    return base, total * shrink + tl.sum(power, 1)


@triton.jit  # type: ignore[untyped-decorator]
def sum_exponentials(  # type: ignore[no-untyped-def]
    logits_ptr, scale, vocabulary, BLOCK: tl.constexpr, LANES: tl.constexpr
):
    """The first pass: the maximum of the row, and log2 of the sum of exp2((x - maximum) * scale)."""
    VECTORS: tl.constexpr = BLOCK // LANES
    lanes = tl.arange(0, BLOCK)
    # One value for each thread and each vector of a block that the thread loads.
    high = tl.full((VECTORS,), LOWEST, tl.float32)  # running maximum of the raw logits
    total = tl.zeros((VECTORS,), tl.float32)  # sum of exp2((x - high) * scale)
    # Blocks that lie inside the row are loaded without a mask, because with one, every element would be a load of its
    # own if the vocabulary is not a multiple of 16. The rest of the row follows, with a mask.
    whole = vocabulary // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(logits_ptr + start + lanes)
        high, total = add_block(x, high, total, scale, VECTORS, LANES)
    if whole < vocabulary:
        rest = whole + lanes
        x = tl.load(logits_ptr + rest, mask=rest < vocabulary, other=float("-inf"))
        high, total = add_block(x, high, total, scale, VECTORS, LANES)
    base = tl.max(high, 0)
    shrink = tl.exp2(tl.maximum(high - base, FARTHEST) * scale)
    total = tl.sum(total * shrink, 0)
    return base, tl.log2(total)


@triton.jit  # type: ignore[untyped-decorator]
def form_advantage(  # type: ignore[no-untyped-def]
    sequence, returns_ptr, starts_ptr, ends_ptr, STD: tl.constexpr
):
    """``Groups.form_advantages`` for one sequence, in float64 and summed in the same order."""
    first = tl.load(starts_ptr + sequence)
    end = tl.load(ends_ptr + sequence)
    own = tl.load(returns_ptr + sequence)
    total = tl.full((), 0.0, tl.float64)
    equal = own == own
    for i in range(first, end):
        value = tl.load(returns_ptr + i)
        total += value
        equal = equal & (value == own)
    count = (end - first).to(tl.float64)
    mean = total / count
    advantage = own - mean
    if STD:
        squares = tl.full((), 0.0, tl.float64)
        for i in range(first, end):
            distance = tl.load(returns_ptr + i) - mean
            squares += distance * distance
        advantage = advantage / tl.where(equal, 1.0, tl.sqrt(squares / count))
    return tl.where(equal, 0.0, advantage).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def differentiate_loss(  # type: ignore[no-untyped-def]
    row,
    logp2,  # log2 of the token's probability
    c,
    old_ptr,
    ref_ptr,
    kl_ptr,
    sampling_ptr,
    clip_low,
    clip_high,
    importance_cap,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """The loss of one token and its derivative by the token's log-probability; equations in ``magrpo_kernels.row``."""
    logp = logp2 * LN2
    old2 = logp2
    if HAS_OLD:
        old2 = tl.load(old_ptr + row) / LN2
    if HAS_CAP:
        c *= tl.minimum(tl.exp2(old2 - tl.load(sampling_ptr + row) / LN2), importance_cap)
    if HAS_OLD:
        ratio = tl.exp2(logp2 - old2)
        clipped = tl.minimum(tl.maximum(ratio, 1.0 - clip_low), 1.0 + clip_high)
        loss = -tl.minimum(ratio * c, clipped * c)
        slope = tl.where(ratio * c <= clipped * c, -c * ratio, 0.0)
    else:
        loss = -c * logp
        slope = -c
    if HAS_REF:
        k = tl.load(kl_ptr + row)
        d = tl.load(ref_ptr + row) - logp
        # exp(d) - d - 1. Near 0, where the difference would be rounding error alone, by its series.
        series = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
        excess = tl.where(tl.abs(d) < 0.1, series, tl.exp2(d / LN2) - 1.0 - d)
        loss += k * excess
        slope -= k * (excess + d)
    return loss, slope


@triton.jit  # type: ignore[untyped-decorator]
def write_gradient(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, slope, base, log2_total, scale, vocabulary, BLOCK: tl.constexpr
):
    """The second pass: minus ``slope`` times each probability, from the end of the row to its beginning."""
    lanes = tl.arange(0, BLOCK)
    whole = vocabulary // BLOCK * BLOCK
    if whole < vocabulary:
        rest = whole + lanes
        x = tl.load(logits_ptr + rest, mask=rest < vocabulary, other=float("-inf")).to(tl.float32)
        gradient = -slope * tl.exp2((x - base) * scale - log2_total)
        tl.store(out_ptr + rest, gradient.to(out_ptr.dtype.element_ty), mask=rest < vocabulary)
    for back in range(BLOCK, whole + 1, BLOCK):
        offsets = whole - back + lanes
        x = tl.load(logits_ptr + offsets, eviction_policy="evict_first").to(tl.float32)
        gradient = -slope * tl.exp2((x - base) * scale - log2_total)
        tl.store(out_ptr + offsets, gradient.to(out_ptr.dtype.element_ty), eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def row_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # (N, V)
    stride,
    out_ptr,  # (N, V), takes the gradient if GRADIENT; may be the logits
    out_stride,
    ids_ptr,  # (N,) int64
    weights_ptr,  # (N,) float32, as all without a dtype
    advantages_ptr,
    old_ptr,
    ref_ptr,
    kl_ptr,
    sampling_ptr,
    sequences_ptr,  # (N,) int64
    returns_ptr,  # (S,) float64
    starts_ptr,  # (S,) int64
    ends_ptr,  # (S,) int64
    losses_ptr,
    logps_ptr,
    scale,  # log2(e) / temperature
    inverse_temperature,
    clip_low,
    clip_high,
    divisor,
    importance_cap,
    vocabulary,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STD: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # neighbouring elements of one thread: 16 bytes
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    # Load before the first pass, whose barriers separate this from the stores of the second: ``out`` may be ``logits``.
    token = tl.load(ids_ptr + row)
    target = tl.load(logits_ptr + token).to(tl.float32)
    base, log2_total = sum_exponentials(logits_ptr, scale, vocabulary, BLOCK, LANES)
    logp2 = (target - base) * scale - log2_total
    tl.store(logps_ptr + row, logp2 * LN2)

    if HAS_GROUPS:
        advantage = form_advantage(tl.load(sequences_ptr + row), returns_ptr, starts_ptr, ends_ptr, STD)
    else:
        advantage = tl.load(advantages_ptr + row)
    c = tl.div_rn(advantage, divisor) * tl.load(weights_ptr + row)
    loss, slope = differentiate_loss(
        row, logp2, c, old_ptr, ref_ptr, kl_ptr, sampling_ptr, clip_low, clip_high, importance_cap,
        HAS_OLD, HAS_REF, HAS_CAP,
    )  # fmt: skip
    tl.store(losses_ptr + row, loss)

    if GRADIENT:
        slope *= inverse_temperature
        out_ptr += row * out_stride
        write_gradient(logits_ptr, out_ptr, slope, base, log2_total, scale, vocabulary, BLOCK)
        tl.debug_barrier()  # another thread has just written the element below
        patched = slope * (1.0 - tl.exp2(logp2))
        tl.store(out_ptr + token, patched.to(out_ptr.dtype.element_ty))


def row_loss_triton(
    logits: Tensor, inputs: TokenInputs, options: LossOptions, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`magrpo_kernels.row.row_loss`. The results are float32."""
    num_tokens, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    target = logits if out is None else out
    assert target.stride(1) == 1 or vocabulary == 1, "rows of the gradient must be contiguous"
    losses = torch.zeros(num_tokens, dtype=torch.float32, device=logits.device)
    logps = torch.zeros_like(losses)
    if not num_tokens:
        return losses, logps

    unread = losses  # stands in for inputs that the kernel does not read

    def column(values: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        return unread if values is None else values.to(dtype).contiguous()

    groups = inputs.groups
    group_inputs = (unread, unread, unread, unread)
    if groups is not None:
        group_inputs = (
            column(groups.sequences, torch.int64),
            column(groups.returns, torch.float64),
            column(groups.starts, torch.int64),
            column(groups.ends, torch.int64),
        )
    block, warps = launch_shape(vocabulary)
    with LAUNCH:
        row_kernel[(num_tokens,)](
            logits,
            logits.stride(0),
            target,
            target.stride(0),
            column(inputs.token_ids, torch.int64),
            column(inputs.weights),
            column(inputs.advantages),
            column(inputs.old_logps),
            column(inputs.ref_logps),
            column(inputs.kl_coefficients),
            column(inputs.sampling_logps),
            *group_inputs,
            losses,
            logps,
            LOG2E / options.temperature,
            1.0 / options.temperature,
            options.clip_low or 0.0,
            options.clip_high or 0.0,
            options.divisor,
            options.importance_cap or 0.0,
            vocabulary,
            HAS_OLD=inputs.old_logps is not None,
            HAS_REF=inputs.ref_logps is not None,
            HAS_GROUPS=groups is not None,
            HAS_CAP=inputs.sampling_logps is not None,
            STD=groups is not None and groups.divides_by_std,
            GRADIENT=out is not None,
            BLOCK=block,
            LANES=min(block, 16 // logits.element_size()),
            num_warps=warps,
        )
    return losses, logps


def launch_shape(vocabulary: int) -> tuple[int, int]:
    """The numbers of elements in a block and of warps: 16 elements for each thread if the vocabulary is so large."""
    block: Any = min(4096, max(128, triton.next_power_of_2(vocabulary)))
    return block, max(1, block // 512)
