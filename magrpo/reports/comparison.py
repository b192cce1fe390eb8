"""``magrpo compare``: what two runs or more differ in, what they came to, and what they cost."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from magrpo.algo.stats import bootstrap_difference, bootstrap_interval
from magrpo.config import RunConfig
from magrpo.config_diff import list_differing_keys, read_flat_config
from magrpo.layout import find_evaluations, makes_tables, read_evaluation, read_held_out
from magrpo.plugins import ConfigError
from magrpo.reports.budget import UNITS, Budget, at, ledger
from magrpo.reports.charts import COLOURS, OVER_PROBLEMS, comparison_panels, comparison_picture, save
from magrpo.reports.figures import (
    NO_DIFFERENCE,
    SPLIT_TITLES,
    cell,
    column_title,
    columns_of,
    difference_cell,
    format_duration,
)
from magrpo.reports.page import Pictures, write_page
from magrpo.reports.problem_means import problem_means, problem_returns
from magrpo.reports.tables import Section, show
from magrpo.store import RunStore
from magrpo.tracking import recorded_runs, tracking_uri
from magrpo.tracking.spool import Unavailable
from magrpo.types import EvalReport, Interval, Problem
from pipelines.experiments.compare_baselines import compare_baselines

STAGES = ("prepare", "rollout", "score", "credit", "update", "evaluate", "report")
_SEED = 0
"""Of the resampling, so that equal runs compare equal."""


@dataclass
class Compared:
    """A run under the letter it goes by, and what is read of it."""

    letter: str
    store: RunStore
    config: RunConfig
    reports: list[EvalReport]
    """Its evaluations in their order, at least one."""

    @property
    def last(self) -> EvalReport:
        return self.reports[-1]

    def problem_returns(self, key: str) -> dict[str, float]:
        """The mean return on each problem in the last evaluation, ``key`` as ``test/sampled``; fractions."""
        return problem_returns(self.last, key, self.config.reward)

    @cached_property
    def means(self) -> list[dict[str, dict[str, dict[str, float]]]]:
        """Of each evaluation the mean of each problem: ``means[-1]["test/sampled"]["return"][task_id]``."""
        return [problem_means(report, self.config.reward) for report in self.reports]

    @cached_property
    def budgets(self) -> list[Budget]:
        """What its training had taken, by iteration."""
        return ledger(self.store.stage_metrics())

    def nearest(self, tokens: int) -> int:
        """The number of the evaluation whose budget is nearest to ``tokens`` generated, from 0."""
        spent = [at(self.budgets, report.policy_version).tokens for report in self.reports]
        return min(range(len(spent)), key=lambda number: abs(spent[number] - tokens))

    def budget(self, number: int) -> Budget:
        """What training had taken by the evaluation of this number."""
        return at(self.budgets, self.reports[number].policy_version)

    @cached_property
    def problems(self) -> dict[str, Problem]:
        """The problems never trained on, by id."""
        return read_held_out(self.store)


def compare(names: Sequence[str], root: Path, output: Path | None) -> int:
    """Print the comparison of the runs and write it as Markdown, HTML and pictures; the exit code, 0.

    Raises:
        ConfigError: fewer than two runs or more than there are colours, one twice, one there is not or without an
            evaluation, one that this version cannot read, or some that hold baselines and others that do not.
    """
    if not 2 <= len(names) <= len(COLOURS):
        raise ConfigError(f"compare takes 2 to {len(COLOURS)} runs, got {len(names)}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"compare: run {twice} is named twice")
    folder = output or root / "comparisons" / "-vs-".join(names)[:200]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    sweeps = [name for name in names if (root / "sweeps" / name).is_dir()]
    if len(sweeps) == len(names):
        from pipelines.experiments.compare_sweeps import compare_sweeps

        return compare_sweeps(names, root, folder, console)
    if sweeps:
        raise ConfigError(f"compare: {sweeps[0]} is a sweep, others are not; compare it with sweeps")
    stores = [RunStore.open(root, name) for name in names]
    tables = [store.run_id for store in stores if makes_tables(_config(store))]
    if len(tables) == len(stores):
        return compare_baselines(stores, folder, console)
    if tables:
        raise ConfigError(f"compare: run {tables[0]} holds baselines, others do not; compare it with runs like it")
    runs = [load_compared(letter, store) for letter, store in zip(string.ascii_uppercase, stores, strict=False)]
    title = f"Comparison of {', '.join(names[:-1])} and {names[-1]}"
    sections = [*_sections(runs, root)]
    tokens = {run.letter: {b.iteration: float(b.tokens) for b in run.budgets} for run in runs}
    evaluations = {run.letter: run.reports for run in runs}
    picture = comparison_picture(evaluations, tokens=tokens)
    curves = Pictures("Learning curves", comparison_panels(evaluations, tokens), "curves.png", OVER_PROBLEMS)
    write_comparison(folder, title, picture, curves, sections, console)
    return 0


def write_comparison(
    folder: Path, title: str, picture: Figure, curves: Pictures, sections: Sequence[Section], console: Console
) -> None:
    """Write the comparison to ``folder``, ``picture`` as a file of its own, and print its tables."""
    folder.mkdir(parents=True, exist_ok=True)
    save(picture, folder / "curves")
    write_page(folder / "compare", title, [curves, *sections])
    show(sections, console)
    console.print(f"written: {folder / 'compare.html'}, compare.md and curves beside it", soft_wrap=True)


def load_compared(letter: str, store: RunStore) -> Compared:
    """A run with its evaluations.

    Raises:
        ConfigError: it has none, or this version cannot read it.
    """
    config = _config(store)
    evaluations = find_evaluations(store)
    if not evaluations:
        raise ConfigError(f"run {store.run_id} has no evaluation yet; magrpo train --resume {store.run_id} goes on")
    return Compared(letter, store, config, [read_evaluation(store.folder(p)) for p in evaluations.values()])


def _config(store: RunStore) -> RunConfig:
    try:
        return store.config()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"run {store.run_id}: config.json is of another version ({error})") from error


def _sections(runs: Sequence[Compared], root: Path) -> Iterator[Section]:
    yield _overview(runs, root)
    yield _config_differences(runs)
    keys = [key for key in runs[0].last.summary if all(key in run.last.summary for run in runs)]
    order = list(SPLIT_TITLES)
    keys.sort(key=lambda key: (order.index(key.split("/")[0]), key.endswith("/greedy")))
    yield _differences(runs, keys)
    for key in keys:
        yield _evaluation(runs, key)
    yield from _equal_budget(runs, keys)
    from magrpo.reports.equal_bar import reached_bars  # which is about runs as this module reads them

    yield from reached_bars({run.letter: [run] for run in runs})
    yield _cost(runs)


def _overview(runs: Sequence[Compared], root: Path) -> Section:
    looks, notes = [], []
    for run in runs:
        uri = tracking_uri(run.config.tracking, root)
        try:
            recorded = recorded_runs(uri, only=run.store.run_id)
        except Unavailable as error:
            looks.append("not known")
            notes.append(f"{error}.")
            continue
        looks.append(recorded[0].look[1] if recorded else "not recorded")
        if recorded and recorded[0].look[0]:
            notes.append(f"Pages on 127.0.0.1:5000 are there while this runs: {recorded[0].look[0]}")
    rows = [
        (run.letter, run.store.run_id, f"{run.last.policy_version} of {run.config.train.num_iterations}", look)
        for run, look in zip(runs, looks, strict=True)
    ]
    columns = ("", "run", "evaluated after iteration", "in MLflow")
    return Section("Runs", columns, rows, " ".join(dict.fromkeys(notes)), text=True)


def _config_differences(runs: Sequence[Compared]) -> Section:
    configs = [read_flat_config(run.store.path) for run in runs]
    rows = [(key, *(config.get(key, "(none)") for config in configs)) for key in list_differing_keys(configs)]
    note = "" if rows else "None: the configurations are equal."
    return Section("Configuration, where it differs", ("key", *(run.letter for run in runs)), rows, note, text=True)


def _evaluation(runs: Sequence[Compared], key: str) -> Section:
    summaries = [run.last.summary[key] for run in runs]
    shared = [name for name in summaries[0] if all(name in summary for summary in summaries)]
    parts = {part: value for part, value in runs[0].config.reward.maxima.items() if part in shared}
    rows = [
        (column_title(column), *(cell(column, summary[column]) for summary in summaries))
        for column in columns_of({name: summaries[0][name] for name in shared}, parts)
    ]
    rows.append(("problems", *(str(len(run.problem_returns(key))) for run in runs)))
    note = "Percent of each run's maximum, 95 % intervals over problems; tokens are counts."
    return Section(evaluation_title(key), ("", *(run.letter for run in runs)), rows, note)


def evaluation_title(key: str) -> str:
    """``test/sampled`` in words."""
    split, mode = key.split("/")
    title = SPLIT_TITLES[split]
    return f"{title[0].upper()}{title[1:]}, {mode}"


def _differences(runs: Sequence[Compared], keys: Sequence[str]) -> Section:
    rows = []
    for key in keys:
        for run in runs[1:]:
            value, how = difference(runs[0], run, key)
            rows.append((evaluation_title(key), f"{run.letter} \u2212 {runs[0].letter}", difference_cell(value), how))
    note = (
        "Points of percent of the maximum, bootstrap 95 % intervals over problems: what other problems of the kind "
        f"would change is in them, what another seed of the training would change is not. {NO_DIFFERENCE}"
    )
    return Section("Differences of return", ("", "runs", "difference", "problems"), rows, note)


def difference(first: Compared, second: Compared, key: str) -> tuple[Interval, str]:
    """The second run's mean return less the first's, a fraction, and a word on how it was formed.

    Paired by problem where all problems of one evaluation are in the other, the same to the letter; else unpaired.
    """
    minuend, subtrahend = second.problem_returns(key), first.problem_returns(key)
    same = [t for t in subtrahend if t in minuend and first.problems[t] == second.problems[t]]
    if same and len(same) == min(len(minuend), len(subtrahend)):
        paired = [[minuend[task_id] - subtrahend[task_id]] for task_id in same]
        return bootstrap_interval(paired, _SEED), f"{len(same)} the same, paired"
    value = bootstrap_difference(list(minuend.values()), list(subtrahend.values()), _SEED)
    return value, f"not the same, unpaired ({len(same)} in both)"


def _equal_budget(runs: Sequence[Compared], keys: Sequence[str]) -> Iterator[Section]:
    """The evaluation of each run nearest to the tokens of the cheapest one; nothing if only one trained."""
    trained = [run for run in runs if run.budgets[-1].updates]
    if len(trained) < 2:
        return
    budget = min(run.budgets[-1].tokens for run in trained)
    rows = []
    for run in trained:
        number = run.nearest(budget)
        report, taken = run.reports[number], run.budget(number)
        returns = (cell("return", report.summary[key]["return"]) for key in keys)
        counts = (f"{getattr(taken, unit):,}" for unit in UNITS)
        rows.append((run.letter, str(taken.iteration), *counts, *returns))
    note = (
        f"Each run at the evaluation nearest to {budget:,} tokens generated in training, all that the cheapest run "
        "took, and what it had taken by then. Return in percent of the run's own maximum."
    )
    columns = ("run", "iteration", *UNITS.values(), *map(evaluation_title, keys))
    yield Section("At an equal budget of tokens", columns, rows, note)


def _cost(runs: Sequence[Compared]) -> Section:
    columns = [_spent(run) for run in runs]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    note = "Stages in seconds, all iterations together; tokens are those sampled."
    return Section("Cost", ("", *(run.letter for run in runs)), rows, note)


def _spent(run: Compared) -> dict[str, str]:
    seconds: dict[str, float] = defaultdict(float)
    gpus = 0.0
    for _, stage, metrics in run.store.stage_metrics():
        name = stage.partition(".")[0]
        seconds[name] += metrics.get(f"time/{name}_s", 0.0)
        gpus += metrics.get("start/gpus", 0.0)
    spent = sum(seconds.values())
    hours = f"{gpus * spent / 3600:.2f}"
    # Runs evaluated before generated_tokens was recorded have 0 there, and had one turn counted.
    evaluated = sum(row.generated_tokens or row.response_tokens for report in run.reports for row in report.rows)
    counts = {f"{title}, training": f"{getattr(run.budgets[-1], unit):,}" for unit, title in UNITS.items()}
    counts["tokens generated, evaluation"] = f"{evaluated:,}"
    return (
        counts
        | {stage: f"{seconds[stage]:.1f}" for stage in STAGES}
        | {"all": format_duration(spent), "GPU-hours": hours}
    )
