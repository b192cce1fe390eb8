"""Settings that ran with several seeds each: their means and intervals over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from magrpo.reports import figures
from magrpo.reports.evaluations import (
    EvaluatedRun,
    interval_over_seeds,
    shared_keys,
    subtract_means,
)
from magrpo.types import HEADLINE, EvalReport, Interval

Settings = Mapping[str, Sequence[EvaluatedRun]]
"""Finished runs of each setting, one for each seed, by the setting's title."""
Evaluation = tuple[EvaluatedRun, int]
"""A run and the index of one of its evaluations."""
Evaluations = Mapping[str, Sequence[Evaluation]]
"""One evaluation of each run, by setting."""
OVER_SEEDS = "Sampled completions; means over seeds, 95 % intervals for new seeds on new problems."
MIN_SEEDS = 3
"""Fewest seeds for an interval. With two, Student's t has one degree of freedom: 12.7 standard errors to each side."""
TOO_FEW_SEEDS = f"Means alone where two seeds were trained: too few seeds for an interval, which takes {MIN_SEEDS}."
SEED = 0
"""Seed of the bootstrap for settings with a single seed; fixed, so that equal runs compare equal."""


def average_evaluations(runs: Sequence[EvaluatedRun]) -> list[EvalReport]:
    """Average the evaluations of runs that differ only in seed: means and intervals over seeds, no rows.

    Keeps only iterations and quantities that all runs have. Returns the evaluations of a single run as they are.
    """
    if len(runs) == 1:
        return list(runs[0].reports)
    versions = [[report.policy_version for report in run.reports] for run in runs]
    averages = []
    for iteration in sorted(set.intersection(*map(set, versions))):
        means = [run.means[of_run.index(iteration)] for run, of_run in zip(runs, versions, strict=True)]
        summary: dict[str, dict[str, Interval]] = {}
        for key in shared_keys(means):
            names = shared_keys([of_run[key] for of_run in means])
            values = {name: interval_over_seeds([of_run[key][name] for of_run in means], SEED) for name in names}
            summary[key] = {name: value for name, value in values.items() if value is not None}
        averages.append(EvalReport(iteration, (), summary))
    return averages


def tokens_by_iteration(
    settings: Settings, evaluations: Mapping[str, Sequence[EvalReport]]
) -> dict[str, dict[int, float]]:
    """Return the tokens generated in training by each evaluation of each setting, averaged over its seeds."""
    return {
        title: {one.policy_version: fmean(run.budget_at(one).tokens for run in settings[title]) for one in reports}
        for title, reports in evaluations.items()
    }


def has_interval(num_seeds: int) -> bool:
    """Whether so many seeds give an interval: one seed has the one over problems, two have none of use."""
    return num_seeds == 1 or num_seeds >= MIN_SEEDS


def format_over_seeds(name: str, value: Interval | None, num_seeds: int) -> str:
    """``mean [low, high]`` of the quantity ``name``; only the mean if there are too few seeds for an interval."""
    text = figures.format_interval(name, value)
    return text if has_interval(num_seeds) else text.partition(" [")[0]


def format_seed_difference(difference: Interval, num_seeds: int, scale: float = 100.0) -> str:
    """``+3.2 [+1.0, +5.4]``; ``+3.2`` if there are too few seeds for an interval over seeds."""
    text = figures.format_difference(difference, scale)
    return text if num_seeds >= MIN_SEEDS else text.partition(" [")[0]


def hide_intervals(reports: Sequence[EvalReport], num_seeds: int) -> list[EvalReport]:
    """Return the evaluations for drawing curves: without bands if there are too few seeds for an interval."""
    if has_interval(num_seeds):
        return list(reports)
    hidden = []
    for report in reports:
        summary = {
            key: {name: Interval(value.mean, value.mean, value.mean) for name, value in values.items()}
            for key, values in report.summary.items()
        }
        hidden.append(replace(report, summary=summary))
    return hidden


def subtract_over_seeds(pairs: Sequence[tuple[Evaluation, Evaluation]], quantity: str) -> Interval | None:
    """Compute the mean difference with its interval over seeds, on problems with the same text in both runs of a pair.

    None if there is no such problem.
    """
    differences = []
    for (run, index), (base, base_index) in pairs:
        both = subtract_means(run.means[index][HEADLINE][quantity], base.means[base_index][HEADLINE][quantity])
        differences.append({t: value for t, value in both.items() if run.problems[t] == base.problems[t]})
    return interval_over_seeds(differences, SEED)
