"""The cost of training until settings reach one bar, the same quantity for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from magrpo.algo.stats import seed_interval
from magrpo.reports.budget import UNITS, Budget
from magrpo.reports.evaluated_run import EvaluatedRun
from magrpo.reports.figures import NO_DIFFERENCE, format_tested_difference, quantity_title
from magrpo.reports.page import ReportTable
from magrpo.reports.problem_means import common_parts, common_share
from magrpo.types import HEADLINE, EvalReport

BARS = {"pass_at_1": 0.70, "common": 0.85}
"""Fractions to reach on held-out problems, sampled; ``common``: the parts that all rewards have, together."""
_COUNTS = ("iteration", *(unit for unit in UNITS if unit != "updates"))

Crossing = Mapping[str, float]
"""The cost of training (``iteration``, ``tokens`` and so on) when a bar was reached."""
Crossings = Mapping[str, Mapping[str, Sequence[Crossing | None]]]
"""By bar and setting: a crossing for each run, None if it never reached the bar."""


def equal_bar_tables(settings: Mapping[str, Sequence[EvaluatedRun]]) -> Iterator[ReportTable]:
    """The cost for each setting's runs to reach each bar, and the tokens less those of the first setting."""
    every = [run for runs in settings.values() for run in runs]
    common = common_parts([run.config.reward.maxima for run in every])
    crossings: Crossings = {
        bar: {title: [find_crossing(run, bar, value, common) for run in runs] for title, runs in settings.items()}
        for bar, value in BARS.items()
        if all(_has_quantity(report, bar, common) for run in every for report in run.reports)
    }
    if not crossings:
        return
    rows = [
        (_bar_title(bar), title, *_mean_crossing(of_runs))
        for bar, by_setting in crossings.items()
        for title, of_runs in by_setting.items()
    ]
    units = (title for unit, title in UNITS.items() if unit != "updates")
    note = (
        "Where held-out problems, sampled, first reach the bar, interpolated linearly between the evaluations on both "
        "sides of it; means over the seeds, if all of them reach it."
    )
    if "common" in crossings:
        note += f" Common: {', '.join(common)} together, in percent of their maxima."
    yield ReportTable("Reaching an equal bar", ("bar", "", "reached by", "iterations", *units), rows, note)
    yield from _token_differences(settings, crossings)


def find_crossing(run: EvaluatedRun, quantity: str, bar: float, common: Mapping[str, float]) -> Crossing | None:
    """The cost of training when ``quantity`` first reached ``bar``; None if it never did.

    Interpolated linearly between the first evaluation at or above the bar and the one before it. If the run's first
    evaluation is at the bar, its cost counts.
    """
    before: tuple[float, Budget] | None = None
    for index, report in enumerate(run.reports):
        value, budget = _headline_mean(report, quantity, common), run.budget_of(index)
        if value >= bar:
            low, start = before or (bar, budget)
            share = (bar - low) / (value - low) if value > low else 0.0
            return {
                name: getattr(start, name) + share * (getattr(budget, name) - getattr(start, name)) for name in _COUNTS
            }
        before = value, budget
    return None


def _has_quantity(report: EvalReport, quantity: str, common: Mapping[str, float]) -> bool:
    return bool(common) if quantity == "common" else quantity in report.summary[HEADLINE]


def _headline_mean(report: EvalReport, quantity: str, common: Mapping[str, float]) -> float:
    summary = report.summary[HEADLINE]
    if quantity == "common":
        return common_share({part: summary[part].mean for part in common}, common)
    return summary[quantity].mean


def _bar_title(bar: str) -> str:
    return f"{quantity_title(bar)} of {BARS[bar]:.0%}"


def _mean_crossing(crossings: Sequence[Crossing | None]) -> list[str]:
    """How many seeds reach the bar, and the mean of each count; no means unless all do."""
    reached = [crossing for crossing in crossings if crossing is not None]
    number = f"{len(reached)} of {len(crossings)} seeds" if reached else "not reached"
    if len(reached) < len(crossings):
        return [number, *("" for _ in _COUNTS)]
    return [number, *(f"{fmean(crossing[name] for crossing in reached):,.0f}" for name in _COUNTS)]


def _token_differences(settings: Mapping[str, Sequence[EvaluatedRun]], crossings: Crossings) -> Iterator[ReportTable]:
    """Tokens to each bar less those of the first setting, seed by seed."""
    first, *others = settings
    rows = []
    for bar, by_setting in crossings.items():
        tokens = {
            title: {
                run.config.train.seed: None if crossing is None else crossing["tokens"]
                for run, crossing in zip(settings[title], of_runs, strict=True)
            }
            for title, of_runs in by_setting.items()
        }
        for title in others:
            pairs = [(tokens[title][seed], tokens[first][seed]) for seed in tokens[title] if seed in tokens[first]]
            reached = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
            if len(pairs) > 1:
                complete = len(reached) == len(pairs)
                text = format_tested_difference(seed_interval(reached), 1.0) if complete else "not reached by all"
                rows.append((_bar_title(bar), title, text, str(len(pairs))))
    if rows:
        note = (
            "Tokens generated in training, subtracted seed by seed; 95 % intervals for new seeds on these problems "
            f"(Student's t). {NO_DIFFERENCE}"
        )
        yield ReportTable(f"Tokens to an equal bar, less {first}", ("bar", "", "difference", "seeds"), rows, note)
