"""Use of the machine, sampled by MLflow while a run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from magrpo.config.services import TrackingConfig
from magrpo.tracking.mlflow_runs import MlflowTracker
from tests.databases import write_database
from tests.processes import wait_until

MACHINE = (
    "system/cpu_utilization_percentage",
    "system/disk_available_megabytes",
    "system/disk_usage_megabytes",
    "system/disk_usage_percentage",
    "system/network_receive_megabytes",
    "system/network_transmit_megabytes",
    "system/system_memory_usage_megabytes",
    "system/system_memory_usage_percentage",
)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")


def open_tracker(folder: Path) -> MlflowTracker:
    config = TrackingConfig(uri=write_database(folder / "mlflow.db"))
    return MlflowTracker(config, folder, "run-1", folder / "run-1")


def find_run(folder: Path) -> Run | None:
    """The run that MLflow has recorded in ``folder``, or None while its experiment or run is missing."""
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("magrpo")
    found = client.search_runs([experiment.experiment_id]) if experiment else []
    return found[0] if found else None


def list_steps(folder: Path) -> list[int]:
    run = find_run(folder)
    if run is None:
        return []
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    return [point.step for point in client.get_metric_history(run.info.run_id, MACHINE[0])]


def sample_run(folder: Path, count: int) -> None:
    """Record an attempt at a run until MLflow has that many samples of the run."""
    tracker = open_tracker(folder)
    tracker.watch_system()
    tracker.record_start()
    wait_until(lambda: len(list_steps(folder)) >= count)
    tracker.close("FINISHED")


def test_samples_of_a_resumed_run_follow_earlier_ones_and_end_with_it(tmp_path: Path) -> None:
    sample_run(tmp_path, 2)
    sample_run(tmp_path, len(list_steps(tmp_path)) + 2)
    steps = list_steps(tmp_path)
    assert sorted(steps) == list(range(len(steps)))
    run = find_run(tmp_path)
    assert run is not None
    assert run.info.status == "FINISHED"
    assert set(MACHINE) == {key for key in run.data.metrics if "gpu" not in key}
    assert 0 < run.data.metrics["system/system_memory_usage_percentage"] < 100
    time.sleep(0.2)  # four samples' worth
    assert list_steps(tmp_path) == steps


def test_records_delivered_later_start_no_samples(tmp_path: Path) -> None:
    """``magrpo sync`` delivers the start of a run that is over."""
    tracker = open_tracker(tmp_path)
    tracker.record_start()
    tracker.flush()
    time.sleep(0.3)
    assert list_steps(tmp_path) == []
