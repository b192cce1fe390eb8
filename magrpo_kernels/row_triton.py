"""The row operation in Triton, one program for each token.

The first pass takes an online log-sum-exp, each thread with a running maximum and sum of its own, which are reduced
once, after the loop; the second writes the gradient, over the logits if asked to, from the end of the row to its
beginning: the end was read last, so it may still be in the cache. Exponents are ``(x - base) * scale`` with ``scale =
log2(e) / temperature``: the difference of neighbouring floats is exact, whether or not the compiler contracts the
product with an addition. The sampled token's element is patched after the second pass instead of being compared for at
every element. Arithmetic is float32 whatever the logits are stored in, but for the advantage, which each program forms
in float64 from the returns of its token's group, however many they are. Row offsets are 64-bit: N * V passes 2^31 at
14,135 tokens of a vocabulary of 151,936.
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
"""Where a running maximum starts: finite, so that a difference to it is never ``inf - inf``."""
FARTHEST = tl.constexpr(-1e30)
"""The least exponent of an entropy's terms: ``exp2`` of it is 0, and 0 times it is 0, not NaN as with -inf."""
LAUNCH = Lock() if triton.knobs.runtime.interpret else nullcontext()
"""Held during a launch. The interpreter replaces functions of ``triton.language``, so only one thread may be in it."""


@triton.jit  # type: ignore[untyped-decorator]
def add_block(  # type: ignore[no-untyped-def]
    x, high, total, weighted, scale, ENTROPY: tl.constexpr, VECTORS: tl.constexpr, LANES: tl.constexpr
):
    """Running maximum and sums of each thread with the logits of one more block."""
    x = tl.reshape(x.to(tl.float32), (VECTORS, LANES))
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
    return base, total * shrink + tl.sum(power, 1), weighted


