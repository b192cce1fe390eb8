"""Settings that were each run with several seeds: means, intervals, and tables at equal cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from magrpo.reports.budget import UNITS, budget_at
from magrpo.reports.evaluated_run import EvaluatedRun
from magrpo.reports.figures import (
    NO_DIFFERENCE,
    format_duration,
    format_interval,
    format_tested_difference,
    quantity_title,
)
from magrpo.reports.page import ReportTable
from magrpo.reports.problem_means import Means, MeansBySummary, interval_over_seeds, shared_keys, subtract_means
from magrpo.types import HEADLINE, EvalReport, Interval

Settings = Mapping[str, Sequence[EvaluatedRun]]
"""The finished runs of each setting, one for each seed, by the setting's title."""
Evaluations = Mapping[str, Sequence[int]]
"""For each run of each setting the index of an evaluation."""
COMPARED = ("return", "pass_at_1")
"""Quantities of curves and differences."""
SHOWN = ("return", "tests", "cooperation", "pass_at_1")
OVER_SEEDS = "Sampled completions; means over seeds, 95 % intervals for new seeds on new problems."
_SEED = 0
"""Of the resampling for settings with one seed."""


def average_evaluations(runs: Sequence[EvaluatedRun]) -> list[EvalReport]:
    """The evaluations of runs that differ only in seed, averaged: means and intervals over seeds, no rows.

    Only iterations and quantities that all runs have are kept. A single run's evaluations are returned as they are.
    """
    if len(runs) == 1:
        return list(runs[0].reports)
    indices = [{report.policy_version: index for index, report in enumerate(run.reports)} for run in runs]
    shared = sorted(set.intersection(*map(set, indices)))
    return [
        _average_means([run.means[index_of[iteration]] for run, index_of in zip(runs, indices, strict=True)], iteration)
        for iteration in shared
    ]


def _average_means(means: Sequence[MeansBySummary], iteration: int) -> EvalReport:
    summary: dict[str, dict[str, Interval]] = {}
    for key in shared_keys(means):
        names = shared_keys([one[key] for one in means])
        values = {name: interval_over_seeds([one[key][name] for one in means], _SEED) for name in names}
        summary[key] = {name: value for name, value in values.items() if value is not None}
    return EvalReport(iteration, (), summary)


def tokens_by_iteration(
    settings: Settings, evaluations: Mapping[str, Sequence[EvalReport]]
) -> dict[str, dict[int, float]]:
    """Tokens generated in training by each evaluation of each setting, a mean over its seeds."""
    return {
        title: {
            report.policy_version: fmean(
                budget_at(run.budgets, report.policy_version).tokens for run in settings[title]
            )
            for report in reports
        }
        for title, reports in evaluations.items()
    }


def equal_tokens_tables(settings: Settings) -> Iterator[ReportTable]:
    """Results at the evaluations nearest to the cheapest run's tokens, and differences to the first setting."""
    tokens = min(run.budgets[-1].tokens for runs in settings.values() for run in runs)
    nearest = {title: [run.nearest_evaluation(tokens) for run in runs] for title, runs in settings.items()}
    title = "At an equal budget of tokens"
    note = (
        f"Each run at the evaluation nearest to {tokens:,} tokens generated in training, the total of the cheapest run."
    )
    yield evaluation_table(title, settings, nearest, note)
    yield from difference_tables(title, settings, nearest)


def budget_table(settings: Settings) -> ReportTable:
    """The mean cost of training of each setting's runs."""
    rows = []
    for title, runs in settings.items():
        budgets = [run.budgets[-1] for run in runs]
        counts = (f"{fmean(budget.counts[unit] for budget in budgets):,.0f}" for unit in UNITS)
        rows.append((title, *counts, format_duration(fmean(budget.seconds for budget in budgets))))
    note = "Training only, a mean over the finished runs of each setting; cached programs are not run again."
    return ReportTable("Budget of a run", ("setting", *UNITS.values(), "time in stages"), rows, note)


def evaluation_table(title: str, settings: Settings, evaluations: Evaluations, note: str) -> ReportTable:
    """Results and cost of each setting at the given evaluations of its runs."""
    means = {setting: _headline_means(runs, evaluations[setting]) for setting, runs in settings.items()}
    names = shared_keys([one for of_setting in means.values() for one in of_setting])
    columns = [name for name in SHOWN if name in names]
    rows = []
    for setting, runs in settings.items():
        budgets = [run.budget_of(index) for run, index in zip(runs, evaluations[setting], strict=True)]
        counts = (f"{fmean(getattr(budget, unit) for budget in budgets):,.0f}" for unit in ("iteration", *UNITS))
        cells = []
        for name in columns:
            value = interval_over_seeds([one[name] for one in means[setting]], _SEED)
            cells.append("-" if value is None else format_interval(name, value))
        rows.append((setting, str(len(runs)), *counts, *cells))
    heads = ("setting", "seeds", "iteration", *UNITS.values(), *map(quantity_title, columns))
    return ReportTable(title, heads, rows, note)


def difference_tables(title: str, settings: Settings, evaluations: Evaluations) -> Iterator[ReportTable]:
    """Each setting less the first, paired by seed and problem; no table without two shared seeds."""
    first, *others = settings
    means = {setting: _headline_means(runs, evaluations[setting]) for setting, runs in settings.items()}
    names = shared_keys([one for of_setting in means.values() for one in of_setting])
    shown = [name for name in COMPARED if name in names]
    by_seed = {
        setting: {run.config.train.seed: (run, one) for run, one in zip(runs, means[setting], strict=True)}
        for setting, runs in settings.items()
    }
    rows = []
    for setting in others:
        seeds = [seed for seed in by_seed[setting] if seed in by_seed[first]]
        if len(seeds) > 1:
            pairs = [(by_seed[setting][seed], by_seed[first][seed]) for seed in seeds]
            rows.append((setting, *(_seed_difference(pairs, name) for name in shown), str(len(seeds))))
    if rows:
        note = (
            "Percentage points, paired by seed and problem; 95 % intervals for new seeds on new problems. "
            f"{NO_DIFFERENCE}"
        )
        yield ReportTable(f"{title}, less {first}", ("setting", *map(quantity_title, shown), "seeds"), rows, note)


def _seed_difference(
    pairs: Sequence[tuple[tuple[EvaluatedRun, Means], tuple[EvaluatedRun, Means]]], quantity: str
) -> str:
    """The mean difference with its interval over seeds, on problems whose text is the same in both runs."""
    differences = []
    for (run, ours), (base, theirs) in pairs:
        both = subtract_means(ours[quantity], theirs[quantity])
        differences.append({t: value for t, value in both.items() if run.problems[t] == base.problems[t]})
    value = interval_over_seeds(differences, _SEED)
    return "other problems" if value is None else format_tested_difference(value)


def _headline_means(runs: Sequence[EvaluatedRun], indices: Sequence[int]) -> list[Means]:
    return [run.means[index][HEADLINE] for run, index in zip(runs, indices, strict=True)]
