"""``magrpo bench sandbox``: time the sandbox, and for comparison one bubblewrap per candidate."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import psutil
from rich.console import Console
from rich.table import Column, Table

from magrpo.sandboxes.jail_command import SYSTEM, JailSpec, find_interpreter, list_interpreter_paths
from magrpo.sandboxes.pool import PRELOAD, PoolSandbox
from magrpo.sandboxes.worker import Worker
from magrpo.types import Execution
from pipelines.arguments import Positive

SOURCE = "def f(n):\n    return n + 1\n# {}\n"
ASSERTS = ["assert {}(1) == 2", "assert {}(2) == 3", "assert {}(7) == 8"]
TEST = "def check(candidate):\n" + "".join(f"    {line.format('candidate')}\n" for line in ASSERTS)
PEER = SOURCE + "\n".join(line.format("f") for line in ASSERTS) + "\nprint('passed')\n"
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement; ``met``: whether it reaches its ``target``, if it has one."""

    name: str
    value: float
    unit: str
    target: str = ""
    met: bool = True


def bench_sandbox(*, workers: Positive = 2) -> int:
    """Run :func:`measure_sandbox` and print its figures as a table; the exit code is 0.

    Args:
        workers: Parallel jails.

    Raises:
        SandboxError: no isolation level works here.
    """
    columns = [Column(name, no_wrap=True) for name in ("", "measured", "target", "")]
    columns[1].justify = "right"
    table = Table(*columns, box=None)
    for figure in measure_sandbox(workers):
        verdict = ("met" if figure.met else "missed") if figure.target else ""
        table.add_row(figure.name, f"{figure.value:.1f} {figure.unit}", figure.target, verdict)
    Console(highlight=False, width=100).print(table)  # the same width for files
    return 0


def measure_sandbox(
    workers: int = 2, candidates: int = 600, peer_candidates: int = 120, looping: int = 16
) -> list[Figure]:
    """Run trivial candidates with three tests, and some that never end, at the strongest level that works here.

    Args:
        workers: parallel jails, also for the peers.
        candidates: number that the pool runs.
        peer_candidates: number that run in a bubblewrap of their own, if bubblewrap is installed.
        looping: number out of 64 that never end.

    Raises:
        SandboxError: no isolation level works here.
    """
    level = PoolSandbox().probe().level
    start_ms = 1e3 * statistics.median(_start_s(level) for _ in range(5))
    latencies = _latencies_ms(level, candidates // 3)
    with closing(PoolSandbox(level=level, workers=workers).open()) as pool:
        pool.run(_executions(WARM_UP, "warm"))
        batch = _executions(candidates, "batch")
        rate = candidates / _timed(lambda: pool.run(batch))
    median = statistics.median(latencies)
    figures = [
        Figure(f"candidates per second, {workers} workers, level {level}", rate, "1/s", ">= 150", rate >= 150),
        Figure("latency of one candidate, one worker, median", median, "ms", "<= 8", median <= 8),
        Figure(
            "latency of one candidate, one worker, 95th percentile", statistics.quantiles(latencies, n=20)[-1], "ms"
        ),
        Figure("start of a worker, median", start_ms, "ms", "<= 300", start_ms <= 300),
        *_never_ending(level, workers, looping),
    ]
    if shutil.which("bwrap"):
        for label, imports, number in (("bare", "", peer_candidates), ("same imports", PRELOAD, peer_candidates // 3)):
            peer = _peer_rate(workers, number, imports)
            figures += [
                Figure(f"one bubblewrap per candidate, {label}, {workers} in parallel", peer, "1/s"),
                Figure(f"pool over it, {label}", rate / peer, "x", ">= 5", rate / peer >= 5),
            ]
    return figures


def _latencies_ms(level: str, number: int) -> list[float]:
    with closing(PoolSandbox(level=level, workers=1).open()) as pool:
        pool.run(_executions(WARM_UP, "warm"))
        return [1e3 * _timed(partial(pool.run, [execution])) for execution in _executions(number, "single")]


def _never_ending(level: str, workers: int, looping: int) -> list[Figure]:
    """Time 64 candidates of which ``looping`` never end, and count the processes that outlive the pool."""
    total_s = 1.0
    batch = _executions(64 - looping, "mixed")
    batch += [Execution(f"def f(n):\n    while True:\n        {k}\n", "f", TEST) for k in range(looping)]
    with closing(PoolSandbox(level=level, workers=workers, test_s=total_s / 2, total_s=total_s).open()) as pool:
        seconds = _timed(lambda: pool.run(batch))
        jails = [process for worker in pool.alive for process in _family(worker.process.pid)]
    left = sum(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in jails)
    allowed = looping * total_s / workers + 5
    return [
        Figure(f"64 candidates, {looping} never end, {total_s:g} s for each", seconds, "s", f"<= {allowed:g}",
               seconds <= allowed),
        Figure("processes left behind", left, "", "<= 0", left == 0),
    ]  # fmt: skip


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _executions(number: int, label: str) -> list[Execution]:
    return [Execution(SOURCE.format(f"{label} {k}"), "f", TEST) for k in range(number)]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _start_s(level: str) -> float:
    spec = replace(JailSpec(PoolSandbox().make_limits(), level), preload=tuple(PRELOAD.split()))
    began = time.perf_counter()
    worker = Worker(spec)
    seconds = time.perf_counter() - began
    worker.close()
    return seconds


def _peer_rate(workers: int, number: int, imports: str) -> float:
    """Candidates per second of the usual harness: a fresh jail and interpreter for each, which prints the verdict.

    ``imports``: modules that each candidate imports first; the pool's workers have imported them already.
    """
    preamble = "".join(f"import {name}\n" for name in imports.split())
    command = ["bwrap", "--unshare-all", "--die-with-parent"]
    for path in list_interpreter_paths():
        command += ["--ro-bind", path, path]
    for link in ("/lib", "/lib64"):
        if link not in list_interpreter_paths():
            command += ["--symlink", f"usr{link}", link]
    assert set(list_interpreter_paths()) & set(SYSTEM)

    def run_candidate(k: int) -> None:
        done = subprocess.run(
            [*command, find_interpreter(), "-I", "-S", "-c", preamble + PEER.format(k)], capture_output=True, check=True
        )
        assert done.stdout == b"passed\n"

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(run_candidate, range(workers)))
        return number / _timed(lambda: list(threads.map(run_candidate, range(number))))