@triton.jit  # type: ignore[untyped-decorator]
def form_advantage(  # type: ignore[no-untyped-def]
    sequence, returns_ptr, group_ptr, bounds_ptr, estimators_ptr, STD: tl.constexpr
):
    """What ``magrpo_kernels.advantages`` computes for one return: in float64, summed in the same order."""
    group = tl.load(group_ptr + sequence)
    first = tl.load(bounds_ptr + group)
    end = tl.load(bounds_ptr + group + 1)
    estimator = tl.load(estimators_ptr + group)
    own = tl.load(returns_ptr + sequence)
    total = tl.full((), 0.0, tl.float64)
    high = own
    equal = own == own
    for i in range(first, end):
        value = tl.load(returns_ptr + i)
        total += value
        high = tl.where((value > high) | (value != value), value, high)  # NaN stays
        equal = equal & (value == own)
    count = (end - first).to(tl.float64)
    mean = total / count
    centred = own - mean
    others = tl.where(count > 1.0, count - 1.0, 1.0)
    advantage = tl.where(estimator == 1, centred * (count / others), centred)  # marloo, else magrpo
    advantage = tl.where(estimator == 2, own - high, advantage)  # maremax
    advantage = tl.where(estimator >= 3, own, advantage)  # mareinforce, given
    vanishes = equal & (estimator < 3)
    if STD:
        squares = tl.full((), 0.0, tl.float64)
        for i in range(first, end):
            distance = tl.load(returns_ptr + i) - mean
            squares += distance * distance
        deviation = tl.sqrt(squares / count)
        deviation = tl.where(equal | (estimator == 4), 1.0, deviation)
        advantage = advantage / deviation
        vanishes = equal & (estimator < 4)
    return tl.where(vanishes, 0.0, advantage).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def row_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # (N, V)
    stride,
    out_ptr,  # (N, V), takes the gradient if GRADIENT; may be the logits
    out_stride,
    ids_ptr,  # (N,) int64
    coefficients_ptr,  # (N,) float32, as all without a dtype
    old_ptr,
    ref_ptr,
    kl_ptr,
    sampling_ptr,
    sequences_ptr,  # (N,) int64
    returns_ptr,  # (S,) float64
    group_ptr,  # (S,) int64
    bounds_ptr,  # (P + 1,) int64
    estimators_ptr,  # (P,) int64
    losses_ptr,
    logps_ptr,
    entropy_ptr,
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
    VECTORS: tl.constexpr = BLOCK // LANES
    # One value for each thread and vector that it loads of a block.
    high = tl.full((VECTORS,), LOWEST, tl.float32)  # running maximum of the raw logits
    total = tl.zeros((VECTORS,), tl.float32)  # sum of exp2((x - high) * scale)
    weighted = tl.zeros((VECTORS,), tl.float32)  # the same, weighted by (x - high) * scale
    # Blocks that lie inside the row, without a mask, which would make every element a load of its own in a vocabulary
    # that is not a multiple of 16; then the rest.
    whole = vocabulary // BLOCK * BLOCK
    rest = whole + lanes
    for start in range(0, whole, BLOCK):
        x = tl.load(logits_ptr + start + lanes)
        high, total, weighted = add_block(x, high, total, weighted, scale, ENTROPY, VECTORS, LANES)
    if whole < vocabulary:
        x = tl.load(logits_ptr + rest, mask=rest < vocabulary, other=float("-inf"))
        high, total, weighted = add_block(x, high, total, weighted, scale, ENTROPY, VECTORS, LANES)
    base = tl.max(high, 0)
    shift = tl.maximum(high - base, FARTHEST) * scale
    shrink = tl.exp2(shift)
    if ENTROPY:
        weighted = tl.sum((weighted + shift * total) * shrink, 0)
    total = tl.sum(total * shrink, 0)
    log2_total = tl.log2(total)
    logp2 = (target - base) * scale - log2_total
    logp = logp2 * LN2
    tl.store(logps_ptr + row, logp)
    if ENTROPY:
        tl.store(entropy_ptr + row, (log2_total - weighted / total) * LN2)

    c = tl.load(coefficients_ptr + row)
    if HAS_GROUPS:
        sequence = tl.load(sequences_ptr + row)
        advantage = form_advantage(sequence, returns_ptr, group_ptr, bounds_ptr, estimators_ptr, STD)
        c = tl.div_rn(advantage, divisor) * c
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
        # exp(d) - d - 1; near 0 by its series, where the difference would be rounding alone.
        series = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6))))
        excess = tl.where(tl.abs(d) < 0.1, series, tl.exp2(d / LN2) - 1.0 - d)
        loss += k * excess
        slope -= k * (excess + d)
    tl.store(losses_ptr + row, loss)

    if GRADIENT:
        slope *= inverse_temperature
        out_ptr += row * out_stride
        if whole < vocabulary:
            x = tl.load(logits_ptr + rest, mask=rest < vocabulary, other=float("-inf")).to(tl.float32)
            gradient = -slope * tl.exp2((x - base) * scale - log2_total)
            tl.store(out_ptr + rest, gradient.to(out_ptr.dtype.element_ty), mask=rest < vocabulary)
        for back in range(BLOCK, whole + 1, BLOCK):
            offsets = whole - back + lanes
            x = tl.load(logits_ptr + offsets, eviction_policy="evict_first").to(tl.float32)
            gradient = -slope * tl.exp2((x - base) * scale - log2_total)
            tl.store(out_ptr + offsets, gradient.to(out_ptr.dtype.element_ty), eviction_policy="evict_first")
        tl.debug_barrier()  # the element below was just written by some other thread
        patched = slope * (1.0 - tl.exp2(logp2))
        tl.store(out_ptr + token, patched.to(out_ptr.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def scale_kernel(values_ptr, scale_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply in place; where the scale is 1, nothing is read or written."""
    scale = tl.load(scale_ptr)
    if scale != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + offsets, mask=offsets < count)
        tl.store(values_ptr + offsets, (values.to(tl.float32) * scale).to(values.dtype), mask=offsets < count)


def scale_triton_(values: Tensor, scale: Tensor) -> None:
    """See :func:`magrpo_kernels.backward._scale_`. ``values`` are contiguous."""
    assert values.is_contiguous()
    if not values.numel():
        return
    with LAUNCH:
        scale_kernel[(triton.cdiv(values.numel(), 4096),)](
            values, scale.to(torch.float32), values.numel(), BLOCK=4096, num_warps=8
        )


def row_loss_triton(
    logits: Tensor, inputs: TokenInputs, options: LossOptions, out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`magrpo_kernels.row.row_loss`. The results are float32."""
    num_tokens, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    target = logits if out is None else out
    assert target.stride(1) == 1 or vocabulary == 1, "rows of the gradient must be contiguous"
    groups = inputs.groups
    losses, logps, entropy = (torch.zeros(num_tokens, dtype=torch.float32, device=logits.device) for _ in range(3))

    def column(values: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
        return losses if values is None else values.to(dtype).contiguous()

    if not num_tokens:
        return losses, logps, entropy
    token_ids, *columns = inputs.columns.values()
    of_groups = [losses] * 5
    if groups is not None:
        of_groups = [groups.sequences, groups.returns, groups.list_groups(), groups.bounds, groups.estimators]
        of_groups = [column(v, torch.float64 if v.is_floating_point() else torch.int64) for v in of_groups]
    block, warps = launch_shape(vocabulary)
    with LAUNCH:
        row_kernel[(num_tokens,)](
            logits,
            logits.stride(0),
            target,
            target.stride(0),
            column(token_ids, torch.int64),
            *map(column, columns),
            *of_groups,
            losses,
            logps,
            entropy,
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
            STD=groups is not None and options.normalize == "std",
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
