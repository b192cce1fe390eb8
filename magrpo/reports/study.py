"""The result of a study as a page and a CSV file: the outcome of each arm, tests against the reference, the pilots.

The file, ``study.csv``, is also the study's memory of finished runs whose folders are gone.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from magrpo.algo.stats import adjust_holm, mean_over_budget, paired_p_value, seed_interval
from magrpo.config.study import StudyConfig, StudyRun, name_reported_run
from magrpo.errors import ConfigError
from magrpo.process.environment import shorten_path
from magrpo.reports import figures
from magrpo.reports.budget import build_ledger
from magrpo.reports.charts import Curve, budget_panels
from magrpo.reports.page import Banner, PageSection, Pictures, print_banners, write_page
from magrpo.reports.tables import ReportTable, print_tables
from magrpo.run.store import RunStore
from magrpo.text import format_count
from magrpo.types import ROUNDING, Interval

QUANTITIES = ("return", "pass_at_1")
"""Quantities of an evaluation that the page shows, as far as the runs have them."""
TABLE = "study.csv"
"""The file of a study's folder with every evaluation of every finished run."""
_COLUMNS = ("arm", "kind", "optim.lr", "seed", "run", "iteration", "tokens", *QUANTITIES)
_NUM_POINTS = 13
"""Number of points of a curve that averages seeds."""
_TWO_SEEDS = (
    "With two seeds Student's t has one degree of freedom, so an interval reaches 12.7 standard errors or more to each "
    "side: this shows how a study works, not which arm is better."
)
_NO_SPREAD = (
    "The difference is the same in every seed, as happens by chance where outcomes take few values, so its spread over "
    "other seeds is unknown: take more seeds, or evaluate more problems."
)
_PAIRED = "Differences are paired by seed, p is that of the paired t test"
_CORRECTED = (
    f"{_PAIRED}, adjusted by Holm's procedure for all {{tests}}. The interval of a difference has the error of its "
    "step of that procedure, so it excludes 0 where p is below 0.05."
)
_SINGLE = f"{_PAIRED}; a single comparison needs no correction."


@dataclass(frozen=True, slots=True)
class StudiedRun(StudyRun):
    """A finished run of a study."""

    evaluations: list[tuple[int, int, Mapping[str, float]]]
    """One entry for each evaluation: its iteration, the tokens that training had generated, and held-out fractions."""

    def has_quantity(self, quantity: str) -> bool:
        """Whether every evaluation measured ``quantity``."""
        return all(quantity in values for _, _, values in self.evaluations)

    def curve(self, quantity: str) -> list[tuple[float, float]]:
        """Return tokens and value of each evaluation."""
        return [(tokens, values[quantity]) for _, tokens, values in self.evaluations]

    def measure(self, study: StudyConfig, tokens: int) -> float:
        """Measure the study's outcome for a budget of ``tokens``."""
        curve = self.curve(study.quantity)
        return mean_over_budget(curve, tokens) if study.is_area else curve[-1][1]


def read_studied_run(store: RunStore, run: StudyRun) -> StudiedRun:
    """Read the evaluations of a finished run."""
    metrics = list(store.stage_metrics())
    tokens = {budget.iteration: budget.tokens for budget in build_ledger(metrics)}
    evaluations: list[tuple[int, int, Mapping[str, float]]] = []
    for iteration, stage, values in sorted(metrics, key=lambda entry: entry[0]):
        if stage == "evaluate":
            found = {name: values[f"eval/{name}"] for name in QUANTITIES if f"eval/{name}" in values}
            evaluations.append((iteration, tokens[iteration], found))
    return StudiedRun(run.run_id, run.arm, run.seed, run.rate, run.is_pilot, evaluations)


def read_table(folder: Path) -> dict[str, StudiedRun]:
    """Read the runs of a study's table, by name; none if there is no table. Raises ConfigError if it is unreadable."""
    path = folder / TABLE
    if not path.exists():
        return {}
    runs: dict[str, StudiedRun] = {}
    try:
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
            values = {name: float(row[name]) for name in QUANTITIES if row[name]}
            rate = float(row["optim.lr"]) if row["optim.lr"] else None
            begun = StudiedRun(row["run"], row["arm"], int(row["seed"]), rate, row["kind"] == "pilot", [])
            run = runs.setdefault(begun.run_id, begun)
            run.evaluations.append((int(row["iteration"]), int(row["tokens"]), values))
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: not a table of this program ({reason}); restore it or delete it") from None
    return runs


