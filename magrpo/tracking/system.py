"""Use of processors, memory and GPUs during a run, under MLflow's own keys below ``system/``.

MLflow's monitor gives up at the first request that fails; here its collectors fill the spool instead.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from magrpo.tracking.connection import quieten_mlflow

PREFIX = "system/"
INTERVAL_S = 10.0
"""Time between samples, the default of MLflow's monitor."""


@contextmanager
def sample_system(record: Callable[[Mapping[str, float], int], None], first: int) -> Iterator[None]:
    """``record`` a sample and its number, from ``first`` on, every ``INTERVAL_S`` seconds while the block lasts."""
    ending = threading.Event()

    def take_samples() -> None:
        psutil.cpu_percent()  # measures since the previous call
        if ending.wait(INTERVAL_S):
            return  # a short run need not import MLflow
        sample = _make_sampler()
        for number in itertools.count(first):
            record(sample(), number)
            if ending.wait(INTERVAL_S):
                return

    thread = threading.Thread(target=take_samples, name="magrpo-system-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _make_sampler() -> Callable[[], dict[str, float]]:
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
    for the machine. A process whose page tables may not be read (a jailed program, unless root asks) counts its
    resident anonymous pages.
    """
    total, here = 0, psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has ended
            try:
                total += int(process.memory_full_info().pss)
            except psutil.AccessDenied:
                resident = process.memory_info()
                total += int(resident.rss - resident.shared)
    return total
