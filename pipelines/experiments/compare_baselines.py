"""``magrpo compare`` of runs that hold baselines: one table, each row with what all runs measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from magrpo.plugins import ConfigError
from magrpo.reports.baselines import Measured, folders_of, measured, pooled, tables, write_tables
from magrpo.reports.tables import show
from magrpo.store import MANIFEST, RunStore


def compare_baselines(stores: Sequence[RunStore], folder: Path, console: Console) -> int:
    """Print the table over all runs and write it to ``folder`` as a run of baselines does; the exit code, 0.

    Raises:
        ConfigError: a run is not finished, or was not evaluated on the problems of the first.
    """
    runs = [_rows(store) for store in stores]
    for store, rows in zip(stores, runs, strict=True):
        if _problems(rows) != _problems(runs[0]):
            first = stores[0].run_id
            raise ConfigError(f"run {store.run_id} was not evaluated on the problems of {first}: they do not compare")
    rows = pooled(runs)
    together = {row.row.name for row in rows}
    config = stores[0].config()
    others = {one.row.name: "not in all of the runs" for run in runs for one in run if one.row.name not in together}
    baselines = config.baselines.model_copy(update={"left_out": {**config.baselines.left_out, **others}})
    config = config.model_copy(update={"baselines": baselines})
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(folder, config, rows, f"Agents and baselines of {', '.join(store.run_id for store in stores)}")
    show([next(tables(config, rows))], console)
    for name in others:
        console.print(f"left out: {name}: {others[name]}", markup=False)
    console.print(f"written: {folder / 'baselines.html'}, .md, .csv and .json beside it", soft_wrap=True, markup=False)
    return 0


def _rows(store: RunStore) -> list[Measured]:
    config = store.config()
    folders = folders_of(store, config)
    if not all((path / MANIFEST).is_file() for path in folders):
        raise ConfigError(f"run {store.run_id} is not finished; magrpo train --resume {store.run_id} goes on with it")
    return measured(config, folders)


def _problems(rows: Sequence[Measured]) -> set[str]:
    return {row.task_id for one in rows for row in one.report.rows}
