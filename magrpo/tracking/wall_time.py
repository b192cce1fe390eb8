"""The wall time of a run, from the records of its attempts: one figure for the terminal, comparisons and MLflow."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magrpo.tracking.outbox import FINAL, read_outbox


@dataclass(frozen=True, slots=True)
class WallTime:
    """The wall time of the processes that worked on a run, from the start of each command to its end."""

    seconds: float
    num_attempts: int


def read_wall_time(folder: Path) -> WallTime | None:
    """Read the wall time of the run in ``folder`` up to its newest record; None if it never started."""
    records = list(read_outbox(folder))
    starts = [record for record in records if record.get("value") == "RUNNING"]
    if not starts:
        return None
    return WallTime(sum_attempts(records, None), len(starts))


def sum_attempts(records: Iterable[Mapping[str, Any]], now_ms: float | None) -> float:
    """Add up the seconds from every start of a run to its end, or to the last record before the next start.

    ``now_ms``: the present time, in milliseconds since 1970, if the run is in progress; None if it is not.
    """
    total_ms = last_ms = 0.0
    started_ms = None
    for record in records:
        if "time_ms" not in record:
            continue
        if record.get("value") == "RUNNING":
            if started_ms is not None:  # the attempt before was killed, without a record of its end
                total_ms += last_ms - started_ms
            started_ms = record["time_ms"]
        elif record.get("value") in FINAL and started_ms is not None:
            total_ms += record["time_ms"] - started_ms
            started_ms = None
        last_ms = record["time_ms"]
    if started_ms is not None:
        total_ms += (last_ms if now_ms is None else now_ms) - started_ms
    return total_ms / 1000
