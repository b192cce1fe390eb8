"""``magrpo runs``: what runs there are, in the folder of the runs and in the tracking store."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from magrpo.config import TrackingConfig
from magrpo.config_diff import digest_config, list_differing_keys, read_flat_config
from magrpo.layout import is_held
from magrpo.reports.figures import format_duration
from magrpo.store import RunStore
from magrpo.tracking import RecordedRun, hide_password, recorded_runs, tracking_uri
from magrpo.tracking.spool import FINAL, Unavailable

STATES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "interrupted", "RUNNING": "running"}
_FEW = 4
"""Values shown of each run, if no more of them differ."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One line of the list. ``started_s`` is seconds since 1970, ``seconds`` those at work, without pauses between."""

    name: str
    state: str
    iterations: int
    planned: str
    returns: tuple[float, ...]
    started_s: float
    seconds: float | None
    config: Mapping[str, str]


def list_runs(root: Path) -> int:
    """Print the runs of ``root`` and those that only the tracking store knows, newest first; the exit code, 0."""
    found = [_in_folder(path.parent) for path in root.glob("*/config.json")]
    uri = tracking_uri(TrackingConfig(), root)
    elsewhere: list[Summary] = []
    try:
        elsewhere = [_in_store(run) for run in recorded_runs(uri, leave_out={run.name for run in found})]
    except Unavailable as error:
        print(f"magrpo: {error}; only the runs of {root} are listed", file=sys.stderr)
    runs = sorted([*found, *elsewhere], key=lambda run: run.started_s, reverse=True)
    if not runs:
        print(f"no runs in {root}, and none in {hide_password(uri)}")
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width to keep to
    console.print(_table(runs))
    if elsewhere:
        console.print(f"elsewhere: known from {hide_password(uri)} only, no folder in {root}", soft_wrap=True)
    return 0


def worked(records: Sequence[Mapping[str, Any]], now_ms: float | None) -> float:
    """Seconds at work, from the records of a run: of every start to its end, or to the last thing known of it.

    ``now_ms`` is the present, milliseconds since 1970, if the run is under way.
    """
    total, begun, last = 0.0, None, 0.0
    for record in records:
        if "time_ms" not in record:
            continue
        if record.get("value") == "RUNNING":
            total += 0.0 if begun is None else last - begun
            begun = record["time_ms"]
        elif record.get("value") in FINAL and begun is not None:
            total += record["time_ms"] - begun
            begun = None
        last = record["time_ms"]
    if begun is not None:
        total += (last if now_ms is None else now_ms) - begun
    return total / 1000


def _in_folder(folder: Path) -> Summary:
    store = RunStore(folder.parent, folder.name)
    records, config = list(_spooled(folder)), read_flat_config(folder)
    said = [record["value"] for record in records if record["kind"] == "status"]
    running = is_held(folder)
    state = "running" if running else "not started" if not said else STATES[said[-1]]
    committed = list(store.stage_metrics())
    evaluated = {iteration: metrics for iteration, stage, metrics in committed if stage == "evaluate"}
    started = next((record["time_ms"] / 1000 for record in records if "time_ms" in record), None)
    return Summary(
        name=folder.name,
        state="killed" if state == "running" and not running else state,
        iterations=max((iteration for iteration, stage, _ in committed if stage == "update"), default=0),
        planned=config.get("train.num_iterations", "?"),
        returns=tuple(evaluated[iteration]["eval/return"] for iteration in sorted(evaluated)),
        started_s=started or (folder / "config.json").stat().st_mtime,
        seconds=worked(records, time.time() * 1000 if running else None) if said else None,
        config=config,
    )


def _spooled(folder: Path) -> Iterator[dict[str, Any]]:
    """The whole records in a run's spool, which a run under way may be writing to."""
    path = folder / "tracking.jsonl"
    if path.exists():
        data = path.read_bytes()
        yield from map(json.loads, data[: data.rfind(b"\n") + 1].splitlines())


def _in_store(run: RecordedRun) -> Summary:
    return Summary(
        name=run.run_id,
        state=f"{STATES.get(run.status, run.status.lower())}, elsewhere",
        iterations=run.iterations,
        planned=run.params.get("train.num_iterations", "?"),
        returns=run.returns,
        started_s=run.started_ms / 1000,
        seconds=None if run.ended_ms is None else (run.ended_ms - run.started_ms) / 1000,
        config=run.params,
    )


def _table(runs: Sequence[Summary]) -> Table:
    keys = list_differing_keys([run.config for run in runs])
    few = 0 < len(keys) <= _FEW
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", overflow="fold")
    table.add_column("state")
    table.add_column("iterations", justify="right")
    table.add_column("held-out return", justify="right")
    table.add_column("started", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("differs in" if few else "config", overflow="fold")
    for run in runs:
        values = [f"{key}={run.config.get(key, '(none)')}" for key in keys] if few else [digest_config(run.config)]
        started = datetime.fromtimestamp(run.started_s).astimezone().strftime("%Y-%m-%d %H:%M")
        table.add_row(
            run.name,
            run.state,
            f"{run.iterations}/{run.planned}",
            " \u2192 ".join(f"{value:.1%}" for value in run.returns[:1] + run.returns[1:][-1:]),
            started,
            "" if run.seconds is None else format_duration(run.seconds),
            Text("\n".join(values)),
        )
    return table
