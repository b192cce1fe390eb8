"""Times the sandbox, and one bubblewrap per candidate beside it in the same run."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from magrpo.sandboxes.jails import SYSTEM, Spec, interpreter_paths, python
from magrpo.sandboxes.pool import PRELOAD, PoolSandbox
from magrpo.sandboxes.worker import Worker
from magrpo.types import Execution

SOURCE = "def f(n):\n    return n + 1\n# {}\n"
ASSERTS = ["assert {}(1) == 2", "assert {}(2) == 3", "assert {}(7) == 8"]
TEST = "def check(candidate):\n" + "".join(f"    {line.format('candidate')}\n" for line in ASSERTS)
PEER = SOURCE + "\n".join(line.format("f") for line in ASSERTS) + "\nprint('passed')\n"
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. ``target`` is empty, or what it should be; ``met`` tells whether it is."""

    name: str
    value: float
    unit: str
    target: str = ""
    met: bool = True


def run_bench(workers: int = 2, candidates: int = 600, peer_candidates: int = 120) -> list[Figure]:
    """Trivial candidates with three tests, at the strongest level that works here.

    Args:
        workers: jails side by side, also for the peer. candidates: how many the pool runs.
        peer_candidates: how many run in a bubblewrap of their own; none without bubblewrap.

    Raises:
        SandboxError: no isolation level works here.
    """
    level = PoolSandbox().probe().level
    start_ms = 1e3 * statistics.median(_start_s(level) for _ in range(5))
    single = PoolSandbox(level=level, workers=1).open()
    try:
        single.run(_executions(WARM_UP, "warm"))
        each = [1e3 * _timed(partial(single.run, [execution])) for execution in _executions(candidates // 3, "single")]
    finally:
        single.close()
    pool = PoolSandbox(level=level, workers=workers).open()
    try:
        pool.run(_executions(WARM_UP, "warm"))
        batch = _executions(candidates, "batch")
        rate = candidates / _timed(lambda: pool.run(batch))
    finally:
        pool.close()
    figures = [
        Figure(f"candidates per second, {workers} workers, level {level}", rate, "1/s", ">= 150", rate >= 150),
        Figure("latency of one candidate, one worker, median", statistics.median(each), "ms", "<= 8",
               statistics.median(each) <= 8),
        Figure("latency of one candidate, one worker, 95th percentile", statistics.quantiles(each, n=20)[-1], "ms"),
        Figure("start of a worker, median", start_ms, "ms", "<= 300", start_ms <= 300),
    ]  # fmt: skip
    if shutil.which("bwrap"):
        peer = _peer_rate(workers, peer_candidates)
        figures += [
            Figure(f"one bubblewrap per candidate, {workers} side by side", peer, "1/s"),
            Figure("ratio", rate / peer, "x", ">= 5", rate / peer >= 5),
        ]
    return figures


def _executions(number: int, label: str) -> list[Execution]:
    return [Execution(SOURCE.format(f"{label} {k}"), "f", TEST) for k in range(number)]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _start_s(level: str) -> float:
    spec = replace(Spec(PoolSandbox().limits(), level), preload=tuple(PRELOAD.split()))
    began = time.perf_counter()
    worker = Worker(spec)
    seconds = time.perf_counter() - began
    worker.close()
    return seconds


def _peer_rate(workers: int, number: int) -> float:
    """The usual harness: a fresh jail and interpreter for each candidate, the verdict is what it prints."""
    command = ["bwrap", "--unshare-all", "--die-with-parent"]
    for path in interpreter_paths():
        command += ["--ro-bind", path, path]
    for link in ("/lib", "/lib64"):
        if link not in interpreter_paths():
            command += ["--symlink", f"usr{link}", link]
    assert set(interpreter_paths()) & set(SYSTEM)

    def one(k: int) -> None:
        done = subprocess.run([*command, python(), "-I", "-S", "-c", PEER.format(k)], capture_output=True, check=True)
        assert done.stdout == b"passed\n"

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(one, range(workers)))
        return number / _timed(lambda: list(threads.map(one, range(number))))


if __name__ == "__main__":
    print(json.dumps([{name: getattr(figure, name) for name in Figure.__slots__} for figure in run_bench()], indent=1))
