"""A worker: a jail with a zygote inside, and the messages exchanged with it."""

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from magrpo.sandboxes.instrument import instrument_test
from magrpo.sandboxes.jail import wire
from magrpo.sandboxes.jail.imports import READY
from magrpo.sandboxes.jail_command import ENVIRONMENT, JailSpec, build_command, make_scratch
from magrpo.sandboxes.traces import is_self_contained
from magrpo.types import Execution

log = logging.getLogger(__name__)
START_S = 20.0
MAX_REPORT = 64 << 20


class WorkerDied(Exception):
    """A worker died or does not answer, so its job has no result."""


class ImportFailed(WorkerDied):
    """A worker did not start because it could not import a ``module`` of ``sandbox.packages``, for a ``reason``."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"the jail did not start: {module} cannot be imported: {reason}")
        self.module, self.reason = module, reason


def make_job(execution: Execution) -> dict[str, Any]:
    """Build the message that gives a tester its job; SyntaxError if the test is not Python."""
    test = instrument_test(execution.test, execution.entry_point)
    program = {"source": execution.source, "entry_point": execution.entry_point, "watch": execution.watch}
    may_share = is_self_contained(execution.variant_of or execution.source)
    return {**program, "may_share": may_share, **dataclasses.asdict(test), "verdict": None}


class TesterEnd(NamedTuple):
    """How a tester ended: its wait ``status``, and its peak memory in bytes."""

    status: int
    memory_bytes: int

    @property
    def ran_out(self) -> bool:
        """Whether the tester exceeded its own limits."""
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) in (signal.SIGXCPU, signal.SIGKILL)


def wait_readable(timeout_s: float, *files: int | socket.socket) -> bool:
    """Whether one of ``files`` can be read, or has ended, within ``timeout_s``; any number of files may be open."""
    poll = select.poll()  # select.select takes no descriptor above 1023
    for file in files:
        poll.register(file, select.POLLIN)
    return bool(poll.poll(min(timeout_s, wire.MAX_WAIT_S) * 1000))


class Worker:
    """A running jail. Not thread-safe: one job at a time.

    Raises:
        WorkerDied: it did not start. ImportFailed: because of a package.
    """

    def __init__(self, spec: JailSpec) -> None:
        self.jobs = 0
        self.tester_memory = 0  # peak memory of any tester so far, in bytes
        self.inside: int | None = None  # descriptor of the first process in the jail's pid namespace
        try:
            self._start_jail(spec)
        except OSError as error:  # the user may be out of processes or descriptors
            raise WorkerDied(f"the jail could not be started: {error}") from error

    def _start_jail(self, spec: JailSpec) -> None:
        self.control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as started:
            started.callback(self.control.close)
            with (
                far,
                tempfile.TemporaryFile() as errors,
                open(os.devnull, "r+b") as null,  # noqa: PTH123
                make_scratch(spec) as scratch,
            ):
                info_read, info_write = os.pipe()
                with os.fdopen(info_read, "rb") as info:
                    with os.fdopen(info_write, "wb"):
                        self.process = subprocess.Popen(
                            build_command(spec, info_write, scratch),
                            stdin=far.fileno(),
                            stdout=null,
                            stderr=errors,
                            pass_fds=(info_write,) if spec.uses_bubblewrap else (),
                            env=ENVIRONMENT,
                            cwd="/",
                            start_new_session=True,
                        )
                    started.callback(self.close)
                    far.close()
                    self._await_start(errors)
                    if spec.uses_bubblewrap:
                        self.inside = os.pidfd_open(json.loads(info.read())["child-pid"])
            started.pop_all()

    def _await_start(self, errors: IO[bytes]) -> None:
        """Wait until the zygote has imported everything; it writes exceptions to ``errors``."""
        module = ""
        while is_alive := wait_readable(START_S, self.control):
            message = self.control.recv(1 << 10)
            if message == READY:
                return
            if not message:
                break
            module = message.decode()
        errors.seek(0)
        error = errors.read().decode(errors="replace").strip()
        log.debug("the jail did not start:\n%s", error)
        unsaid = "it ended without a message" if is_alive else f"it takes longer than {START_S:g} s"
        reason = error.splitlines()[-1][-500:] if error and is_alive else unsaid
        raise ImportFailed(module, reason) if module else WorkerDied(f"the jail did not start: {reason}")

    def run_jobs(self, jobs: Sequence[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
        """Run ``jobs`` one after another in one tester; return its reports on the first of them.

        There is at least one report, unless the test code exceeded its own limits. Jobs that follow tests which used
        much CPU time have no report.

        Raises:
            WorkerDied: the worker died or went past ``timeout_s`` for each job; it must be closed.
        """
        self.jobs += len(jobs)
        reports, end = self._exchange(jobs, timeout_s * len(jobs))
        if reports and "broken" in reports[-1]:
            raise WorkerDied(reports[-1]["broken"])
        self.tester_memory = max(self.tester_memory, end.memory_bytes)
        if not reports and not end.ran_out:
            raise WorkerDied(f"the tester ended with wait status {end.status}")
        return reports

    def _exchange(self, jobs: Sequence[dict[str, Any]], timeout_s: float) -> tuple[list[dict[str, Any]], TesterEnd]:
        """Send jobs to a new tester; return its reports and how it ended."""
        deadline = time.monotonic() + timeout_s
        reports: list[dict[str, Any]] = []
        try:
            near, far = socket.socketpair()
            with near:
                with far:
                    socket.send_fds(self.control, [b"job"], [far.fileno()])
                near.settimeout(min(timeout_s, wire.MAX_WAIT_S))
                wire.send_message(near, jobs)
                reader = wire.FrameReader(near, MAX_REPORT)
                with contextlib.suppress(wire.Closed):  # the zygote reports how the tester ended
                    while len(reports) < len(jobs):
                        reports.append(reader.read_message(wire.wait_until(deadline)))
            is_readable = wait_readable(max(0.0, deadline - time.monotonic()), self.control)
            message = self.control.recv(1 << 16) if is_readable else b""
        except (wire.WireError, OSError) as error:
            raise WorkerDied(f"no report: {error}") from error
        if not message:
            raise WorkerDied("the zygote died")
        return reports, TesterEnd(*json.loads(message))

    def close(self) -> None:
        """Kill the jail and wait until its first process is gone.

        A pid namespace is empty by then. Without one, the rest dies of its parent's death, which may take a moment.
        """
        self.kill()
        inside, self.inside = self.inside, None
        if inside is not None:
            wait_readable(START_S, inside)
            os.close(inside)
        self.process.wait()
        self.control.close()

    def kill(self) -> None:
        """Kill the jail; a job that is running in another thread ends with :class:`WorkerDied`."""
        inside = self.inside
        if inside is not None:
            with contextlib.suppress(OSError):  # it has ended, or another thread closes it
                signal.pidfd_send_signal(inside, signal.SIGKILL)
        self.process.kill()
