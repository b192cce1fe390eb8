"""Executing a sweep: its runs in turn, recorded in MLflow below a parent run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial

from rich.console import Console

from magrpo.config import load_resolved
from magrpo.layout import is_finished
from magrpo.store import RunStore
from magrpo.tracking import PARENT_TAG, SWEEP_TAG, MlflowTracker
from magrpo.tracking.spool import Spool
from pipelines.experiments.sweep_grid import Child, Sweep
from pipelines.experiments.sweep_report import write_sweep_report


def run_sweep(sweep: Sweep, run_one: Callable[[RunStore], object], console: Console) -> dict[str, str]:
    """Execute the unfinished runs in turn, then compare all of them; returns the reason of each failure by run.

    A failed run does not stop the others.
    """
    config = load_resolved(sweep.children[0].config)
    open_tracker = partial(MlflowTracker, config.tracking, sweep.root, sweep.name, sweep.name, sweep.folder, SWEEP_TAG)
    values_tried: dict[str, dict[str, None]] = {}
    for child in sweep.children:
        for key, value in {**child.setting, "train.seed": str(child.seed)}.items():
            values_tried.setdefault(key, {})[value] = None
    parent = open_tracker()
    parent.record_start()
    parent.params({"runs": len(sweep.children)} | {key: ",".join(tried) for key, tried in values_tried.items()})
    parent.flush()  # before the runs, which look for it
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
                _create_run(store, child, sweep.name)
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
        parent = open_tracker()
        for path in write_sweep_report(sweep, console):
            parent.artifact(path, "sweep")
        parent.close(status)
    return failures


def _create_run(store: RunStore, child: Child, name: str) -> None:
    """Create the run directory unless it exists, with the record that it belongs to the sweep."""
    if not store.exists():
        RunStore.create(load_resolved(child.config).model_copy(update={"root": store.path.parent}), child.run_id)
    spool = Spool(store.path)
    if not spool.records:
        spool.append({"kind": "tags", "values": {PARENT_TAG: name}})
    spool.close()
