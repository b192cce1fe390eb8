"""Settings that were each run with several seeds: means, intervals, and tables at equal cost and at an equal bar."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from magrpo.algo.stats import seed_interval
from magrpo.reports import figures
from magrpo.reports.budget import UNITS, Budget
from magrpo.reports.evaluations import (
    EvaluatedRun,
    common_parts,
    common_share,
    interval_over_seeds,
    shared_keys,
    subtract_means,
)
from magrpo.reports.page import ReportTable
from magrpo.types import HEADLINE, EvalReport, Interval

Settings = Mapping[str, Sequence[EvaluatedRun]]
"""The finished runs of each setting, one for each seed, by the setting's title."""
Evaluation = tuple[EvaluatedRun, int]
"""A run and the index of one of its evaluations."""
Evaluations = Mapping[str, Sequence[Evaluation]]
"""For each setting an evaluation of each of its runs."""
COMPARED = ("return", "pass_at_1")
"""Quantities of curves and differences."""
SHOWN = ("return", "tests", "cooperation", "pass_at_1")
OVER_SEEDS = "Sampled completions; means over seeds, 95 % intervals for new seeds on new problems."
BARS = {"pass_at_1": 0.70, "common": 0.85}
"""Fractions to reach on held-out problems, sampled; ``common``: the parts that all rewards have, together."""
MIN_SEEDS = 3
"""With two seeds Student's t has one degree of freedom: an interval of 12.7 standard errors to each side."""
TOO_FEW_SEEDS = f"Means alone where two seeds were trained: too few seeds for an interval, which takes {MIN_SEEDS}."
_COUNTS = ("iteration", *(unit for unit in UNITS if unit != "updates"))
_SEED = 0
"""Of the resampling for settings with one seed."""

Crossing = Mapping[str, float]
"""The cost of training (``iteration``, ``tokens`` and so on) when a bar was reached."""


def average_evaluations(runs: Sequence[EvaluatedRun]) -> list[EvalReport]:
    """The evaluations of runs that differ only in seed, averaged: means and intervals over seeds, no rows.

    Only iterations and quantities that all runs have are kept. A single run's evaluations are returned as they are.
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
            values = {name: interval_over_seeds([of_run[key][name] for of_run in means], _SEED) for name in names}
            summary[key] = {name: value for name, value in values.items() if value is not None}
        averages.append(EvalReport(iteration, (), summary))
    return averages


def tokens_by_iteration(
    settings: Settings, evaluations: Mapping[str, Sequence[EvalReport]]
) -> dict[str, dict[int, float]]:
    """Tokens generated in training by each evaluation of each setting, a mean over its seeds."""
    return {
        title: {one.policy_version: fmean(run.budget_at(one).tokens for run in settings[title]) for one in reports}
        for title, reports in evaluations.items()
    }


def budget_table(settings: Settings) -> ReportTable:
    """The mean cost of training of each setting's runs."""
    rows = []
    for title, runs in settings.items():
        budgets = [run.budgets[-1] for run in runs]
        counts = (f"{fmean(budget.counts[unit] for budget in budgets):,.0f}" for unit in UNITS)
        rows.append((title, *counts, figures.format_duration(fmean(budget.seconds for budget in budgets))))
    note = "Training only, a mean over the finished runs of each setting; cached programs are not run again."
    return ReportTable("Budget of a run", ("setting", *UNITS.values(), "time in stages"), rows, note)


# ---------------------------------------------------------------------------------------------- at given evaluations
def evaluation_table(title: str, evaluations: Evaluations, note: str) -> ReportTable:
    """Results and cost of each setting at the given evaluations of its runs."""
    columns = _shared_quantities(SHOWN, evaluations)
    rows = []
    for setting, chosen in evaluations.items():
        budgets = [run.budget_at(run.reports[index]) for run, index in chosen]
        counts = (f"{fmean(getattr(budget, unit) for budget in budgets):,.0f}" for unit in ("iteration", *UNITS))
        cells = []
        for name in columns:
            means = [run.means[index][HEADLINE][name] for run, index in chosen]
            cells.append(format_over_seeds(name, interval_over_seeds(means, _SEED), len(chosen)))
        rows.append((setting, str(len(chosen)), *counts, *cells))
    heads = ("setting", "seeds", "iteration", *UNITS.values(), *map(figures.quantity_title, columns))
    if any(len(chosen) == MIN_SEEDS - 1 for chosen in evaluations.values()):
        note += f" {TOO_FEW_SEEDS}"
    return ReportTable(title, heads, rows, note)