@dataclass(frozen=True, slots=True)
class ArmResult:
    """The outcome of an arm over its seeds, and its test against the reference; fractions of the maximum."""

    name: str
    outcomes: Mapping[int, float]
    """Outcome by seed, of the finished runs."""
    difference: Interval | None = None
    p: float | None = None
    """Adjusted p-value; None for the reference, and until every arm has finished all its seeds, at least two."""


@dataclass
class StudyReport:
    """Everything about a study that its page shows."""

    name: str
    study: StudyConfig
    runs: Sequence[StudiedRun]
    """Finished runs, pilots among them."""
    rates: Mapping[str, float | None]
    """Learning rate of each arm whose pilots are finished."""
    failures: Mapping[str, str]
    """Reason why a run failed, by the name of the run."""
    record: Mapping[str, Any]
    """When the study was fixed, its digest, and its content."""

    @property
    def pilots(self) -> list[StudiedRun]:
        """The finished pilots."""
        return [run for run in self.runs if run.is_pilot]

    @property
    def reported(self) -> list[StudiedRun]:
        """The finished runs other than pilots."""
        return [run for run in self.runs if not run.is_pilot]

    @cached_property
    def arms(self) -> list[ArmResult]:
        """The arms in the order of the file, tested against the first once every reported run is finished."""
        budget, seeds = self.study.tokens, self.study.seeds
        outcomes: dict[str, dict[int, float]] = {arm.name: {} for arm in self.study.arms}
        for run in self.reported:
            outcomes[run.arm][run.seed] = run.measure(self.study, budget)
        (reference, base), *others = outcomes.items()
        if not self._has_seeds or any(len(of_arm) < len(seeds) for of_arm in outcomes.values()):
            return [ArmResult(name, of_arm) for name, of_arm in outcomes.items()]
        differences = [[of_arm[seed] - base[seed] for seed in seeds] for _, of_arm in others]
        tests = adjust_holm([paired_p_value(of_arm) for of_arm in differences])
        return [
            ArmResult(reference, base),
            *(
                ArmResult(name, of_arm, seed_interval(pairs, test.error), test.p)
                for (name, of_arm), pairs, test in zip(others, differences, tests, strict=True)
            ),
        ]

    @property
    def _has_seeds(self) -> bool:
        """Whether there are several seeds, without which there are neither intervals nor tests."""
        return len(self.study.seeds) > 1

    @property
    def outcome_title(self) -> str:
        quantity = figures.quantity_title(self.study.quantity)
        if self.study.is_area:
            return f"mean {quantity} over {self.study.tokens:,} tokens"
        return f"{quantity} after {self.study.tokens:,} tokens"

    @property
    def num_missing(self) -> int:
        """Number of reported runs that are not finished."""
        return len(self.study.arms) * len(self.study.seeds) - sum(len(arm.outcomes) for arm in self.arms)

    # ------------------------------------------------------------------------------------------------------- verdicts
    def list_banners(self) -> list[Banner]:
        """Judge every arm against the reference; say instead why there is no verdict, if there is none."""
        reference, *others = self.arms
        seeds = format_count(len(self.study.seeds), "seeds")
        if self.num_missing:
            runs = format_count(self.num_missing, "reported runs")
            sentence = f"{runs} missing, and arms are compared when all are there."
            return [Banner(self.name, "not finished", sentence, "Start the study again to go on.")]
        if not others or not self._has_seeds:
            means = ", ".join(f"{arm.name} {_percent(arm)} %" for arm in self.arms)
            advice = "" if others else "An arm to compare with makes it an experiment."
            return [Banner(self.name, "measured", f"{self.outcome_title}: {means} ({seeds}).", advice)]
        return [self._judge(arm, reference) for arm in others]

    def _judge(self, arm: ArmResult, reference: ArmResult) -> Banner:
        assert arm.difference is not None, "tested, since all runs are finished"
        assert arm.p is not None
        word, relation = "no reliable difference", "is neither reliably better nor worse than"
        if arm.p < 0.05:
            word = "better" if arm.difference.mean > 0 else "worse"
            relation = f"is {word} than"
        seeds = format_count(len(self.study.seeds), "seeds")
        sentence = (
            f"{arm.name} {relation} {reference.name}: {self.outcome_title} {_percent(arm)} against "
            f"{_percent(reference)} %, {figures.format_difference(arm.difference)} percentage points (paired over "
            f"{seeds}, adjusted p = {arm.p:.2g})."
        )
        advice = _TWO_SEEDS if len(self.study.seeds) == 2 else ""
        if not arm.difference.has_width and abs(arm.difference.mean) > ROUNDING:
            advice = _NO_SPREAD
        return Banner(f"{arm.name} against {reference.name}", word, sentence, advice)

    # --------------------------------------------------------------------------------------------------------- tables
    def outcome_table(self) -> ReportTable:
        """Tabulate the primary outcome of every arm."""
        rows = []
        for arm in self.arms:
            interval = seed_interval(list(arm.outcomes.values())) if len(arm.outcomes) > 1 else None
            mean = figures.format_interval("", interval) if interval else _percent(arm)
            difference = figures.format_difference(arm.difference) if arm.difference else figures.UNDEFINED
            p = figures.UNDEFINED if arm.p is None else f"{arm.p:.2g}"
            rows.append((arm.name, self._format_rate(arm.name), str(len(arm.outcomes)), mean, difference, p))
        reference, num_tests = self.study.arms[0].name, len(self.study.arms) - 1
        note = "Held-out problems, sampled; percent"
        note += ", with 95 % intervals of Student's t over seeds. " if self._has_seeds else "."
        if num_tests and self._has_seeds:
            note += _SINGLE if num_tests == 1 else _CORRECTED.format(tests=f"{num_tests} comparisons")
        if len(self.study.seeds) == 2:
            note += f" {_TWO_SEEDS}"
        columns = ("arm", "optim.lr", "seeds", self.outcome_title, f"minus {reference}", "p (Holm)")
        return ReportTable(f"Primary outcome: {self.outcome_title}", columns, rows, note)

    def _format_rate(self, arm: str) -> str:
        if arm not in self.rates:
            return "pilots unfinished"
        rate = self.rates[arm]
        return "as configured" if rate is None else f"{rate:g}"

    def run_table(self) -> ReportTable:
        """Tabulate every reported run, finished or not."""
        finished = {(run.arm, run.seed): run for run in self.reported}
        rows = []
        for arm in self.study.arms:
            for seed in self.study.seeds:
                run = finished.get((arm.name, seed))
                if run is None:
                    reason = self.failures.get(name_reported_run(self.name, arm.name, seed), "not finished")
                    rows.append((arm.name, str(seed), reason, *[figures.UNDEFINED] * (2 + len(self.shown))))
                    continue
                iteration, tokens, values = run.evaluations[-1]
                ends = (f"{100 * values[name]:.1f}" for name in self.shown)
                outcome = f"{100 * run.measure(self.study, self.study.tokens):.1f}"
                rows.append((arm.name, str(seed), outcome, *ends, str(iteration), f"{tokens:,}"))
        titles = (f"{figures.quantity_title(name)} at the end" for name in self.shown)
        columns = ("arm", "seed", self.outcome_title, *titles, "iterations", "tokens")
        note = "Percent. A run ends with the iteration that reaches the budget, so its tokens exceed it a little."
        return ReportTable("Reported runs", columns, rows, note)

    @cached_property
    def shown(self) -> list[str]:
        """The quantities that every finished run has."""
        evaluated = [values for run in self.runs for _, _, values in run.evaluations]
        return [name for name in QUANTITIES if all(name in values for values in evaluated)]

    def pilot_table(self) -> ReportTable | None:
        """Tabulate all pilots; None if the study has none."""
        pilots = self.study.pilots
        if pilots is None:
            return None
        finished = {(run.arm, run.rate, run.seed): run for run in self.pilots}
        tokens = self.study.pilot_tokens
        rows = []
        for arm in self.study.arms:
            for rate in self.study.list_rates(arm):
                found = [finished.get((arm.name, rate, seed)) for seed in pilots.seeds]
                outcomes = [None if run is None else run.measure(self.study, tokens) for run in found]
                known = [outcome for outcome in outcomes if outcome is not None]
                mean = f"{100 * fmean(known):.1f}" if len(known) == len(found) else figures.UNDEFINED
                chosen = "chosen" if self.rates.get(arm.name) == rate else ""
                cells = (figures.UNDEFINED if value is None else f"{100 * value:.1f}" for value in outcomes)
                rows.append((arm.name, f"{rate:g}", *cells, mean, chosen))
        columns = ("arm", "optim.lr", *(f"seed {seed}" for seed in pilots.seeds), "mean", "")
        note = (
            f"Percent, the primary outcome for {tokens:,} tokens. The rate with the best mean is chosen, and of equal "
            "ones the first. No reported seed is among these."
        )
        return ReportTable("Pilots: the choice of the learning rates", columns, rows, note)

    def secondary_table(self) -> ReportTable:
        """Tabulate the final evaluations by arm, without tests."""
        rows = []
        for arm in self.study.arms:
            ends = [run.evaluations[-1][2] for run in self.reported if run.arm == arm.name]
            cells = []
            for name in self.shown:
                values = [end[name] for end in ends]
                interval = seed_interval(values) if len(values) > 1 else _point(values)
                cells.append(figures.format_interval(name, interval))
            rows.append((arm.name, *cells))
        note = "Secondary, in percent"
        note += ": plain 95 % intervals over seeds, not corrected for the number of arms." if self._has_seeds else "."
        columns = ("arm", *map(figures.quantity_title, self.shown))
        return ReportTable("At the end of training", columns, rows, note)

    def fixed_table(self) -> ReportTable:
        """List what was fixed before the first run."""
        rows = [(key, str(value)) for key, value in self.record["fixed"].items()]
        note = f"Fixed on {self.record['when']}, before the first run; digest {self.record['digest']}."
        return ReportTable("What was fixed before the first run", ("key", "value"), rows, note, text=True)

    # ---------------------------------------------------------------------------------------------------------- curves
    def list_curves(self) -> dict[str, Curve]:
        """Average the learning curves of each arm, with intervals from three seeds on."""
        curves: dict[str, Curve] = {}
        places = np.linspace(0, self.study.tokens, _NUM_POINTS)
        for arm in self.study.arms:
            found = [run.curve(self.study.quantity) for run in self.reported if run.arm == arm.name]
            if found:
                columns = np.array([_interpolate(curve, places) for curve in found]).T.tolist()  # (P, S)
                values = [seed_interval(one) if len(one) > 2 else _point(one) for one in columns]
                curves[arm.name] = list(zip((places / 1000).tolist(), filter(None, values), strict=True))
        return curves

    # ---------------------------------------------------------------------------------------------------------- output
    def write_files(self, folder: Path, remembered: Sequence[StudiedRun]) -> list[Path]:
        """Write ``study.html`` and ``study.csv``, which has every evaluation of every finished run.

        Those of ``remembered`` are kept, too: an arm is not ready while one of its pilots is repeated.
        """
        page, table = folder / "study.html", folder / TABLE
        known = {run.run_id for run in self.runs}
        kept = [*self.runs, *(run for run in remembered if run.run_id not in known)]
        write_page(page, f"Study {self.name}", list(self._list_sections()))
        rows = []
        for run in sorted(kept, key=lambda run: not run.is_pilot):  # pilots first
            kind = "pilot" if run.is_pilot else "reported"
            for iteration, tokens, values in run.evaluations:
                measured = map(values.get, QUANTITIES)
                rows.append((run.arm, kind, run.rate, run.seed, run.run_id, iteration, tokens, *measured))
        figures.write_csv(table, _COLUMNS, rows)
        return [page, table]

    def _list_sections(self) -> Iterator[Banner | PageSection]:
        yield from self.list_banners()
        yield PageSection(self.outcome_table())
        if curves := self.list_curves():
            title = f"{figures.quantity_title(self.study.quantity)} of held-out problems".capitalize()
            bands = "; bands are 95 % intervals over seeds" if len(self.study.seeds) > 2 else ""
            note = f"Means over seeds, interpolated between evaluations, up to the budget{bands}."
            yield PageSection(Pictures("Learning curves over tokens", budget_panels(title, curves), note))
        yield PageSection(self.run_table())
        if (pilots := self.pilot_table()) is not None:
            yield PageSection(pilots)
        if self.runs:
            yield PageSection(self.secondary_table())
        if self.failures:
            rows = list(self.failures.items())
            note = "The folder of the page has tracebacks, RUN.error.txt."
            yield PageSection(ReportTable("Runs that failed", ("run", "reason"), rows, note, text=True))
        yield PageSection(self.fixed_table(), folded=True)

    def print(self, console: Console, folder: Path) -> None:
        """Print the primary outcome, the verdicts and the path of the page."""
        console.print()
        print_tables([self.outcome_table()], console)
        print_banners(self.list_banners(), console)
        page = shorten_path(folder / "study.html")
        console.print(f"page: {page}; {TABLE} in the same folder", soft_wrap=True, markup=False)


def _interpolate(curve: Sequence[tuple[float, float]], places: np.ndarray) -> list[float]:
    tokens, values = np.array(curve, dtype=float).T
    return list(np.interp(places, tokens, values))


def _point(values: Sequence[float]) -> Interval | None:
    """The mean as an interval without width; None without values."""
    return Interval.without_width(fmean(values)) if values else None


def _percent(arm: ArmResult) -> str:
    return f"{100 * fmean(arm.outcomes.values()):.1f}" if arm.outcomes else figures.UNDEFINED
