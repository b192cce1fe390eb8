"""``magrpo bench sandbox``: times the sandbox, and for comparison one bubblewrap per candidate."""

import shutil
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite

import psutil
from rich.console import Console
from rich.table import Column, Table

from magrpo.process.children import list_family, wait_for_end
from magrpo.sandboxes.jail_command import SYSTEM, JailSpec, find_interpreter, list_interpreter_paths
from magrpo.sandboxes.pool import PRELOAD, PoolSandbox
from magrpo.sandboxes.worker import Worker
from magrpo.types import Execution
from pipelines.arguments import Positive
from pipelines.benchmarks.turns import time_call

SOURCE = "import os\ndef f(n):\n    return n + 1\n# {}\n"
"""A program that needs a process of its own; without its import it is self-contained and shares one."""
ASSERTS = ["assert {}(1) == 2", "assert {}(2) == 3", "assert {}(7) == 8"]
TEST = "def check(candidate):\n" + "".join(f"    {line.format('candidate')}\n" for line in ASSERTS)
PEER = SOURCE + "\n".join(line.format("f") for line in ASSERTS) + "\nprint('passed')\n"
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement, with its limit if it has one."""

    name: str
    value: float
    unit: str
    at_least: float = -inf
    at_most: float = inf

    @property
    def target(self) -> str:
        limits = {">=": self.at_least, "<=": self.at_most}
        return "".join(f"{sign} {limit:g}" for sign, limit in limits.items() if isfinite(limit))

    @property
    def met(self) -> bool:
        return self.at_least <= self.value <= self.at_most


def bench_sandbox(*, workers: Positive = 2) -> int:
    """Print the figures of :func:`measure_sandbox` as a table; the exit code is 0.

    Args:
        workers: Parallel sandboxes.
    """
    measured = Column("measured", no_wrap=True, justify="right")
    table = Table(Column(no_wrap=True), measured, Column("target", no_wrap=True), Column(no_wrap=True), box=None)
    for figure in measure_sandbox(workers):
        verdict = ""
        if figure.target:
            verdict = "met" if figure.met else "missed"
        table.add_row(figure.name, f"{figure.value:.1f} {figure.unit}", figure.target, verdict)
    Console(highlight=False, width=100).print(table)  # a fixed width, so that files look the same
    return 0


def measure_sandbox(
    workers: int = 2, candidates: int = 600, peer_candidates: int = 120, looping: int = 16
) -> list[Figure]:
    """Run trivial candidates with three tests, and some that never end, at the strongest level that works here.

    ``peer_candidates`` run in a bubblewrap of their own, if it is installed; ``looping`` out of 64 never end. Raises
    SandboxError if no isolation level works.
    """
    level = PoolSandbox().probe().level
    spec = replace(JailSpec(PoolSandbox().make_limits(), level), preload=tuple(PRELOAD.split()))
    started: list[Worker] = []
    starts_s = [time_call(lambda: started.append(Worker(spec))) for _ in range(5)]
    for worker in started:
        worker.close()
    with closing(PoolSandbox(level=level, workers=1).open()) as pool:
        pool.run(_make_executions(WARM_UP, "warm"))
        executions = _make_executions(candidates // 3, "single")
        latencies_ms = [1e3 * time_call(partial(pool.run, [execution])) for execution in executions]
    with closing(PoolSandbox(level=level, workers=workers).open()) as pool:
        pool.run(_make_executions(WARM_UP, "warm"))
        rate, shared_rate = (
            candidates / time_call(partial(pool.run, _make_executions(candidates, "batch", sharing)))
            for sharing in (False, True)
        )
    one_worker = "latency of one candidate, one worker"
    figures = [
        Figure(f"candidates per second, {workers} workers, level {level}", rate, "1/s", at_least=150),
        Figure("the same, self-contained ones", shared_rate, "1/s"),
        Figure(f"{one_worker}, median", statistics.median(latencies_ms), "ms", at_most=8),
        Figure(f"{one_worker}, 95th percentile", statistics.quantiles(latencies_ms, n=20)[-1], "ms"),
        Figure("start of a worker, median", 1e3 * statistics.median(starts_s), "ms", at_most=300),
        *_time_endless_candidates(level, workers, looping),
    ]
    if shutil.which("bwrap"):
        for label, imports, number in (("bare", "", peer_candidates), ("same imports", PRELOAD, peer_candidates // 3)):
            peer = _peer_rate(workers, number, imports)
            figures += [
                Figure(f"one bubblewrap per candidate, {label}, {workers} in parallel", peer, "1/s"),
                Figure(f"pool over it, {label}", rate / peer, "x", at_least=5),
                Figure(f"pool over it, {label}, self-contained candidates", shared_rate / peer, "x", at_least=5),
            ]
    return figures


def _time_endless_candidates(level: str, workers: int, looping: int) -> list[Figure]:
    """Time 64 candidates of which ``looping`` never end, and count the processes that outlive the pool."""
    total_s = 1.0
    batch = _make_executions(64 - looping, "mixed")
    batch += [Execution(f"def f(n):\n    while True:\n        {k}\n", "f", TEST) for k in range(looping)]
    with closing(PoolSandbox(level=level, workers=workers, test_s=total_s / 2, total_s=total_s).open()) as pool:
        seconds = time_call(partial(pool.run, batch))
        parents = [psutil.Process(worker.process.pid) for worker in pool.alive]
        jails = [process for parent in parents for process in (parent, *list_family(parent.pid))]
    left = len(wait_for_end(jails, 10.0))
    name = f"64 candidates, {looping} never end, {total_s:g} s for each"
    return [
        Figure(name, seconds, "s", at_most=looping * total_s / workers + 5),
        Figure("processes left behind", left, "", at_most=0),
    ]


def _make_executions(number: int, label: str, sharing: bool = False) -> list[Execution]:
    source = SOURCE.removeprefix("import os\n") if sharing else SOURCE
    return [Execution(source.format(f"{label} {k}"), "f", TEST) for k in range(number)]


def _peer_rate(workers: int, number: int, imports: str) -> float:
    """Candidates per second of the usual harness: a fresh jail and interpreter for each, which imports ``imports``."""
    preamble = "".join(f"import {name}\n" for name in imports.split())
    paths = list_interpreter_paths()
    assert set(paths) & set(SYSTEM)
    command = ["bwrap", "--unshare-all", "--die-with-parent"]
    for path in paths:
        command += ["--ro-bind", path, path]
    for link in {"/lib", "/lib64"} - set(paths):
        command += ["--symlink", f"usr{link}", link]

    def run_candidate(k: int) -> None:
        done = subprocess.run(
            [*command, find_interpreter(), "-I", "-S", "-c", preamble + PEER.format(k)], capture_output=True, check=True
        )
        assert done.stdout == b"passed\n"

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(run_candidate, range(workers)))
        return number / time_call(lambda: list(threads.map(run_candidate, range(number))))
