"""What training takes to bring settings to one bar, the same quantity for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from magrpo.algo.stats import seed_interval
from magrpo.reports.budget import UNITS, Budget, at
from magrpo.reports.comparison import Compared
from magrpo.reports.figures import NO_DIFFERENCE, column_title, difference_cell
from magrpo.reports.problem_means import common_parts, common_share
from magrpo.reports.tables import Section
from magrpo.types import HEADLINE, EvalReport

BARS = {"pass_at_1": 0.70, "common": 0.85}
"""Fractions that held-out problems, sampled, are to reach; ``common`` are the parts that all rewards have, together."""
_COUNTS = ("iteration", *(unit for unit in UNITS if unit != "updates"))


def reached_bars(done: Mapping[str, Sequence[Compared]]) -> Iterator[Section]:
    """What each setting's runs took to reach each bar, and how many tokens more or less than the first setting's."""
    common = common_parts([run.config.reward.maxima for runs in done.values() for run in runs])
    reached: dict[str, dict[str, list[dict[str, float] | None]]] = {}
    for bar, value in BARS.items():
        if all(_has(report, bar, common) for runs in done.values() for run in runs for report in run.reports):
            reached[bar] = {title: [crossing(run, bar, value, common) for run in runs] for title, runs in done.items()}
    if not reached:
        return
    rows = [
        (_bar_title(bar), title, *_means(crossings))
        for bar, crossings_of in reached.items()
        for title, crossings in crossings_of.items()
    ]
    units = (title for unit, title in UNITS.items() if unit != "updates")
    note = (
        "Where held-out problems, sampled, first reach the bar, interpolated linearly between the evaluations on both "
        "sides of it; means over the seeds, if all of them get there."
    )
    if "common" in reached:
        note += f" Common: {', '.join(common)} together, in percent of their maxima."
    yield Section("Reaching an equal bar", ("bar", "", "reached by", "iterations", *units), rows, note)
    yield from _less_first(done, reached)


def crossing(run: Compared, quantity: str, bar: float, common: Mapping[str, float]) -> dict[str, float] | None:
    """What training had taken (``iteration``, ``tokens`` and so on) where ``quantity`` came to ``bar``; None: never.

    Linear between the first evaluation at the bar or above it and the one before. A run that starts there took 0.
    """
    before: tuple[float, Budget] | None = None
    for report in run.reports:
        value, budget = _mean(report, quantity, common), at(run.budgets, report.policy_version)
        if value >= bar:
            low, start = before or (bar, budget)
            share = (bar - low) / (value - low) if value > low else 0.0
            return {
                name: getattr(start, name) + share * (getattr(budget, name) - getattr(start, name)) for name in _COUNTS
            }
        before = value, budget
    return None


def _has(report: EvalReport, quantity: str, common: Mapping[str, float]) -> bool:
    return bool(common) if quantity == "common" else quantity in report.summary[HEADLINE]


def _mean(report: EvalReport, quantity: str, common: Mapping[str, float]) -> float:
    summary = report.summary[HEADLINE]
    if quantity == "common":
        return common_share({part: summary[part].mean for part in common}, common)
    return summary[quantity].mean


def _bar_title(bar: str) -> str:
    return f"{column_title(bar)} of {BARS[bar]:.0%}"


def _means(crossings: Sequence[Mapping[str, float] | None]) -> list[str]:
    """How many seeds get there, and the mean of each count; no means where some do not."""
    there = [found for found in crossings if found is not None]
    number = f"{len(there)} of {len(crossings)} seeds" if there else "not reached"
    if len(there) < len(crossings):
        return [number, *("" for _ in _COUNTS)]
    return [number, *(f"{fmean(found[name] for found in there):,.0f}" for name in _COUNTS)]


def _less_first(
    done: Mapping[str, Sequence[Compared]],
    reached: Mapping[str, Mapping[str, Sequence[Mapping[str, float] | None]]],
) -> Iterator[Section]:
    """Tokens to each bar less those of the first setting, seed by seed."""
    first, *others = done
    rows = []
    for bar, crossings_of in reached.items():
        tokens = {
            title: {
                run.config.train.seed: None if found is None else found["tokens"]
                for run, found in zip(done[title], crossings, strict=True)
            }
            for title, crossings in crossings_of.items()
        }
        for title in others:
            pairs = [(tokens[title][seed], tokens[first][seed]) for seed in tokens[title] if seed in tokens[first]]
            known = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
            if len(pairs) > 1:
                whole = len(known) == len(pairs)
                text = difference_cell(seed_interval(known), 1.0) if whole else "not reached by all"
                rows.append((_bar_title(bar), title, text, str(len(pairs))))
    if rows:
        note = (
            "Tokens generated in training, the same seeds subtracted from each other; 95 % intervals for new seeds on "
            f"these problems (Student's t). {NO_DIFFERENCE}"
        )
        yield Section(f"Tokens to an equal bar, less {first}", ("bar", "", "difference", "seeds"), rows, note)
