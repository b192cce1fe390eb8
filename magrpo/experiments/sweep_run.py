"""Executes a sweep: runs its runs in turn, records them in MLflow below a parent run, and compares its settings."""

import traceback
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from rich.console import Console

from magrpo.config.run import load_resolved
from magrpo.experiments.sweep_grid import Sweep
from magrpo.process.environment import shorten_path
from magrpo.reports import figures
from magrpo.reports.comparison_tables import setting_table, write_settings
from magrpo.reports.evaluations import EvaluatedRun, load_evaluated_run
from magrpo.reports.over_seeds import Settings, average_evaluations
from magrpo.reports.page import ReportTable, print_banners, print_tables
from magrpo.run.files import is_finished, keep_place, read_place
from magrpo.run.store import RunStore
from magrpo.tracking.mlflow_runs import PARENT_TAG, SWEEP_TAG, MlflowTracker
from magrpo.tracking.outbox import Outbox
from magrpo.types import HEADLINE


def run_sweep(sweep: Sweep, run_one: Callable[[RunStore], object], console: Console) -> dict[str, str]:
    """Execute the unfinished runs in turn, even after failures, then compare all; return the reason of each failure."""
    config = load_resolved(sweep.children[0].config)
    open_tracker = partial(MlflowTracker, config.tracking, sweep.root, sweep.name, sweep.folder, SWEEP_TAG)
    values_tried: dict[str, dict[str, None]] = {}
    for child in sweep.children:
        for key, value in {**child.setting, "train.seed": str(child.seed)}.items():
            values_tried.setdefault(key, {})[value] = None
    parent = open_tracker()
    parent.record_start()
    parent.params({"runs": len(sweep.children)} | {key: ",".join(tried) for key, tried in values_tried.items()})
    parent.flush()  # before the runs, which look the parent up
    failures: dict[str, str] = {}
    status = "FAILED"
    try:
        for number, child in enumerate(sweep.children, 1):
            store = sweep.store(child)
            already = ", finished already" if is_finished(store) else ""
            console.print(f"\n[{number}/{len(sweep.children)}] {child.run_id}{already}", markup=False)
            if already:
                continue
            try:
                if not store.exists():
                    RunStore.create(load_resolved(child.config).model_copy(update={"root": sweep.root}), child.run_id)
                    keep_place(store, read_place(sweep.folder_store))
                with closing(Outbox(store.path)) as outbox:
                    if not outbox.size:  # attach the run to the sweep before its first record
                        outbox.append({"kind": "tags", "values": {PARENT_TAG: sweep.name}})
                run_one(store)
            except Exception as error:  # noqa: BLE001 - whatever ends one run, the others are made
                failures[child.run_id] = f"{type(error).__name__}: {error}".partition("\n")[0]
                (sweep.folder / f"{child.run_id}.error.txt").write_text(traceback.format_exc(), encoding="utf-8")
                console.print(f"{child.run_id} failed: {failures[child.run_id]}", markup=False)
        status = "FAILED" if failures else "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        console.quiet = False  # --quiet hides the progress of the runs, not the result
        parent = open_tracker()
        for path in write_sweep_report(sweep, console):
            parent.artifact(path, "sweep")
        parent.close(status)
    return failures


def write_sweep_report(sweep: Sweep, console: Console) -> list[Path]:
    """Print and write the comparison of the finished runs; return the paths, none if no run is finished."""
    done = finished_runs(sweep)
    if not done:
        return []
    short = short_titles(sweep)
    named = {short[title]: runs for title, runs in done.items()}
    page, rows = sweep.folder / "sweep.html", sweep.folder / "sweep.csv"
    comparisons = write_settings(page, f"Sweep {sweep.name}", named, [_list_runs(sweep, done)])
    _write_csv(rows, done)
    print_tables([setting_table(named)], console)
    print_banners([comparison.banner for comparison in comparisons], console)
    console.print(f"page: {shorten_path(page)}; sweep.csv in the same folder", soft_wrap=True, markup=False)
    return [page, rows]


def finished_runs(sweep: Sweep) -> dict[str, list[EvaluatedRun]]:
    """Return the finished runs of each setting, by its title."""
    done: dict[str, list[EvaluatedRun]] = {}
    for child in sweep.children:
        if is_finished(sweep.store(child)):
            done.setdefault(child.title, []).append(load_evaluated_run(child.run_id, sweep.store(child)))
    return done


def short_titles(sweep: Sweep) -> dict[str, str]:
    """Return a short name for each setting in pictures: its values alone, where these are unique."""
    names = {child.title: " ".join(child.setting.values()) or child.title for child in sweep.children}
    return names if len(set(names.values())) == len(names) else {title: title for title in names}


def _list_runs(sweep: Sweep, done: Settings) -> ReportTable:
    ends = {run.store.run_id: run.last.summary[HEADLINE]["return"] for runs in done.values() for run in runs}
    returns = {run_id: figures.format_interval("return", value) for run_id, value in ends.items()}
    rows = [
        (child.run_id, child.title, str(child.seed), returns.get(child.run_id, "not finished"))
        for child in sweep.children
    ]
    note = "Held-out return, sampled, percent of the maximum; intervals over problems."
    return ReportTable("Runs", ("run", "setting", "seed", "return"), rows, note, text=True)


def _write_csv(path: Path, done: Settings) -> None:
    """Write every figure in long form, as fractions of the maximum: per run, and without a seed per setting."""
    rows: list[tuple[object, ...]] = []
    for title, runs in done.items():
        by_seed = [(str(run.config.train.seed), run.reports) for run in runs]
        for seed, reports in [*by_seed, ("", average_evaluations(runs))]:
            rows += [(title, seed, *row) for row in figures.evaluation_rows(reports)]
    figures.write_csv(path, ("setting", "seed", *figures.EVALUATION_COLUMNS), rows)
