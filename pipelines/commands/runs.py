"""``magrpo runs`` prints the table of runs; ``magrpo sync`` delivers records that MLflow lacks."""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from magrpo.config.services import hide_password
from magrpo.errors import ConfigError
from magrpo.reports.figures import format_duration
from magrpo.reports.series import first_and_last
from magrpo.run.config_diff import list_differing_keys, read_flat_config
from magrpo.run.lock import hold_run, is_held
from magrpo.run.store import CONFIG, RunStore
from magrpo.text import format_count
from magrpo.tracking.mlflow_runs import MlflowTracker
from magrpo.tracking.outbox import read_outbox
from magrpo.tracking.wall_time import sum_attempts
from pipelines.arguments import Json, Root, RunId

STATES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "interrupted", "RUNNING": "running"}
MAX_KEYS = 4
"""Largest number of differing keys that describe the runs of a task; if more differ, none is shown."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One row of the table. ``started_s``: seconds since 1970; ``seconds``: without pauses between processes."""

    name: str
    state: str
    iterations: int
    returns: tuple[float, ...]
    started_s: float
    seconds: float | None
    config: Mapping[str, object]


def list_runs(*, as_json: Json = False, root: Root = Path("runs")) -> int:
    """Print the runs of ``root``, newest first; the exit code is 0. Raises ConfigError if ``root`` is a file."""
    if root.exists() and not root.is_dir():
        raise ConfigError(f"--root {root} is not a folder; name a folder of runs")
    found = list[Summary]()
    for path in sorted(root.glob(f"*/{CONFIG}")):
        try:
            found.append(summarize_folder(path.parent))
        except (ConfigError, OSError) as error:
            print(f"magrpo: skipped: {error}", file=sys.stderr)
    runs = sorted(found, key=lambda run: run.started_s, reverse=True)
    if as_json:
        print(json.dumps([_describe_summary(run) for run in runs], indent=2))
        return 0
    if not runs:
        print(f"no runs in {root}" if root.exists() else f"no runs in {root}: no such folder")
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # files and pipes have no width of their own
    console.print(format_runs(runs, console.width))
    return 0


def sync_run(run: RunId, /, *, root: Root = Path("runs")) -> int:
    """Deliver the tracking records of a run that its store lacks; the exit code is 1 if some still wait.

    Args:
        run: Id of a run that no process is working on.
    """
    store = RunStore.open(root, run)
    # Every outbox begins with a tag, the id of the run's folder.
    if all(record["kind"] == "tags" for record in read_outbox(store.path)):
        print(f"{store.run_id} has recorded nothing yet")
        return 0
    with hold_run(store):
        tracker = MlflowTracker(store.config().tracking, root, store.run_id, store.path)
        tracker.flush()
    if not tracker.is_connected or tracker.num_undelivered:
        waiting = format_count(tracker.num_undelivered, "records") if tracker.num_undelivered else "the records"
        print(f"{waiting} of {store.run_id} still wait in the outbox for {hide_password(tracker.uri)}")
        return 1
    print(f"all records of {store.run_id} are delivered")
    return 0


def summarize_folder(folder: Path) -> Summary:
    """Summarize a run directory in a row."""
    records = list(read_outbox(folder))
    statuses = [record["value"] for record in records if record["kind"] == "status"]
    state = STATES.get(statuses[-1], "unknown") if statuses else "not started"
    running = is_held(folder)
    if running:
        state = "running"
    elif state == "running":
        state = "killed"
    committed = list(RunStore(folder.parent, folder.name).stage_metrics())
    returns = {iteration: metrics["eval/return"] for iteration, stage, metrics in committed if stage == "evaluate"}
    times_ms = [record["time_ms"] for record in records if "time_ms" in record]
    seconds = None
    if statuses:
        now_ms = time.time() * 1000 if running else None
        seconds = sum_attempts(records, now_ms)
    return Summary(
        name=folder.name,
        state=state,
        iterations=max((iteration for iteration, stage, _ in committed if stage == "update"), default=0),
        returns=tuple(returns[iteration] for iteration in sorted(returns)),
        started_s=times_ms[0] / 1000 if times_ms else (folder / CONFIG).stat().st_mtime,
        seconds=seconds,
        config=read_flat_config(folder),
    )


def _describe_summary(run: Summary) -> dict[str, object]:
    """Describe a run for scripts: returns as fractions of the maximum, by evaluation; ``started`` in UTC."""
    return {
        "run": run.name,
        "state": run.state,
        "iterations": run.iterations,
        "num_iterations": run.config.get("train.num_iterations", 0),
        "returns": run.returns,
        "started": datetime.fromtimestamp(run.started_s, UTC).isoformat(timespec="seconds"),
        "seconds": run.seconds,
        "config": dict(run.config),
    }


def _describe_configs(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """Describe each configuration by its task and, if they are few, the keys that differ between runs of this task."""
    tasks = [_describe_task(config) for config in configs]
    differing = {
        task: list_differing_keys([config for config, other in zip(configs, tasks, strict=True) if other == task])
        for task in set(tasks)
    }
    described = []
    for config, task in zip(configs, tasks, strict=True):
        keys = differing[task] if len(differing[task]) <= MAX_KEYS else []
        described.append("\n".join([task, *(f"{key}={config.get(key, '(none)')}" for key in keys)]))
    return described


def _describe_task(config: Mapping[str, object]) -> str:
    """``coopcode, coopcode-base``: the problems and the base models."""
    models = [str(value) for key, value in config.items() if re.fullmatch(r"agents\.\d+\.model", key)]
    names = dict.fromkeys(model.rstrip("/").rpartition("/")[2] for model in models)
    return ", ".join([str(config.get("problems.kind", "?")), *names])


def format_runs(runs: Sequence[Summary], width: int) -> Table:
    """Tabulate the runs; below 100 columns without start and configuration, below 80 also without duration."""
    described = _describe_configs([run.config for run in runs])
    columns = [
        Column("run", overflow="fold"),
        Column("state"),
        Column("iterations", justify="right"),
        Column("held-out return", justify="right"),
        Column("took", justify="right", no_wrap=True),
        Column("started", no_wrap=True),
        Column("task", overflow="fold"),
    ]
    if width < 80:
        columns = columns[:4]
    elif width < 100:
        columns = columns[:5]
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for run, description in zip(runs, described, strict=True):
        cells = (
            Text(run.name),
            Text(run.state),
            f"{run.iterations}/{run.config.get('train.num_iterations', '?')}",
            " \u2192 ".join(f"{value:.1%}" for value in first_and_last(run.returns)),
            "" if run.seconds is None else format_duration(run.seconds),
            f"{datetime.fromtimestamp(run.started_s):%Y-%m-%d %H:%M}",
            Text(description),
        )
        table.add_row(*cells[: len(columns)])
    return table
