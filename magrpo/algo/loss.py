"""The policy-gradient loss: from tensors to the loss, sums for the metrics, and log-probabilities.

``N`` counts the sampled tokens of a micro-batch, with end-of-sequence tokens but without prompts and padding.
Log-probabilities ``logps`` are natural, at the sampling temperature.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from jaxtyping import Float, Int
from torch import Tensor

from magrpo.algo.returns import join_ties
from magrpo.types import LossNorm, Normalize, Sample
from magrpo_kernels import Groups, LossOptions, PolicyLoss, Support, TokenInputs

LossOf = Callable[[TokenInputs, LossOptions], PolicyLoss]
"""A loss of :mod:`magrpo_kernels`, bound to the hidden states or logits of its tokens."""


def loss_divisor(norm: LossNorm, num_sequences: float, num_tokens: float, max_new_tokens: int) -> float:
    """The divisor of the sum of token losses over the whole batch of one agent.

    Sequences and tokens are counted by the weight of their sequence, which is 1 in runs of one turn. The counts include
    samples without advantage and all micro-batches, so neither skipping nor splitting changes the loss.
    """
    match norm:
        case "sequence_sum":  # the mean over sequences of the sum over their tokens: arXiv 2508.04652
            return num_sequences
        case "sequence_mean":  # as before; the weights of tokens hold the lengths: GRPO, arXiv 2402.03300
            return num_sequences
        case "token_mean":  # the mean over all tokens: DAPO, arXiv 2503.14476
            return num_tokens
        case "dr_grpo":  # a constant, so that length is not rewarded: Dr. GRPO, arXiv 2503.20783
            return num_sequences * max_new_tokens


def tabulate_returns(samples: Mapping[str, Sequence[Sample]], normalize: Normalize) -> Groups | None:
    """Tabulate the returns of all samples group by group, agent after agent, for the loss to form the advantages.

    Returns None if the paper's estimator does not reproduce every stored advantage exactly in float32; the loss then
    takes the stored advantages. That happens with any other estimator, and if a group was also compared with returns
    that have no sample here.
    """
    in_order = [(agent, sample) for agent, agent_samples in samples.items() for sample in agent_samples]
    members: dict[tuple[str, int], list[int]] = {}
    for index, (agent, sample) in enumerate(in_order):
        members.setdefault((agent, sample.group), []).append(index)
    grouped = [[in_order[index][1].returns for index in group] for group in members.values()]
    if normalize == "std":
        grouped = [join_ties(group) for group in grouped]  # as group_advantages does
    order = torch.tensor(list(chain.from_iterable(members.values())), dtype=torch.long)
    sizes = torch.tensor([len(group) for group in members.values()], dtype=torch.long)
    ends = sizes.cumsum(0)
    groups = Groups(
        sequences=order.argsort(),
        returns=torch.tensor(list(chain.from_iterable(grouped)), dtype=torch.float64),
        starts=(ends - sizes).repeat_interleave(sizes),
        ends=ends.repeat_interleave(sizes),
        divides_by_std=normalize == "std",
    )
    stored = torch.tensor([sample.advantage for _, sample in in_order], dtype=torch.float64)[order]
    return groups if torch.equal(groups.form_advantages().float(), stored.float()) else None


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """The loss of the pairs of one node, and how it pushes the log-probability of each joint action."""

    margins: Float[Tensor, " P"]
    """Of each pair; above 0 if the better joint action has become more likely than the worse one."""
    losses: Float[Tensor, " P"]
    """``-log sigmoid(margin)`` of each pair."""
    pushes: Float[Tensor, " J"]
    """Minus the derivative of the mean loss with respect to the log-probability of each joint action."""


def preference_loss(returns: Float[Tensor, " J"], log_ratios: Float[Tensor, " J"], beta: float) -> PreferenceLoss:
    """The DPO loss, arXiv 2305.18290, of all pairs of joint actions with different returns.

    ``log_ratios``: the log-probability of each joint action, the sum over agents, less that under the reference. The
    margin of a pair is ``beta`` times the difference of its log ratios, better less worse.
    """
    is_better = returns[:, None] > returns[None, :]  # [better, worse]
    margins = beta * (log_ratios[:, None] - log_ratios[None, :])
    slopes = torch.where(is_better, beta * torch.sigmoid(-margins), 0.0) / is_better.sum().clamp(min=1)
    of_pairs = margins[is_better]
    return PreferenceLoss(of_pairs, torch.nn.functional.softplus(-of_pairs), slopes.sum(1) - slopes.sum(0))


def k3(logps: Float[Tensor, " N"], ref_logps: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The k3 estimate of KL(policy || reference), never negative: ``exp(d) - d - 1`` with ``d = ref_logp - logp``.

    J. Schulman, http://joschu.net/blog/kl-approx.html.
    """
    difference = ref_logps - logps
    return (difference.expm1() - difference).clamp(min=0.0)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a micro-batch, with the inputs of the loss for each token."""

    token_ids: Int[Tensor, " N"]
    advantages: Float[Tensor, " N"]
    """Advantage of the token's completion."""
    sampling_logps: Float[Tensor, " N"]
    sample_weights: Float[Tensor, " N"]
    """Weight of the token's completion."""
    groups: Groups | None = None
    """The returns from which the loss forms the paper's advantages; None: it takes ``advantages`` as given."""
    old_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities before the update, for the clipped ratio; None: strictly on-policy, without a ratio."""
    lengths: Int[Tensor, " S"] | None = None
    """Number of tokens of each completion, in order: the ratio is that of whole completions. None: that of tokens."""
    ref_logps: Float[Tensor, " N"] | None = None
    """Log-probabilities under the reference policy, for the KL term; None: no KL term."""
    support: Support | None = None
    """The ids that truncated sampling drew the tokens from; None: the whole vocabulary."""


def spread_sequence_ratios(
    logps: Float[Tensor, " N"], old_logps: Float[Tensor, " N"], lengths: Int[Tensor, " S"]
) -> Float[Tensor, " N"]:
    """Old log-probabilities that give every token the ratio of its completion. The result has no gradient.

    The ratio of a completion is the geometric mean of those of its tokens, GSPO, arXiv 2507.18071:
    ``s = exp(mean(logp - old_logp))``. With ``x = logp - log s`` for ``logps`` as they are now, ``exp(logp - x)`` is
    ``s``, and so is its derivative with respect to ``logp``. The mean over the tokens then has the gradient of ``s``,
    and all tokens of a completion are clipped together (GSPO-token, section 4.3).
    """
    log_ratios = torch.segment_reduce(logps - old_logps, "mean", lengths=lengths)
    return logps - log_ratios.repeat_interleave(lengths)


def policy_loss(
    loss_of: LossOf, tokens: SampledTokens, options: LossOptions, divisor: float, beta: float
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]], Float[Tensor, " N"]]:
    """The loss of one micro-batch, sums over tokens for the metrics, and log-probabilities without gradient.

    ``loss_of`` holds the tokens' logits.

    Strictly on-policy: ``-(1/n) sum_i c_i w_i A_i logp_i``, whose gradient is REINFORCE's. With ``old_logps``, the
    clipped surrogate of PPO, arXiv 1707.06347, with ratio ``r_i = exp(logp_i - old_logp_i)``:
    ``-(1/n) sum_i c_i min(r_i w_i A_i, clip(r_i, 1 - clip_low, 1 + clip_high) w_i A_i)``. With ``ref_logps``:
    ``+ (beta/n) sum_i c_i k3_i``. ``n`` is ``divisor``, ``A_i`` the advantage, ``c_i`` the sample weight and ``w_i``
    the truncated importance weight of the token, 1 without ``options.importance_cap``. With ``lengths``, ``r_i`` is the
    ratio of the token's completion (:func:`spread_sequence_ratios`), for which ``loss_of`` is called twice: no token's
    ratio is known before all tokens of its completion are.

    The sums: ``tokens`` and ``clipped`` count the computed and the clipped tokens; ``sampling_gap`` adds up
    |logp - sampling_logp|, ``kl`` the k3 terms, ``importance`` and ``importance_squared`` the importance weights and
    their squares; ``importance_capped`` counts the capped weights.
    """
    weights = tokens.sample_weights
    kl_coefficients = None
    if tokens.ref_logps is not None:
        kl_coefficients = torch.full_like(weights, beta / divisor) * weights
    old_logps, sampling_logps = tokens.old_logps, tokens.sampling_logps
    if old_logps is not None and tokens.lengths is not None:
        all_tokens = TokenInputs(tokens.token_ids, weights, tokens.advantages, support=tokens.support)
        with torch.no_grad():
            present = loss_of(all_tokens, replace(options, importance_cap=None)).logps
            spread = spread_sequence_ratios(present, old_logps, tokens.lengths)
            # Importance weights are those before the update: they depend on the difference, which must stay.
            sampling_logps = sampling_logps + (spread - old_logps)
            old_logps = spread
    inputs = TokenInputs(
        tokens.token_ids,
        weights,
        tokens.advantages if tokens.groups is None else None,
        tokens.groups,
        old_logps,
        tokens.ref_logps,
        kl_coefficients,
        sampling_logps=None if options.importance_cap is None else sampling_logps,
        support=tokens.support,
    )
    result = loss_of(inputs, replace(options, divisor=divisor))
    return result.loss, _sum_metrics(tokens, weights, result.logps, old_logps, options), result.logps


@torch.no_grad()
def _sum_metrics(
    tokens: SampledTokens,
    weights: Float[Tensor, " N"],
    logps: Float[Tensor, " N"],
    old_logps: Float[Tensor, " N"] | None,
    options: LossOptions,
) -> dict[str, Float[Tensor, ""]]:
    """The sums of :func:`policy_loss`. ``old_logps``: those of the ratio, which may be a whole completion's."""
    gains = tokens.advantages * weights
    computed = torch.ones_like(gains) if tokens.ref_logps is not None else (gains != 0).float()
    sums = {"tokens": computed.sum(), "sampling_gap": ((logps - tokens.sampling_logps).abs() * computed).sum()}
    if old_logps is not None:
        clip_low, clip_high = options.clip_range
        ratio = (logps - old_logps).exp()
        clipped = ((ratio > 1 + clip_high) & (gains > 0)) | ((ratio < 1 - clip_low) & (gains < 0))
        sums["clipped"] = clipped.float().sum()
    if options.importance_cap is not None:
        before_update = logps if tokens.old_logps is None else tokens.old_logps
        ratio = (before_update - tokens.sampling_logps).exp()
        importance = ratio.clamp(max=options.importance_cap) * computed
        sums["importance"], sums["importance_squared"] = importance.sum(), importance.square().sum()
        sums["importance_capped"] = ((ratio > options.importance_cap) * computed).sum()
    if tokens.ref_logps is not None:
        sums["kl"] = k3(logps, tokens.ref_logps).sum()
    return sums
