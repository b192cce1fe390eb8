"""Means by problem: over seeds, subtracted problem by problem, and of the parts that several rewards share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from magrpo.algo.stats import bootstrap_interval, crossed_interval
from magrpo.interfaces import Reward
from magrpo.stages.evaluate import values_by_problem
from magrpo.types import EvalReport, Interval

Means = Mapping[str, Mapping[str, float]]
"""The mean of each problem, ``means[quantity][task_id]``: fractions, counts or seconds."""
MeansBySummary = Mapping[str, Means]
"""``means["test/sampled"][quantity][task_id]``"""


def compute_problem_means(report: EvalReport, reward: Reward) -> dict[str, dict[str, dict[str, float]]]:
    """The means of each problem, ``means["test/sampled"]["return"][task_id]``, in the units of the summary."""
    return {
        key: {name: {task_id: fmean(v) for task_id, v in values.items()} for name, values in quantities.items()}
        for key, quantities in values_by_problem(report.rows, reward).items()
    }


def mean_returns(report: EvalReport, key: str, reward: Reward) -> dict[str, float]:
    """The mean return on each problem of one summary (``test/sampled``); fractions of the maximum."""
    return compute_problem_means(report, reward).get(key, {}).get("return", {})


def interval_over_seeds(values: Sequence[Mapping[str, float]], seed: int) -> Interval | None:
    """The mean over seeds and problems, with its interval for new seeds on new problems; None without values.

    Args:
        values: a value for each problem, one mapping for each training seed. Problems that some lack are left out.
            With one mapping the interval is over problems.
        seed: of the resampling.
    """
    shared = shared_keys(values)
    return crossed_interval([[one[task_id] for task_id in shared] for one in values], seed) if shared else None


def shared_keys(mappings: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys that all mappings have, in the order of the first."""
    return [key for key in mappings[0] if all(key in other for other in mappings)] if mappings else []


def subtract_means(minuend: Mapping[str, float], subtrahend: Mapping[str, float]) -> dict[str, float]:
    """The differences on the problems that both have."""
    return {task_id: value - subtrahend[task_id] for task_id, value in minuend.items() if task_id in subtrahend}


def paired_gain(before: Mapping[str, float], after: Mapping[str, float], seed: int) -> Interval:
    """The mean difference on the problems that both have, with its bootstrap interval over problems."""
    return bootstrap_interval([[value] for value in subtract_means(after, before).values()], seed)


def common_parts(maxima: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The parts that all rewards have, with the maxima of the first reward."""
    return {part: maxima[0][part] for part in shared_keys(maxima)}


def common_share(fractions: Mapping[str, float], common: Mapping[str, float]) -> float:
    """The common parts together as a share of their maxima; ``fractions`` holds each part over its own maximum."""
    return sum(fractions[part] * maximum for part, maximum in common.items()) / sum(common.values())
