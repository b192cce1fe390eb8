"""The sandbox ``pool``: workers that fork the jailed processes of candidates."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from magrpo.errors import ConfigError
from magrpo.interfaces import Progress
from magrpo.plugins import Plugin
from magrpo.sandboxes import SandboxDied, SandboxError
from magrpo.sandboxes.jail.confine import Limits
from magrpo.sandboxes.jail.proxy import WALL_CAP
from magrpo.sandboxes.jail.tester import LEFT_S, TEST_CPU_S
from magrpo.sandboxes.jail_command import JailSpec
from magrpo.sandboxes.levels import choose_level
from magrpo.sandboxes.packages import explain_failure, find_packages
from magrpo.sandboxes.traces import leaves_no_trace
from magrpo.sandboxes.worker import START_S, ImportFailed, Worker, WorkerDied, make_job
from magrpo.types import Case, CaseStatus, Execution, ExecutionReport, IsolationLevel, Unjudged

log = logging.getLogger(__name__)
MIB = 1 << 20
RECYCLE_AFTER = 1000
"""Number of candidates after which a worker is replaced."""
ATTEMPTS = 3
"""Number of times that an execution is tried, on a new worker after each failure."""
FATAL_ATTEMPTS = 2
"""Number of fresh workers that a program must kill before it is blamed."""
MAX_FAILURES = 3
"""Number of executions in a row that found no working sandbox, from which on the pool raises SandboxDied."""
BATCHES, MAX_BATCH = 4, 32
"""Programs that may share a tester run in batches: at least 4 batches per worker, each of at most 32 programs."""
PAUSE_S = 0.3  # the user may be out of processes for a moment
PLAIN = Execution("def f(n):\n    return n\n", "f", "assert f(1) == 1")
RAN_OUT = ["timeout", "the test code ran out of time or memory on what the program returned"]
CLOSED = "the sandbox was closed"
PRELOAD = (
    "abc bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq itertools "
    "json math operator re statistics string textwrap traceback typing"
)


class FreshWorkerDied(WorkerDied):
    """A worker died in its first job."""


class PoolSandbox(Plugin):
    """Workers that fork one jailed process for each candidate."""

    kind: str = "pool"
    level: Literal["auto", "namespaces", "namespaces-flat", "landlock", "none"] = "auto"
    """Isolation level; the run fails if it does not work on this machine. ``auto``: the strongest level that works,
    never ``none``."""
    packages: tuple[str, ...] = ()
    """Installed distributions (such as numpy or scikit-learn) or modules that programs and tests may import; their
    dependencies are allowed too. Empty: the standard library only."""
    workers: int | None = Field(None, ge=1, le=1024)
    """Number of sandboxed workers that run in parallel. None: one for each CPU available to this process."""
    test_s: float = Field(2.0, gt=0, le=86400)
    """CPU time limit of one test, in seconds. The wall time limit is twice that, not counting time spent waiting for a
    CPU."""
    total_s: float = Field(6.0, gt=0, le=86400)
    """CPU time limit of all tests of a candidate together, in seconds; wall time as for ``test_s``."""
    memory_mib: int = Field(512, ge=64, le=2**24)
    """Limit on the address space of each process of a candidate, and on the resident memory of all its processes
    together, in MiB."""
    processes: int = Field(8, ge=1, le=4096)
    """Number of processes and threads that a candidate may always have; the kernel refuses more than about twice as
    many."""

    def make_limits(self) -> Limits:
        return Limits(
            test_s=self.test_s,
            total_s=self.total_s,
            memory_bytes=self.memory_mib * MIB,
            processes=self.processes,
            file_bytes=1 * MIB,
            descriptors=32,
            scratch_bytes=4 * MIB,
            scratch_files=256,
            output_bytes=2 * MIB,
        )

    def probe(self) -> IsolationLevel:
        """See :class:`magrpo.interfaces.ProbesIsolation`."""
        return self._probe()[1]

    def open(self) -> Pool:
        spec, _ = self._probe()
        return Pool(spec, self.workers or len(os.sched_getaffinity(0)))

    def _probe(self) -> tuple[JailSpec, IsolationLevel]:
        packages = find_packages(self.packages)
        spec = JailSpec(self.make_limits(), "", tuple(PRELOAD.split()), packages)
        isolation = choose_level(spec, self.level)
        spec = replace(spec, level=isolation.level)
        if packages.modules:
            check_packages(spec)
        return spec, isolation


def check_packages(spec: JailSpec) -> None:
    """Start a jail that imports the allowed packages, and run a plain program in it.

    Raises:
        ConfigError: a package cannot be imported, or leaves programs no memory. SandboxError: the jail fails otherwise.
    """
    try:
        with contextlib.closing(Worker(spec)) as worker:
            reports = worker.run_jobs([make_job(PLAIN)], START_S)
    except ImportFailed as error:
        raise ConfigError(explain_failure(spec.packages, error.module, error.reason)) from None
    except WorkerDied as error:
        raise SandboxError(f"a sandbox with sandbox.packages fails: {error}") from None
    report = reports[0] if reports else {}
    passes = report.get("cases") == [["pass", ""]]
    if not passes or report["memory_bytes"] > spec.limits.memory_bytes:
        raise ConfigError(
            f"sandbox.packages: importing them exhausts the limits of even a trivial program; raise sandbox.memory_mib "
            f"(now {spec.limits.memory_bytes // MIB}), or remove some packages"
        )


def make_batches(executions: Iterable[Execution], most: int) -> list[list[Execution]]:
    """Split ``executions`` into batches of at most ``most`` and ``MAX_BATCH``; one that may leave a trace is alone."""
    sharing: list[Execution] = []
    alone: list[list[Execution]] = []
    for execution in executions:
        if leaves_no_trace(execution.test):
            sharing.append(execution)
        else:
            alone.append([execution])
    size = min(max(most, 1), MAX_BATCH)
    return alone + [sharing[i : i + size] for i in range(0, len(sharing), size)]


class Pool:
    """A :class:`magrpo.interfaces.Sandbox` of ``size`` workers; each is replaced after ``recycle_after`` candidates.

    ``make_worker`` starts a worker, or raises WorkerDied.
    """

    def __init__(self, spec: JailSpec, size: int, make_worker: Callable[[JailSpec], Worker] = Worker) -> None:
        self.spec, self.level, self.size, self.make_worker = spec, spec.level, size, make_worker
        self.recycle_after = RECYCLE_AFTER
        self.timeout_s = 20.0 + WALL_CAP * (TEST_CPU_S + LEFT_S + 4 * spec.limits.total_s)
        self.failures = 0
        self.closed = False
        self.alive: set[Worker] = set()
        self.idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        # bubblewrap dies with the thread that started it, so threads that live as long as the pool start workers.
        self.threads = ThreadPoolExecutor(size, "sandbox")
        for worker in self.threads.map(self._try_start_worker, range(size)):
            self.idle.put(worker)

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        if self.level == "none":
            log.error("untrusted programs run without isolation, because sandbox.level = 'none'")
        counts = Counter(executions)
        reports: dict[Execution, ExecutionReport] = {}
        futures: dict[Future[list[ExecutionReport]], list[Execution]] = {}
        try:
            for batch in make_batches(counts, math.ceil(len(counts) / (BATCHES * self.size))):
                futures[self._submit(batch)] = batch
            for future in as_completed(futures):
                for execution, report in zip(futures[future], future.result(), strict=True):
                    reports[execution] = report
                    if progress:
                        progress(counts[execution])
        finally:
            for future in futures:
                future.cancel()
        return [reports[execution] for execution in executions]

    def close(self) -> None:
        self.closed = True
        for worker in list(self.alive):
            worker.kill()
        self.threads.shutdown()  # of what has not begun, run_batch says that the pool is closed
        for worker in list(self.alive):
            self._discard(worker)

    def _submit(self, batch: Sequence[Execution]) -> Future[list[ExecutionReport]]:
        try:
            return self.threads.submit(self.run_batch, batch)
        except RuntimeError:
            self._check_open()
            raise

    def _start_worker(self) -> Worker:
        if self.closed:
            raise WorkerDied(CLOSED)
        worker = self.make_worker(self.spec)
        self.alive.add(worker)
        if self.closed:  # while the worker was starting, so that nobody has killed it
            self._discard(worker)
            raise WorkerDied(CLOSED)
        return worker

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxDied(CLOSED)

    def _discard(self, worker: Worker) -> None:
        self.alive.discard(worker)
        worker.close()

    def _try_start_worker(self, _: int) -> Worker | None:
        try:
            return self._start_worker()
        except WorkerDied as error:  # the next job tries again, and counts a failure
            log.warning("%s", error)
            return None

    def run_batch(self, batch: Sequence[Execution]) -> list[ExecutionReport]:
        """Run executions in one tester as far as it serves them, and the rest one by one."""
        self._check_open()
        reports = self._share_tester(batch) if len(batch) > 1 else []
        return reports + [self._run_one(execution) for execution in batch[len(reports) :]]

    def _share_tester(self, executions: Sequence[Execution]) -> list[ExecutionReport]:
        """Report on as many of ``executions`` as one tester serves; on none if the test or the worker is at fault."""
        try:
            jobs = [make_job(execution) for execution in executions]
        except SyntaxError:
            return []
        results: list[dict[str, Any]] = []
        worker = self.idle.get()
        try:
            worker, results = self._run_jobs(worker, jobs)
        except WorkerDied as error:
            log.debug("running the programs one by one: %s", error)
            worker = None
        finally:
            self.idle.put(worker)
        return list(map(self._accept_result, results))

    def _run_one(self, execution: Execution) -> ExecutionReport:
        """Run one execution; if the worker fails, retry on new workers."""
        try:
            job = make_job(execution)
        except SyntaxError as error:
            return self._report_failure(f"its test is not Python: {error}", "test_error")
        worker = self.idle.get()
        message, num_killed = "", 0
        try:
            for _ in range(ATTEMPTS):
                given, worker = worker, None  # a worker that dies is closed: ``finally`` must not put it back
                try:
                    worker, result = self._run_job(given, job)
                    return self._accept_result(result)
                except FreshWorkerDied as error:
                    message = self._warn_of_failure(error)
                    num_killed += 1
                    if num_killed == FATAL_ATTEMPTS:
                        break
                except WorkerDied as error:
                    message = self._warn_of_failure(error)
                    time.sleep(PAUSE_S)
            if num_killed == FATAL_ATTEMPTS:
                with contextlib.suppress(WorkerDied):
                    worker, result = self._judge_killer(job, message)
                    return self._accept_result(result)
        finally:
            self.idle.put(worker)
        return self._count_failure(message)

    def _accept_result(self, result: dict[str, Any]) -> ExecutionReport:
        self.failures = 0
        return self._make_report(result)

    def _warn_of_failure(self, error: WorkerDied) -> str:
        """Return the message of the error, logging it unless the pool was closed."""
        if not self.closed:
            log.warning("a sandbox worker failed: %s", error)
        return str(error)

    def _judge_killer(self, job: dict[str, Any], message: str) -> tuple[Worker, dict[str, Any]]:
        """Judge a program that has killed several fresh workers: it crashed, if a plain program kills none.

        Raises:
            WorkerDied: a worker died of the plain program too, so the sandbox is at fault.
        """
        worker, _ = self._run_job(None, make_job(PLAIN))
        verdict = ["crash", f"it ended two jails: {message}"]
        return self._run_job(worker, job | {"source": "", "verdict": verdict})

    def _count_failure(self, message: str) -> ExecutionReport:
        """Report on an execution that found no working sandbox; SandboxDied if too many in a row did not."""
        self._check_open()
        self.failures += 1
        if self.failures >= MAX_FAILURES:
            raise SandboxDied(f"{self.failures} executions in a row found no working sandbox: {message}")
        return self._report_failure(message)

    def _run_job(self, worker: Worker | None, job: dict[str, Any]) -> tuple[Worker, dict[str, Any]]:
        """Run a job on ``worker``, or on a new one if it has served its share; return the worker used and the report.

        If the program made the test code exceed its own limits, a second job counts the cases that it has failed.

        Raises:
            WorkerDied: the worker died and was closed, or none could be started.
        """
        worker, reports = self._run_jobs(worker, [job])
        if not reports:
            worker, reports = self._run_jobs(worker, [job | {"source": "", "verdict": RAN_OUT}])
        return worker, reports[0] if reports else {}

    def _run_jobs(self, worker: Worker | None, jobs: Sequence[dict[str, Any]]) -> tuple[Worker, list[dict[str, Any]]]:
        """Run jobs on ``worker``, or on a new one; see :meth:`Worker.run_jobs`."""
        if worker and worker.jobs >= self.recycle_after:
            self._discard(worker)
            worker = None
        worker = worker or self._start_worker()
        try:
            return worker, worker.run_jobs(jobs, self.timeout_s)
        except WorkerDied as error:
            self._discard(worker)
            if worker.jobs == len(jobs):
                raise FreshWorkerDied(str(error)) from error
            raise

    def _make_report(self, result: dict[str, Any]) -> ExecutionReport:
        if "unusable" in result:
            return self._report_failure(result["unusable"], "test_error")
        cases = tuple(Case(status, message) for status, message in result.pop("cases", [RAN_OUT]))
        status: CaseStatus = next((case.status for case in cases if case.status != "pass"), "pass")
        return ExecutionReport(status, cases, self.level, **result)

    def _report_failure(self, message: str, status: Unjudged = "infra_error") -> ExecutionReport:
        return ExecutionReport(status, (Case(status, message),), self.level)