def has_interval(num_seeds: int) -> bool:
    """Whether that many seeds give an interval: one has that over problems, two have none of use."""
    return num_seeds == 1 or num_seeds >= MIN_SEEDS


def format_over_seeds(name: str, value: Interval | None, num_seeds: int) -> str:
    """``mean [low, high]`` of the quantity ``name``; the mean alone if the seeds are too few for an interval."""
    text = figures.format_interval(name, value)
    return text if has_interval(num_seeds) else text.partition(" [")[0]


def format_seed_difference(difference: Interval, num_seeds: int, scale: float = 100.0) -> str:
    """``+3.2 [+1.0, +5.4]``; ``+3.2`` if the seeds are too few for an interval over seeds."""
    text = figures.format_difference(difference, scale)
    return text if num_seeds >= MIN_SEEDS else text.partition(" [")[0]


def hide_intervals(reports: Sequence[EvalReport], num_seeds: int) -> list[EvalReport]:
    """The evaluations as curves show them: without bands if the seeds are too few for an interval."""
    if has_interval(num_seeds):
        return list(reports)
    return [
        replace(
            report,
            summary={
                key: {name: Interval(value.mean, value.mean, value.mean) for name, value in summary.items()}
                for key, summary in report.summary.items()
            },
        )
        for report in reports
    ]


def difference_tables(title: str, evaluations: Evaluations) -> Iterator[ReportTable]:
    """Each setting minus the first, paired by seed and problem; no table without two shared seeds."""
    first, *others = evaluations
    shown = _shared_quantities(COMPARED, evaluations)
    by_seed = {name: {one[0].config.train.seed: one for one in chosen} for name, chosen in evaluations.items()}
    rows = []
    for setting in others:
        pairs = [(chosen, by_seed[first][seed]) for seed, chosen in by_seed[setting].items() if seed in by_seed[first]]
        if len(pairs) > 1:
            rows.append((setting, *(_format_seed_difference(pairs, name) for name in shown), str(len(pairs))))
    if rows:
        note = "Percentage points, paired by seed and problem; 95 % intervals for new seeds on new problems. "
        columns = ("setting", *map(figures.quantity_title, shown), "seeds")
        yield ReportTable(
            f"{title}, difference to {first}", columns, rows, f"{note}{figures.NO_DIFFERENCE} {TOO_FEW_SEEDS}"
        )


def equal_tokens_tables(settings: Settings) -> Iterator[ReportTable]:
    """Results at the evaluations nearest to the cheapest run's tokens, and differences to the first setting."""
    tokens = min(run.budgets[-1].tokens for runs in settings.values() for run in runs)
    nearest = {title: [(run, run.nearest_evaluation(tokens)) for run in runs] for title, runs in settings.items()}
    title = "At an equal budget of tokens"
    note = (
        f"Each run at the evaluation nearest to {tokens:,} tokens generated in training, the total of the cheapest run."
    )
    yield evaluation_table(title, nearest, note)
    yield from difference_tables(title, nearest)


def _shared_quantities(names: Sequence[str], evaluations: Evaluations) -> list[str]:
    """Those of ``names`` that every evaluation has on held-out problems, sampled."""
    means = [run.means[index][HEADLINE] for chosen in evaluations.values() for run, index in chosen]
    return [name for name in names if all(name in of_run for of_run in means)]


def subtract_over_seeds(pairs: Sequence[tuple[Evaluation, Evaluation]], quantity: str) -> Interval | None:
    """The mean difference with its interval over seeds, on problems whose text is the same in both runs of a pair.

    None if there is no such problem.
    """
    differences = []
    for (run, index), (base, base_index) in pairs:
        both = subtract_means(run.means[index][HEADLINE][quantity], base.means[base_index][HEADLINE][quantity])
        differences.append({t: value for t, value in both.items() if run.problems[t] == base.problems[t]})
    return interval_over_seeds(differences, _SEED)


def _format_seed_difference(pairs: Sequence[tuple[Evaluation, Evaluation]], quantity: str) -> str:
    value = subtract_over_seeds(pairs, quantity)
    if value is None:
        return "other problems"
    return (
        figures.format_tested_difference(value)
        if len(pairs) >= MIN_SEEDS
        else format_seed_difference(value, len(pairs))
    )


