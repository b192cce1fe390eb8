"""``magrpo compare``: runs, runs of baselines, or sweeps side by side; printed, and written as pages and pictures."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from magrpo.layout import makes_tables, steps
from magrpo.plugins import ConfigError
from magrpo.reports.baselines import BaselineResult, BaselineTable, pool_baselines, read_baselines
from magrpo.reports.charts import COLOURS, OVER_PROBLEMS, comparison_panels, compose_figure, save_figure
from magrpo.reports.comparison import comparison_tables
from magrpo.reports.evaluations import EvaluatedRun, load_evaluated_run, load_run_config
from magrpo.reports.over_seeds import (
    COMPARED,
    OVER_SEEDS,
    Settings,
    average_evaluations,
    budget_table,
    difference_tables,
    equal_bar_tables,
    equal_tokens_tables,
    evaluation_table,
    tokens_by_iteration,
)
from magrpo.reports.page import Pictures, ReportTable, print_tables, write_page
from magrpo.store import RunStore
from magrpo.tracking.connection import tracking_uri
from magrpo.tracking.mlflow_runs import recorded_runs
from magrpo.tracking.spool import Unavailable
from pipelines.experiments.baselines import BASELINES
from pipelines.experiments.sweep_grid import load_sweep
from pipelines.experiments.sweep_report import finished_runs, short_titles


def compare(names: Sequence[str], root: Path, output: Path | None) -> int:
    """Compare runs, or sweeps, by name; the exit code, 0.

    Raises:
        ConfigError: there are too few or too many names, one is given twice, unknown or cannot be compared, or they
            are of different kinds.
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
    if sweeps and len(sweeps) < len(names):
        raise ConfigError(f"compare: {sweeps[0]} is a sweep, others are not; compare it with sweeps")
    if sweeps:
        _compare_sweeps(names, root, folder, console)
        return 0
    stores = [RunStore.open(root, name) for name in names]
    tables = [store.run_id for store in stores if makes_tables(load_run_config(store))]
    if tables and len(tables) < len(stores):
        raise ConfigError(f"compare: run {tables[0]} holds baselines, others do not; compare it with runs like it")
    if tables:
        _compare_baselines(stores, folder, console)
    else:
        _compare_runs(stores, root, folder, console)
    return 0


def _compare_runs(stores: Sequence[RunStore], root: Path, folder: Path, console: Console) -> None:
    runs = [load_evaluated_run(letter, store) for letter, store in zip(string.ascii_uppercase, stores, strict=False)]
    names = [store.run_id for store in stores]
    tokens = {run.label: {b.iteration: float(b.tokens) for b in run.budgets} for run in runs}
    evaluations = {run.label: run.reports for run in runs}
    curves = Pictures("Learning curves", comparison_panels(evaluations, tokens), "curves.png", OVER_PROBLEMS)
    tables = [_overview_table(runs, root), *comparison_tables(runs)]
    title = f"Comparison of {', '.join(names[:-1])} and {names[-1]}"
    _write_comparison(folder, title, curves, tables, console)


def _overview_table(runs: Sequence[EvaluatedRun], root: Path) -> ReportTable:
    """The runs, and where their pages in MLflow are."""
    pages, notes = [], []
    for run in runs:
        try:
            recorded = recorded_runs(tracking_uri(run.config.tracking, root), only=run.store.run_id)
        except Unavailable as error:
            pages.append("not known")
            notes.append(f"{error}.")
            continue
        pages.append(recorded[0].mlflow_page[1] if recorded else "not recorded")
        if recorded and recorded[0].mlflow_page[0]:
            notes.append(f"Pages on 127.0.0.1:5000 are there while this runs: {recorded[0].mlflow_page[0]}")
    rows = [
        (run.label, run.store.run_id, f"{run.last.policy_version} of {run.config.train.num_iterations}", page)
        for run, page in zip(runs, pages, strict=True)
    ]
    columns = ("", "run", "evaluated after iteration", "in MLflow")
    return ReportTable("Runs", columns, rows, " ".join(dict.fromkeys(notes)), text=True)


