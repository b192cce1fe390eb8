"""Metrics of an update: the sums over tokens that micro-batches add up, and the means of an agent."""

import math
from collections.abc import Mapping, Sequence

from magrpo.config.run import AlgoConfig
from magrpo.types import Sample

_IMPORTANCE_SUMS = {
    "importance": "importance_mean",
    "importance_capped": "importance_capped_frac",
    "importance_squared": "importance_square",
}
"""Sums over tokens that the loss returns, with the names of their means."""
MEANS_OF_AGENTS = {"sampling_gap", "importance_mean", "importance_capped_frac", "importance_ess_frac"}
"""Per-agent metrics that are also logged as a mean over agents."""


def uses_ratio(algo: AlgoConfig) -> bool:
    """Whether later epochs use the clipped probability ratio; preferences need none."""
    return algo.update_epochs > 1 and algo.loss == "policy_gradient"


def list_sums(algo: AlgoConfig, lag: int) -> list[str]:
    """The names of the sums that a micro-batch contributes to."""
    names = ["loss", "tokens", "sampling_gap"]
    if uses_ratio(algo):
        names.append("clipped")
    if algo.beta > 0:
        names.append("kl")
    if lag:
        names += _IMPORTANCE_SUMS
    return names


def summarize_agent(totals: Mapping[str, float], samples: Sequence[Sample]) -> dict[str, float]:
    """Means over trained tokens. ``entropy`` is estimated from the sampled tokens: minus their mean log-probability."""
    tokens = totals.get("tokens", 0.0)
    num_sampled = sum(len(sample.completion_ids) for sample in samples)
    metrics = {
        "loss": totals.get("loss", 0.0),
        "grad_norm": totals.get("grad_norm", 0.0),
        "tokens": tokens,
        "sampling_gap": totals["sampling_gap"] / tokens if tokens else 0.0,
        "entropy": -math.fsum(logp for sample in samples for logp in sample.sampling_logps) / max(num_sampled, 1),
    }
    for total, mean in (("clipped", "clip_frac"), ("kl", "kl"), *_IMPORTANCE_SUMS.items()):
        if total in totals:
            metrics[mean] = totals[total] / max(tokens, 1.0)
    if square := metrics.pop("importance_square", 0.0):
        metrics["importance_ess_frac"] = metrics["importance_mean"] ** 2 / square
    return metrics
