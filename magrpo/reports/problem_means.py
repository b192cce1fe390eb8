"""Values by problem: over seeds, subtracted problem by problem, and of the parts that several rewards share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from magrpo.algo.stats import bootstrap_interval, crossed_interval
from magrpo.interfaces import Reward
from magrpo.stages.evaluate import values_by_problem
from magrpo.types import EvalReport, Interval

Means = Mapping[str, Mapping[str, float]]
"""The mean of each problem: ``means[quantity][task_id]``; fractions, counts, seconds."""


def problem_means(report: EvalReport, reward: Reward) -> dict[str, dict[str, dict[str, float]]]:
    """The mean of each problem: ``means["test/sampled"]["return"][task_id]``, units as in the report's summary."""
    return {
        key: {name: {task_id: fmean(v) for task_id, v in values.items()} for name, values in quantities.items()}
        for key, quantities in values_by_problem(report.rows, reward).items()
    }


def problem_returns(report: EvalReport, key: str, reward: Reward) -> dict[str, float]:
    """The mean return on each problem of one summary (``key`` as ``test/sampled``), fractions of the maximum."""
    return problem_means(report, reward).get(key, {}).get("return", {})


def interval_over_seeds(values: Sequence[Mapping[str, float]], seed: int) -> Interval | None:
    """The mean of one value for each problem in every run, with its interval for new seeds on new problems.

    Problems that not all runs have are left out. None: there are no values. Of one run the interval is over problems
    (``seed`` is that of its resampling).
    """
    shared = shared_problems(values)
    return crossed_interval([[one[task_id] for task_id in shared] for one in values], seed) if shared else None


def shared_problems(values: Sequence[Mapping[str, float]]) -> list[str]:
    """The ids of the problems that all of ``values`` have, in the order of the first."""
    return [task_id for task_id in values[0] if all(task_id in one for one in values)] if values else []


def subtracted(minuend: Mapping[str, float], subtrahend: Mapping[str, float]) -> dict[str, float]:
    """The differences on the problems that both have."""
    return {task_id: value - subtrahend[task_id] for task_id, value in minuend.items() if task_id in subtrahend}


def paired_gain(before: Mapping[str, float], after: Mapping[str, float], seed: int) -> Interval:
    """The mean difference on the problems that both have, with its bootstrap interval over problems."""
    return bootstrap_interval([[value] for value in subtracted(after, before).values()], seed)


def common_parts(maxima: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The parts that all rewards have, with the first one's maxima."""
    return {part: maximum for part, maximum in maxima[0].items() if all(part in others for others in maxima)}


def common_share(fractions: Mapping[str, float], common: Mapping[str, float]) -> float:
    """What the common parts come to together, as a share of their maxima; ``fractions`` are of each part's own."""
    return sum(fractions[part] * maximum for part, maximum in common.items()) / sum(common.values())