def _compare_sweeps(names: Sequence[str], root: Path, folder: Path, console: Console) -> None:
    """Compare the settings of all sweeps over their seeds, at equal generated tokens."""
    settings: dict[str, Sequence[EvaluatedRun]] = {}
    for name in names:
        sweep = load_sweep(root, name)
        runs_by_setting = finished_runs(sweep)
        if not runs_by_setting:
            raise ConfigError(f"sweep {name} has no finished run yet; resume it: magrpo sweep --resume {name}")
        words = short_titles(sweep)
        for title, runs in runs_by_setting.items():
            settings[f"{name} {words[title]}" if len(words) > 1 else name] = runs
    if len(settings) > len(COLOURS):
        raise ConfigError(f"compare takes sweeps of {len(COLOURS)} settings together, got {len(settings)}")
    means = {title: average_evaluations(runs) for title, runs in settings.items()}
    tokens = tokens_by_iteration(settings, means)
    quantities = [("test", quantity) for quantity in COMPARED]
    curves = Pictures("Learning curves", comparison_panels(means, tokens, quantities), "curves.png", OVER_SEEDS)
    title = f"Comparison of the sweeps {', '.join(names[:-1])} and {names[-1]}"
    _write_comparison(folder, title, curves, [*_sweep_tables(settings)], console)


def _sweep_tables(settings: Settings) -> Iterator[ReportTable]:
    last = {title: [(run, -1) for run in runs] for title, runs in settings.items()}
    note = (
        "Means over seeds, 95 % intervals for new seeds on new problems; with one seed over problems alone. Return is "
        "in percent of the setting's own maximum: where the parts of the rewards differ, compare tests and pass@1."
    )
    yield evaluation_table("At the end of training", last, note)
    yield from difference_tables("At the end of training", last)
    yield from equal_tokens_tables(settings)
    yield from equal_bar_tables(settings)
    yield budget_table(settings)


def _write_comparison(
    folder: Path, title: str, curves: Pictures, tables: Sequence[ReportTable], console: Console
) -> None:
    """Write the page, its Markdown and the curves to ``folder``, and print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    save_figure(compose_figure(curves.panels, curves.note, rows=2), folder / "curves")
    write_page(folder / "compare", title, [curves, *tables])
    print_tables(tables, console)
    console.print(f"written: {folder / 'compare.html'}, compare.md and curves beside it", soft_wrap=True)


def _compare_baselines(stores: Sequence[RunStore], folder: Path, console: Console) -> None:
    """Pool the rows that all runs of baselines have into one table."""
    runs = [_finished_baselines(store) for store in stores]
    for store, results in zip(stores, runs, strict=True):
        if _problem_ids(results) != _problem_ids(runs[0]):
            first = stores[0].run_id
            raise ConfigError(f"run {store.run_id} was not evaluated on the problems of {first}: they do not compare")
    pooled = pool_baselines(runs, {name: entry.title for name, entry in BASELINES.items()})
    names = {result.row.name for result in pooled}
    rows = [result.row.name for results in runs for result in results]
    others = {name: "not in all of the runs" for name in rows if name not in names}
    config = stores[0].config()
    baselines = config.baselines.model_copy(update={"left_out": {**config.baselines.left_out, **others}})
    table = BaselineTable(config.model_copy(update={"baselines": baselines}), pooled)
    folder.mkdir(parents=True, exist_ok=True)
    table.write_files(folder, f"Agents and baselines of {', '.join(store.run_id for store in stores)}")
    print_tables([table.summary_table()], console)
    for name, reason in others.items():
        console.print(f"left out: {name}: {reason}", markup=False)
    console.print(f"written: {folder / 'baselines.html'}, .md, .csv and .json beside it", soft_wrap=True, markup=False)


def _finished_baselines(store: RunStore) -> list[BaselineResult]:
    config = store.config()
    if not all(store.is_committed(step.folder) for step in steps(config) if step.stage == "baseline"):
        raise ConfigError(f"run {store.run_id} is not finished; resume it: magrpo train --resume {store.run_id}")
    return read_baselines(store, config)


def _problem_ids(results: Sequence[BaselineResult]) -> set[str]:
    return {row.task_id for result in results for row in result.report.rows}