# ------------------------------------------------------------------------------------------------------ at equal bars
def equal_bar_tables(settings: Settings) -> Iterator[ReportTable]:
    """The cost for each setting's runs to reach each bar, and the tokens less those of the first setting."""
    every = [run for runs in settings.values() for run in runs]
    common = common_parts([run.config.reward.maxima for run in every])
    rows, differences = [], []
    for bar, value in BARS.items():
        if not (common if bar == "common" else all(bar in r.summary[HEADLINE] for run in every for r in run.reports)):
            continue
        title = f"{figures.quantity_title(bar)} of {value:.0%}"
        crossings = {name: [find_crossing(run, bar, value, common) for run in runs] for name, runs in settings.items()}
        rows += [(title, name, *_format_crossings(of_runs)) for name, of_runs in crossings.items()]
        differences += [(title, *row) for row in _token_differences(settings, crossings)]
    if not rows:
        return
    units = (title for unit, title in UNITS.items() if unit != "updates")
    note = (
        "Cost at which the sampled held-out problems first reach the target, interpolated linearly between the "
        "evaluations before and after; means over the seeds, if all of them reach it."
    )
    if common:
        note += f" Common: {', '.join(common)} together, in percent of their maxima."
    yield ReportTable("Target reached", ("target", "", "reached by", "iterations", *units), rows, note)
    if differences:
        note = (
            "Tokens generated in training, subtracted seed by seed; 95 % intervals for new seeds on these problems "
            f"(Student's t). {figures.NO_DIFFERENCE} {TOO_FEW_SEEDS}"
        )
        title = f"Tokens to reach the target, difference to {next(iter(settings))}"
        yield ReportTable(title, ("target", "", "difference", "seeds"), differences, note)


def find_crossing(run: EvaluatedRun, quantity: str, bar: float, common: Mapping[str, float]) -> Crossing | None:
    """The cost of training when ``quantity`` first reached ``bar``; None if it never did.

    Interpolated linearly between the first evaluation at or above the bar and the one before it. If the run's first
    evaluation is at the bar, its cost counts.
    """
    before: tuple[float, Budget] | None = None
    for report in run.reports:
        summary, budget = report.summary[HEADLINE], run.budget_at(report)
        if quantity == "common":
            value = common_share({part: summary[part].mean for part in common}, common)
        else:
            value = summary[quantity].mean
        if value >= bar:
            low, start = before or (bar, budget)
            share = (bar - low) / (value - low) if value > low else 0.0
            return {
                name: getattr(start, name) + share * (getattr(budget, name) - getattr(start, name)) for name in _COUNTS
            }
        before = value, budget
    return None


def _format_crossings(crossings: Sequence[Crossing | None]) -> list[str]:
    """How many seeds reach the bar, and the mean of each count; no means unless all do."""
    reached = [crossing for crossing in crossings if crossing is not None]
    number = f"{len(reached)} of {len(crossings)} seeds" if reached else "not reached"
    complete = len(reached) == len(crossings)
    return [number, *(f"{fmean(one[name] for one in reached):,.0f}" if complete else "" for name in _COUNTS)]


def _token_differences(
    settings: Settings, crossings: Mapping[str, Sequence[Crossing | None]]
) -> Iterator[tuple[str, str, str]]:
    """For each setting but the first: its title, its tokens to a bar minus the first setting's, the number of seeds."""
    by_seed = {
        title: {run.config.train.seed: crossing for run, crossing in zip(settings[title], of_runs, strict=True)}
        for title, of_runs in crossings.items()
    }
    first, *others = settings
    for title in others:
        pairs = [(one, by_seed[first][seed]) for seed, one in by_seed[title].items() if seed in by_seed[first]]
        differences = [one["tokens"] - base["tokens"] for one, base in pairs if one is not None and base is not None]
        if len(pairs) < 2:
            continue
        text = "not reached by all"
        if len(differences) == len(pairs):
            value = seed_interval(differences)
            enough = len(pairs) >= MIN_SEEDS
            text = (
                figures.format_tested_difference(value, 1.0)
                if enough
                else format_seed_difference(value, len(pairs), 1.0)
            )
        yield title, text, str(len(pairs))
