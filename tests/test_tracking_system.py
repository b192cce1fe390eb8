"""Use of the machine, recorded while a run goes on."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
from mlflow import MlflowClient

from magrpo.config import TrackingConfig
from magrpo.tracking import MlflowTracker
from magrpo.tracking.system import SystemMonitor

MACHINE = (
    "system/cpu_utilization_percentage",
    "system/run_memory_megabytes",
    "system/system_memory_usage_megabytes",
    "system/system_memory_usage_percentage",
)
GPU = (
    "memory_usage_megabytes",
    "memory_usage_percentage",
    "power_usage_percentage",
    "power_usage_watts",
    "utilization_percentage",
)


class Samples:
    """Takes up samples, and lets wait for a number of them."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, dict[str, float]]] = []
        self.came = threading.Semaphore(0)

    def __call__(self, metrics: Mapping[str, float], step: int) -> None:
        self.taken.append((step, dict(metrics)))
        self.came.release()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.came.acquire(timeout=60)


def test_samples_are_numbered_from_the_first_and_end_with_the_block() -> None:
    samples = Samples()
    before = threading.active_count()
    with SystemMonitor(samples, 5, interval_s=0.01):
        samples.wait(2)
    assert threading.active_count() == before
    assert [step for step, _ in samples.taken[:2]] == [5, 6]
    values = samples.taken[1][1]
    assert set(MACHINE) == {key for key in values if "gpu" not in key}
    assert 0 < values["system/system_memory_usage_percentage"] < 100
    assert 0 < values["system/run_memory_megabytes"] < values["system/system_memory_usage_megabytes"]


def test_a_gpu_is_sampled_where_nvml_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = types.ModuleType("pynvml")
    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "gpu",
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=3e9, total=12e9),
        "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=80),
        "nvmlDeviceGetPowerUsage": 300_000,
        "nvmlDeviceGetEnforcedPowerLimit": 600_000,
    }
    for name, answer in answers.items():
        setattr(nvml, name, lambda *_, answer=answer: answer)
    nvml.NVMLError = RuntimeError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("mlflow.system_metrics.metrics.gpu_monitor.pynvml", nvml, raising=False)
    samples = Samples()
    with SystemMonitor(samples, 0, interval_s=0.01):
        samples.wait(1)
    values = samples.taken[0][1]
    assert set(values) == {*MACHINE, *(f"system/gpu_0_{key}" for key in GPU)}
    assert values["system/gpu_0_utilization_percentage"] == 80
    assert values["system/gpu_0_memory_usage_percentage"] == 25
    assert values["system/gpu_0_power_usage_watts"] == 300


def test_a_short_run_is_over_before_a_sample() -> None:
    samples = Samples()
    with SystemMonitor(samples, 0, interval_s=60):
        pass
    assert samples.taken == []


def test_samples_of_a_resumed_run_follow_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magrpo.tracking.system.INTERVAL_S", 0.01)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):
        tracker = MlflowTracker(TrackingConfig(uri=uri), tmp_path, "run-1", "run-1", tmp_path / "run-1")
        samples = Samples()
        tracked = tracker.metrics
        monkeypatch.setattr(tracker, "metrics", lambda m, s, to=tracked, also=samples: (to(m, s), also(m, s)))
        with tracker.watch_system():
            samples.wait(2)
        tracker.close("FINISHED")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("magrpo")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "system/run_memory_megabytes")]
    assert len(steps) >= 4
    assert sorted(steps) == list(range(len(steps)))
