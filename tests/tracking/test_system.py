"""Use of the machine, recorded while a run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from magrpo.config.services import TrackingConfig
from magrpo.tracking.mlflow_runs import MlflowTracker
from magrpo.tracking.system import run_memory, sample_system

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


def test_samples_are_numbered_from_the_first_and_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magrpo.tracking.system.INTERVAL_S", 0.01)
    samples = Samples()
    with sample_system(samples, 5):
        samples.wait(2)
    assert "magrpo-system-metrics" not in {thread.name for thread in threading.enumerate()}
    assert [step for step, _ in samples.taken[:2]] == [5, 6]
    values = samples.taken[1][1]
    assert set(MACHINE) == {key for key in values if "gpu" not in key}
    assert 0 < values["system/system_memory_usage_percentage"] < 100
    # The machine's figure leaves out pages of files, which the run's has: the two need not be in order.
    assert 0 < values["system/run_memory_megabytes"] < psutil.virtual_memory().total / 1e6


# Fills a mapping of 256 MB, forks four children that read all of it, and prints the memory of the run in bytes.
FAMILY = """
import mmap, os, signal
from magrpo.tracking.system import run_memory
size = 256_000_000
big = mmap.mmap(-1, size, flags=FLAGS)
for start in range(0, size, 1 << 20):
    big[start : start + (1 << 20)] = bytes([1]) * min(1 << 20, size - start)
ready, tell = os.pipe()
children = []
for _ in range(4):
    if not (child := os.fork()):
        assert sum(big[start] for start in range(0, size, 4096)) == -(-size // 4096)
        os.write(tell, b"x")
        signal.pause()
    children.append(child)
for _ in children:
    os.read(ready, 1)
print(run_memory(), flush=True)
for child in children:
    os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize("flags", ["mmap.MAP_SHARED | mmap.MAP_ANONYMOUS", "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS"])
def test_what_processes_of_a_run_share_counts_once(flags: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAMILY.replace("FLAGS", flags)], capture_output=True, text=True, check=True
    )
    assert 256e6 < int(done.stdout) < 2 * 256e6


def test_memory_of_processes_that_vanish_or_deny_access(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        denied = psutil.Process().memory_info()
        try:
            for error, expected in ((psutil.NoSuchProcess, 0), (psutil.AccessDenied, denied.rss - denied.shared)):
                monkeypatch.setattr(psutil.Process, "memory_full_info", lambda self, kind=error: raise_for(self, kind))
                monkeypatch.setattr(psutil.Process, "memory_info", lambda self: answer_for(self, denied))
                assert run_memory() == expected
        finally:
            child.kill()


def raise_for(process: psutil.Process, error: type[psutil.Error]) -> None:
    raise error(process.pid)


def answer_for(process: psutil.Process, memory: object) -> object:
    """``memory`` for this process; a child has ended meanwhile."""
    if process.pid != os.getpid():
        raise psutil.NoSuchProcess(process.pid)
    return memory


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
    monkeypatch.setattr("magrpo.tracking.system.INTERVAL_S", 0.01)
    samples = Samples()
    with sample_system(samples, 0):
        samples.wait(1)
    values = samples.taken[0][1]
    assert set(values) == {*MACHINE, *(f"system/gpu_0_{key}" for key in GPU)}
    assert values["system/gpu_0_utilization_percentage"] == 80
    assert values["system/gpu_0_memory_usage_percentage"] == 25
    assert values["system/gpu_0_power_usage_watts"] == 300


def test_a_short_run_is_over_before_a_sample() -> None:
    samples = Samples()
    with sample_system(samples, 0):
        pass
    assert samples.taken == []


def test_samples_of_a_resumed_run_follow_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magrpo.tracking.system.INTERVAL_S", 0.01)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):
        tracker = MlflowTracker(TrackingConfig(uri=uri), tmp_path, "run-1", tmp_path / "run-1")
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
