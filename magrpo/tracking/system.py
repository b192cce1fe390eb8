"""Use of processors, memory and GPUs during a run, under MLflow's own keys below ``system/``.

MLflow's monitor gives up at the first request that fails; here its collectors fill the spool instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

import psutil

from magrpo.tracking.connection import quieten_mlflow

PREFIX = "system/"
INTERVAL_S = 10.0
"""Time between samples, the default of MLflow's monitor."""


class SystemMonitor:
    """A thread that samples every ``interval_s`` seconds (None: ``INTERVAL_S``) while the block lasts.

    Args:
        record: called with the metrics and the number of the sample.
        first: number of the first sample.
    """

    def __init__(
        self, record: Callable[[Mapping[str, float], int], None], first: int, interval_s: float | None = None
    ) -> None:
        self._record, self._next = record, first
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="magrpo-system-metrics", daemon=True)

    def __enter__(self) -> SystemMonitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    def _work(self) -> None:
        psutil.cpu_percent()  # measures since the previous call
        if self._ending.wait(self._interval_s):
            return  # a short run need not import MLflow
        sample = _sampler()
        while True:
            self._record(sample(), self._next)
            self._next += 1
            if self._ending.wait(self._interval_s):
                return


def _sampler() -> Callable[[], dict[str, float]]:
    """A function that samples processors, memory, and the GPUs found by NVML."""
    quieten_mlflow()
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor  # takes seconds
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

    monitors: list[Any] = [CPUMonitor()]  # type: ignore[no-untyped-call]
    with suppress(ImportError, RuntimeError):  # without nvidia-ml-py; without an NVIDIA GPU
        monitors.append(GPUMonitor())  # type: ignore[no-untyped-call]

    def sample() -> dict[str, float]:
        values = {"run_memory_megabytes": run_memory() / 1e6}
        for monitor in monitors:
            monitor.collect_metrics()
            values |= monitor.aggregate_metrics()
            monitor.clear_metrics()
        return {PREFIX + key: float(value) for key, value in values.items()}

    return sample


def run_memory() -> int:
    """Bytes of memory used by this process and its descendants: the sum of their proportional set sizes.

    A page shared by n processes counts 1/n for each. Pages of files (libraries) are included, unlike in MLflow's figure
    for the machine.
    """
    here = psutil.Process()
    return sum(map(_memory_share, [here, *here.children(recursive=True)]))


def _memory_share(process: psutil.Process) -> int:
    """The proportional set size of a process in bytes; 0 if it has ended.

    Without permission to read its page tables (a jailed program, unless root asks): its resident anonymous pages.
    """
    with suppress(psutil.NoSuchProcess):
        try:
            return int(process.memory_full_info().pss)
        except psutil.AccessDenied:
            resident = process.memory_info()
            return int(resident.rss - resident.shared)
    return 0
