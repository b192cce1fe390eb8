"""A pool of workers behind the ``Sandbox`` protocol."""

from __future__ import annotations

import logging
import os
import queue
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

from pydantic import Field

from magrpo.interfaces import Progress
from magrpo.plugins import Plugin
from magrpo.sandboxes import SandboxDied
from magrpo.sandboxes.jail.confine import Limits
from magrpo.sandboxes.jail.proxy import WALL_CAP
from magrpo.sandboxes.jail_command import JailSpec
from magrpo.sandboxes.ladder import Rung, choose_level
from magrpo.sandboxes.worker import Worker, WorkerDied, make_job
from magrpo.types import Case, Execution, ExecutionReport

log = logging.getLogger(__name__)
MIB = 1 << 20
ATTEMPTS = 2
MAX_FAILURES = 3
PRELOAD = (
    "abc bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq itertools "
    "json math operator re statistics string textwrap traceback typing"
)


class PoolSandbox(Plugin):
    """Workers that fork one jailed process for each candidate."""

    kind: str = "pool"
    level: Literal["auto", "namespaces", "namespaces-flat", "landlock", "none"] = "auto"
    """Isolation level. ``auto``: the strongest that works here, never ``none``."""
    min_level: Literal["namespaces", "namespaces-flat", "landlock", "none"] = "landlock"
    """Refuse to run at a weaker level."""
    packages: tuple[str, ...] = ()
    """Installed distributions that programs and tests may import, e.g. numpy."""
    workers: int | None = Field(None, ge=1)
    """Jails that run side by side. None: one for each CPU this process may use."""
    test_s: float = Field(2.0, gt=0)
    """CPU seconds for one test; twice that in wall time not spent waiting for a CPU."""
    total_s: float = Field(6.0, gt=0)
    """The same for all tests of a candidate together."""
    memory_mib: int = Field(512, ge=64)
    """Address space of each process of a candidate, and resident memory of all its processes together."""
    processes: int = Field(8, ge=1)
    """Processes and threads that a candidate is sure to get; the kernel stops it at about twice as many."""
    file_mib: float = Field(1.0, gt=0)
    """Largest file a candidate may write."""
    descriptors: int = Field(32, ge=8)
    """Open files of a process."""
    scratch_mib: float = Field(4.0, gt=0)
    """Size of a candidate's own ``/tmp``, where it has one."""
    output_mib: float = Field(2.0, gt=0)
    """All answers of a candidate together."""
    recycle_after: int = Field(1000, ge=1)
    """Candidates after which a worker is replaced."""

    def make_limits(self) -> Limits:
        """The limits of one candidate."""
        return Limits(
            test_s=self.test_s,
            total_s=self.total_s,
            memory_bytes=self.memory_mib * MIB,
            processes=self.processes,
            file_bytes=int(self.file_mib * MIB),
            descriptors=self.descriptors,
            scratch_bytes=int(self.scratch_mib * MIB),
            scratch_files=256,
            output_bytes=int(self.output_mib * MIB),
        )

    def probe(self) -> Rung:
        """The isolation level this machine gives this configuration, and why stronger ones were refused.

        Raises:
            SandboxError: no isolation level that the configuration accepts is available.
        """
        return choose_level(self._spec(""), self.level, self.min_level)

    def open(self) -> Pool:
        """Start the workers.

        Raises:
            SandboxError: no isolation level that the configuration accepts is available.
        """
        workers = self.workers or len(os.sched_getaffinity(0))
        return Pool(self._spec(self.probe().level), workers, self.recycle_after)

    def _spec(self, level: str) -> JailSpec:
        return JailSpec(self.make_limits(), level, tuple(PRELOAD.split()), self.packages)


class Pool:
    """See :class:`magrpo.interfaces.Sandbox`.

    Args:
        spec: how workers are made. size: how many. recycle_after: candidates after which one is replaced.
    """

    def __init__(self, spec: JailSpec, size: int, recycle_after: int) -> None:
        self.spec, self.level, self.recycle_after = spec, spec.level, recycle_after
        self.timeout_s = 20.0 + 4 * WALL_CAP * spec.limits.total_s
        self.failures = 0
        self.closed = False
        self.alive: set[Worker] = set()
        self.idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        self.threads = ThreadPoolExecutor(size, "sandbox")  # they outlive the workers they start: bubblewrap needs that
        for worker in self.threads.map(self._start, range(size)):
            self.idle.put(worker)

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        """One report for each execution, in order. Equal executions run once."""
        if self.level == "none":
            log.error("programs of a model run without isolation: sandbox.level = 'none'")
        counts = Counter(executions)
        futures = {self.threads.submit(self._one, execution): execution for execution in counts}
        reports: dict[Execution, ExecutionReport] = {}
        try:
            for future in as_completed(futures):
                execution = futures[future]
                reports[execution] = future.result()
                if progress:
                    progress(counts[execution])
        finally:
            for future in futures:
                future.cancel()
        return [reports[execution] for execution in executions]

    def close(self) -> None:
        """Kill every worker. May be called twice."""
        self.closed = True
        for worker in list(self.alive):
            worker.kill()
        self.threads.shutdown(cancel_futures=True)
        for worker in list(self.alive):
            self._discard(worker)

    def _new(self) -> Worker:
        if self.closed:
            raise WorkerDied("the sandbox was closed")
        worker = Worker(self.spec)
        self.alive.add(worker)
        return worker

    def _discard(self, worker: Worker) -> None:
        self.alive.discard(worker)
        worker.close()

    def _start(self, _: int) -> Worker | None:
        try:
            return self._new()
        except WorkerDied as error:  # the next job tries again, and counts
            log.warning("%s", error)
            return None

    def _one(self, execution: Execution) -> ExecutionReport:
        """Run one execution; if the worker fails, once more on a fresh one."""
        try:
            job = make_job(execution)
        except SyntaxError as error:
            return self._infra(f"the test is not Python: {error}")
        worker = self.idle.get()
        message = ""
        for _ in range(ATTEMPTS):
            try:
                if worker and worker.jobs >= self.recycle_after:
                    self._discard(worker)
                    worker = None
                worker = worker or self._new()
                result = worker.run_job(job, self.timeout_s)
            except WorkerDied as error:
                message = str(error)
                log.warning("a sandbox worker failed: %s", message)
                if worker:
                    self._discard(worker)
                    worker = None
            else:
                self.idle.put(worker)
                self.failures = 0
                return self._report(result)
        self.idle.put(None)
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            raise SandboxDied(f"{self.failures} executions in a row found no working jail: {message}")
        return self._infra(message)

    def _report(self, result: dict[str, Any]) -> ExecutionReport:
        if "unusable" in result:
            return self._infra(result["unusable"])
        ran_out = [["timeout", "the test code ran out of time on what the program returned"]]
        cases = tuple(Case(status, message) for status, message in result.get("cases", ran_out))
        return ExecutionReport(
            status=next((case.status for case in cases if case.status != "pass"), "pass"),
            cases=cases,
            level=self.level,
            duration_s=result.get("duration_s", 0.0),
            cpu_s=result.get("cpu_s", 0.0),
            memory_bytes=result.get("memory_bytes", 0),
            watched_calls=result.get("watched_calls", 0),
            watched_used=result.get("watched_used", False),
            forgeable=result.get("forgeable", False),
        )

    def _infra(self, message: str) -> ExecutionReport:
        return ExecutionReport("infra_error", (Case("infra_error", message),), self.level)
