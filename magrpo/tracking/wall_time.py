"""The wall time of a run, read from the records of its attempts: the same figure for terminal, report and MLflow."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magrpo.tracking.outbox import FINAL, read_records


@dataclass(frozen=True, slots=True)
class WallTime:
    """How long the processes that worked on a run took, from the start of each command to the end of its run."""

    seconds: float
    num_attempts: int = 1
    loading: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent loading, by what was loaded: libraries, Prefect, base model, engine, sandbox."""

    @property
    def loading_s(self) -> float:
        """Seconds spent loading, together."""
        return sum(self.loading.values())


def read_wall_time(folder: Path, now_ms: float | None = None) -> WallTime | None:
    """The wall time of the run in ``folder``; None if it was never started. ``now_ms`` as in :func:`sum_attempts`."""
    records = read_run_records(folder)
    starts = [record for record in records if record.get("value") == "RUNNING"]
    if not starts:
        return None
    loading: dict[str, float] = defaultdict(float)
    for record in records:
        for name, seconds in record.get("loading", {}).items():
            loading[name] += seconds
    return WallTime(sum_attempts(records, now_ms), len(starts), dict(loading))


def read_run_records(folder: Path) -> list[dict[str, Any]]:
    """The tracking records of the run in ``folder``, oldest first: tags whole, of others only status and time."""
    kept = {"kind", "value", "time_ms", "loading"}
    return [
        {key: value for key, value in record.items() if key in kept or record["kind"] == "tags"}
        for record in read_records(folder)
    ]


def sum_attempts(records: Sequence[Mapping[str, Any]], now_ms: float | None) -> float:
    """Seconds from every start of a run to its end, or to the last record before the next start.

    ``now_ms``: the present, milliseconds since 1970, if the run is in progress.
    """
    total_ms, started_ms, last_ms = 0.0, None, 0.0
    for record in records:
        if "time_ms" not in record:
            continue
        if record.get("value") == "RUNNING":
            total_ms += 0.0 if started_ms is None else last_ms - started_ms
            started_ms = record["time_ms"]
        elif record.get("value") in FINAL and started_ms is not None:
            total_ms += record["time_ms"] - started_ms
            started_ms = None
        last_ms = record["time_ms"]
    if started_ms is not None:
        total_ms += (last_ms if now_ms is None else now_ms) - started_ms
    return total_ms / 1000
