"""A sweep under way: its runs one after the other, recorded in MLflow below one run that stands for the sweep."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console

from magrpo.config import load_resolved
from magrpo.store import RunStore
from magrpo.tracking import PARENT_TAG, SWEEP_TAG, MlflowTracker
from magrpo.tracking.spool import Spool
from pipelines.commands.train import INTERRUPTED, near, run_stages, tool
from pipelines.experiments import sweep_report
from pipelines.experiments.sweep_grid import Child, Sweep, finished
from pipelines.flows.local_server import LocalServer


def launch(sweep: Sweep, *, local: bool) -> int:
    """Make the runs of ``sweep`` that are not finished; the exit code: 1 if one failed, 130 after Ctrl-C."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"sweep {sweep.name}, {len(sweep.children)} runs, in {near(sweep.folder)}", markup=False)
    again = f"{tool('magrpo')} sweep --resume {sweep.name} --root {near(sweep.root)}{' --local' if local else ''}"
    with ExitStack() as stack:
        if not local:  # one server for all runs
            server = stack.enter_context(LocalServer(sweep.root / "prefect"))
            server.wait()
        try:
            failures = run(sweep, lambda store: run_stages(store, console, local=local), console)
        except KeyboardInterrupt:
            console.print(f"\ninterrupted; every committed stage is kept. Go on with:\n  {again}", markup=False)
            return INTERRUPTED
    for run_id, reason in failures.items():
        console.print(f"failed: {run_id}: {reason}", markup=False)
    if failures:
        console.print(f"tracebacks: {near(sweep.folder)}/RUN.error.txt. Try these again with:\n  {again}", markup=False)
    return int(bool(failures))


def run(sweep: Sweep, run_one: Callable[[RunStore], object], console: Console) -> dict[str, str]:
    """Make the runs that are not finished, one after the other, then the comparison; what failed, by run and why.

    A run that fails does not keep the others from being made.
    """
    config = load_resolved(sweep.children[0].config)

    def tracker() -> MlflowTracker:
        return MlflowTracker(config.tracking, sweep.root, sweep.name, sweep.name, sweep.folder, SWEEP_TAG)

    parent = tracker()
    parent.begin()
    parent.params({"runs": len(sweep.children), **_swept(sweep)})
    parent.flush()  # before the runs, which look for it
    failures: dict[str, str] = {}
    status = "FAILED"
    try:
        for number, child in enumerate(sweep.children, 1):
            store = sweep.store(child)
            known = finished(store)
            already = ", finished already" if known else ""
            console.print(f"\n[{number}/{len(sweep.children)}] {child.run_id}{already}", markup=False)
            if known:
                continue
            try:
                _begin(store, child, sweep.name)
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
        parent = tracker()
        for path in sweep_report.write(sweep, console):
            parent.artifact(path, "sweep")
        parent.close(status)
    return failures


def _swept(sweep: Sweep) -> dict[str, str]:
    """The values that were tried, by key."""
    values: dict[str, dict[str, None]] = {}
    for child in sweep.children:
        for key, value in {**child.setting, "train.seed": str(child.seed)}.items():
            values.setdefault(key, {})[value] = None
    return {key: ",".join(tried) for key, tried in values.items()}


def _begin(store: RunStore, child: Child, name: str) -> None:
    """Make the run's directory, if it is not there, with the record that it belongs to the sweep."""
    if not (store.path / "config.json").is_file():
        RunStore.create(load_resolved(child.config).model_copy(update={"root": store.path.parent}), child.run_id)
    spool = Spool(store.path)
    if not spool.records:
        spool.append({"kind": "tags", "values": {PARENT_TAG: name}})
    spool.close()
