"""``magrpo sync``: deliver tracking records that the MLflow server of a run has not received."""

from __future__ import annotations

from pathlib import Path

from magrpo.store import RunStore
from magrpo.tracking.connection import hide_password
from magrpo.tracking.mlflow_runs import MlflowTracker


def sync_run(run_id: str, root: Path) -> int:
    """Deliver the waiting tracking records of a run; the exit code is 1 if some still wait."""
    store = RunStore.open(root, run_id)
    tracker = MlflowTracker(store.config().tracking, root, run_id, store.path)
    tracker.flush()
    if tracker.num_undelivered:
        print(f"{tracker.num_undelivered} records of {run_id} still wait for {hide_password(tracker.uri)}")
        return 1
    print(f"every record of {run_id} is delivered")
    return 0
