"""The policy-gradient loss: tensors in, (loss, metrics) out.

``N`` counts the sampled tokens of a micro-batch, end-of-sequence tokens included; prompts and padding are not among
them. Log-probabilities ``logps`` are natural, at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

import magrpo_kernels

LossNorm = Literal["sequence_sum", "token_mean", "dr_grpo"]
Impl = Literal["auto", "triton", "torch"]
LossOf = Callable[..., magrpo_kernels.PolicyLoss]
"""``policy_loss_from_hidden`` or ``policy_loss_from_logits`` of :mod:`magrpo_kernels`, with what comes first given."""


def sequence_sum(num_sequences: float, num_tokens: float, max_new_tokens: int) -> float:
    """``n``: the mean over sequences of the sum over their tokens, as in arXiv 2508.04652."""
    return num_sequences


def token_mean(num_sequences: float, num_tokens: float, max_new_tokens: int) -> float:
    """``sum_i T_i``: the mean over all tokens of the batch, as in DAPO, arXiv 2503.14476."""
    return num_tokens


def dr_grpo(num_sequences: float, num_tokens: float, max_new_tokens: int) -> float:
    """``n * max_new_tokens``: a constant, so that length is not rewarded; Dr. GRPO, arXiv 2503.20783."""
    return num_sequences * max_new_tokens


DIVISORS: Mapping[LossNorm, Callable[[float, float, int], float]] = {
    "sequence_sum": sequence_sum,
    "token_mean": token_mean,
    "dr_grpo": dr_grpo,
}
"""What the sum of token losses is divided by: of sequences, tokens and the longest completion allowed.

A sequence and its tokens count by the sequence's weight, 1 in runs of one turn. They are those of the whole batch of
one agent, samples without advantage and other micro-batches included, so neither skipping nor splitting changes the
loss.
"""


def importance_weights(
    old_logps: Float[Tensor, " N"], sampling_logps: Float[Tensor, " N"], cap: float
) -> Float[Tensor, " N"]:
    """``min(exp(old_logp - sampling_logp), cap)``: the truncated importance weight of V-trace, arXiv 1802.01561.

    Corrects for an engine whose probabilities differ from the trainer's. A constant: no gradient flows through it.
    """
    return (old_logps - sampling_logps).detach().exp().clamp(max=cap)


def k3(logps: Float[Tensor, " N"], ref_logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """``exp(d) - d - 1`` with ``d = ref_logp - logp``: the k3 estimate of KL(policy || reference), never negative.

    J. Schulman, http://joschu.net/blog/kl-approx.html.
    """
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def policy_loss(
    loss_of: LossOf,
    token_ids: Int[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    sampling_logps: Float[Tensor, " N"],
    *,
    divisor: float,
    temperature: float = 1.0,
    sample_weights: Float[Tensor, " N"] | None = None,
    weights: Float[Tensor, " N"] | None = None,
    old_logps: Float[Tensor, " N"] | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    ref_logps: Float[Tensor, " N"] | None = None,
    beta: float = 0.0,
    impl: Impl = "auto",
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The loss of one micro-batch, and sums over its tokens for the metrics; ``loss_of`` knows the tokens' logits.

    Strictly on-policy (``old_logps`` None): ``-(1/n) sum_i c_i w_i A_i logp_i``, whose gradient is REINFORCE's. Else
    the clipped surrogate of PPO, arXiv 1707.06347, with ratio ``r_i = exp(logp_i - old_logp_i)``:
    ``-(1/n) sum_i c_i min(r_i w_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) w_i A_i)``. With ``ref_logps``:
    ``+ (beta/n) sum_i c_i k3_i``. ``n`` is ``divisor``, ``A_i`` the advantage of the token's completion (0: the token
    is skipped), ``c_i`` the weight of that completion (``sample_weights``, None: 1), ``w_i`` the token's importance
    weight (``weights``, None: 1).

    The sums: ``tokens`` computed, ``sampling_gap`` of |logp - sampling_logp|, ``clipped`` tokens, ``kl``.
    """
    coefficients = advantages / divisor if weights is None else advantages * weights / divisor
    kl_coefficients = None if ref_logps is None else torch.full_like(coefficients, beta / divisor)
    if sample_weights is not None:
        coefficients = coefficients * sample_weights
        kl_coefficients = None if kl_coefficients is None else kl_coefficients * sample_weights
    result = loss_of(
        token_ids,
        coefficients,
        temperature=temperature,
        old_logps=old_logps,
        clip_low=clip_low,
        clip_high=clip_high,
        ref_logps=ref_logps,
        kl_coefficients=kl_coefficients,
        impl=impl,
    )
    with torch.no_grad():
        computed = torch.ones_like(coefficients) if ref_logps is not None else (coefficients != 0).float()
        logps = result.logps
        sums = {"tokens": computed.sum(), "sampling_gap": ((logps - sampling_logps).abs() * computed).sum()}
        if old_logps is not None and clip_low is not None and clip_high is not None:
            ratio = (logps - old_logps).exp()
            clipped = ((ratio > 1 + clip_high) & (coefficients > 0)) | ((ratio < 1 - clip_low) & (coefficients < 0))
            sums["clipped"] = clipped.float().sum()
        if ref_logps is not None:
            sums["kl"] = k3(logps, ref_logps).sum()
    return result.loss, sums
