"""The tester's proxy of the candidate: a callable whose body runs in another process, under limits."""

import os
import signal
import socket
import threading
import time
from typing import Any

from . import candidate, wire
from .candidate_process import CandidateProcess, replace_process
from .clock import limit_cpu
from .confine import Limits
from .exceptions import build_error
from .recorder import Abort, Callee, CandidateFailure, OutOfTime, describe_exception
from .stand_ins import EntryPoint, Inexpressible, Opaque, describe_opaque_values
from .surroundings import Surroundings
from .values import Decoder, Encoder, read_index

HUNG, GONE = b"h", b"g"
MAX_ARGUMENTS = 2_000_000
"""Most values in the arguments of a call. They are the test's, and so may be more than an answer may have."""
START_S = 10.0
WALL_FACTOR = 2.0
"""Wall time allowed for a call, as a multiple of its CPU limit, not counting time spent waiting for a CPU."""
WALL_CAP = 8.0
"""Wall time for a single call, waiting included, as a multiple; else a program could wait for its own children."""
WATCH_S = 0.05  # between two measurements of a candidate that may have children
STATUSES = frozenset({"ok", "exception", "memory", "output_limit"})
REUSE_CPU_S, REUSE_MEMORY_FRACTION = 1.0, 16
"""A process that has used more CPU time, or more than this fraction of its memory (1/16), runs no further program."""
DECODING_S = 1.0
"""CPU time in seconds for decoding one answer, which may be slow to decode because its keys collide."""


class Broken(Abort):
    """The fault lies with the jail, not the candidate."""


class TooMuchMemory(wire.WireError):
    """The candidate's processes together exceed the memory limit."""


class ProcessFailed(Exception):
    """The candidate's process hangs, died or broke a rule; it must be replaced. ``args``: status, message, request."""


class Proxy(Callee):
    """Calls the candidate, and replaces its process once if it hangs or dies.

    ``program``: source, entry point and watched function; ``requests``: channel to the zygote; ``process``: without a
    program, or :meth:`passed on <pass_on_process>`; ``limits``: of the candidate; ``children``: whether it may have
    any.
    """

    def __init__(
        self, program: list[str], requests: socket.socket, process: CandidateProcess, limits: Limits, children: bool
    ) -> None:
        super().__init__()
        self.program, self.requests, self.limits, self.children = program, requests, limits, children
        self.measured = time.monotonic()
        self.surroundings = Surroundings()
        self.lock = threading.RLock()  # the test may call from several threads, and there is one channel
        self.entry = EntryPoint(program[1], self.call)
        self.entry_is_class = False
        self.spare: CandidateProcess | None = process  # has replaced ``self.process``, and is not loaded yet
        self.may_reload, self.index, self.spent_s = True, 0, 0.0
        self.past_cpu_s = -process.read_times()[0] if process.has_greeted else 0.0
        self.past_memory = 0
        self.output_left = limits.output_bytes
        self.watched_calls = 0
        self.compiles = False
        self._load()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the entry point; its exceptions arrive as their nearest builtin class. Threads take turns.

        Raises:
            CandidateFailure: there is no answer. Inexpressible: the call needs an object that is not plain data.
        """
        with self.lock:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.failure:
            raise CandidateFailure(*self.failure)
        if self.entry_is_class:
            raise Inexpressible("the entry point is a class")
        encoder = Encoder()
        encoder.budget = MAX_ARGUMENTS
        try:
            question = encoder.encode((self.surroundings.list_changes(), args, tuple(kwargs.items())))
        except wire.WireError as error:
            raise Inexpressible(f"the test passes an argument that cannot cross: {error}") from None
        try:
            status, value, changes, calls = self._ask("call", [question])
            self.watched_calls += calls
            if status != "ok" or changes or not (value is None or type(value) in (bool, int, float, str)):
                value = self._read_answer(status, value, changes, encoder.containers)
        except ProcessFailed as failed:
            failure = self._replace_failed(failed)
            self._prepare_next_call(*failure.args)
            raise failure from None
        self.note_value(value)
        return value

    def _prepare_next_call(self, status: str, message: str) -> None:
        """After a call that ended the process: load the program into the next one if that is still allowed.

        A broken protocol and too much output are final: all later cases get the same status.
        """
        if status in ("protocol", "output_limit"):
            self.failure = status, message
        elif self.may_reload and self.limits.total_s > self.spent_s:
            self.may_reload = False
            self._load()
        else:
            self.failure = "not_run", "an earlier test ended the program"

    def _read_answer(self, status: str, value: Any, changes: list[Any], containers: list[Any]) -> Any:
        """Return the value in an answer or raise its exception, after making its changes to the ``containers``."""
        decoder = Decoder(containers, Opaque)
        try:
            with limit_cpu(DECODING_S):
                result = decoder.decode(value) if status == "ok" else build_error(value, decoder)
                for number, content in changes:
                    decoder.decode_content(content, containers[read_index(number)])
        except OutOfTime:
            raise ProcessFailed("protocol", "an answer takes too long to read", HUNG) from None
        except wire.WireError as error:
            raise ProcessFailed("protocol", str(error), HUNG) from None
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise ProcessFailed("protocol", f"malformed answer: {type(error).__name__}", HUNG) from None
        if status != "ok":
            self.raised = result, status, describe_claim(value)
            raise result
        return result

    def describe(self, value: Any) -> str:
        with describe_opaque_values():
            return super().describe(value)

    def restart(self) -> None:
        """Load the program into a fresh process with a full time budget, because the test begins again."""
        if not self.spare:
            self._replace(HUNG)
        self.spent_s = 0.0
        self._load()

    def run_test(self, code: str) -> tuple[list[tuple[str, str]], int]:
        """Run test code in the candidate's process, within the limits of all tests; return cases and calls."""
        try:
            status, value, _, calls = self._ask("beside", [code], self.limits.total_s)
        except ProcessFailed as failed:
            raise self._replace_failed(failed) from None
        if status != "ok":
            raise CandidateFailure(status, describe_claim(value))
        try:
            return [(str(case_status), str(message)) for case_status, message in value], calls
        except (TypeError, ValueError):
            raise CandidateFailure("protocol", "malformed cases") from None

    def measure_usage(self) -> tuple[float, int]:
        """Return the CPU seconds of all processes so far, and the largest memory of one in bytes."""
        self._measure_family()
        return self.past_cpu_s + self.process.read_times()[0], max(self.past_memory, self.process.read_peak_memory())

    def pass_on_process(self, may_share: bool) -> CandidateProcess:
        """Return the next program's process: this one if they ``may_share`` it and it is unchanged, else another."""
        if self.spare:
            return self.spare
        if may_share and self.failure is None and self._leaves_no_trace():
            return self.process
        return replace_process(self.process, self.requests, HUNG)[0]

    def _leaves_no_trace(self) -> bool:
        """Whether the process forgets the program and is then as before, as far as can be seen from outside."""
        try:
            self._ask("forget", [])
        except ProcessFailed:
            return False
        return (
            self.process.is_alone(self.children)
            and self.process.read_times()[0] < REUSE_CPU_S
            and self.process.read_peak_memory() < self.limits.memory_bytes // REUSE_MEMORY_FRACTION
        )

    def _measure_family(self) -> int:
        """Return the resident bytes of a candidate and its children; 0 if it may have none, or was just measured."""
        if not self.children or time.monotonic() - self.measured < WATCH_S:
            return 0
        self.measured = time.monotonic()
        return self.process.measure_family()

    def _load(self) -> None:
        assert self.spare
        self.failure = None
        self.process, self.spare = self.spare, None
        self.reader = wire.FrameReader(self.process.channel, self.output_left)
        self._await_greeting()
        try:
            status, value, *_ = self._ask("load", self.program)
        except ProcessFailed as failed:
            what, reason = self._replace_failed(failed).args
            verb = "load" if self.compiles else "compile"
            self.failure = what, f"cannot {verb} the program: {reason}"
            return
        if status != "ok":
            self.failure = "memory" if status == "memory" else "load_error", describe_claim(value)
            return
        self.entry_is_class = value is True

    def _await_greeting(self) -> None:
        """Wait until the process is confined."""
        try:
            if not self.process.has_greeted:
                assert self.reader.read_message(wire.wait_until(time.monotonic() + START_S)) == candidate.HELLO
        except wire.WireError as error:
            raise Broken(f"a candidate process could not be confined: {error}") from None
        self.process.has_greeted = True

    def _ask(self, verb: str, rest: list[Any], limit_s: float | None = None) -> list[Any]:
        """Ask one question and return its answer, within the limits of one test or ``limit_s``.

        Raises:
            ProcessFailed: there is no answer. The caller has the process replaced.
        """
        self.index = index = self.index + 1
        allowed = min(limit_s or self.limits.test_s, self.limits.total_s - self.spent_s)
        process = self.process
        began, (cpu, waited) = time.monotonic(), process.read_times()

        def charge() -> float:
            """Return CPU time, or scaled wall time without waiting for a CPU, whichever is larger."""
            cpu_now, waited_now = process.read_times()
            wall = time.monotonic() - began
            return max(cpu_now - cpu, (wall - waited_now + waited) / WALL_FACTOR)

        def wait() -> float:
            left = allowed - max(charge(), (time.monotonic() - began) / WALL_CAP)
            if left <= 0:
                return 0.0
            if self._measure_family() > self.limits.memory_bytes:
                raise TooMuchMemory("together its processes hold more memory than the limit")
            return max(min(left, WATCH_S) if self.children else left, 0.001)

        try:
            process.channel.settimeout(10 * allowed + 1)
            wire.send_message(process.channel, [index, verb, *rest])
            message = self.reader.read_message(wait)
            if message == candidate.COMPILED and verb == "load":
                self.compiles = True
                message = self.reader.read_message(wait)
            answer = check_answer(message, index)
        except (wire.WireError, OSError) as error:
            self.spent_s += charge()
            raise diagnose_failure(error, allowed) from None
        self.spent_s += charge()
        if self.spent_s >= self.limits.total_s:
            self.failure = "timeout", "out of time in all"
        return answer

    def _replace_failed(self, failed: ProcessFailed) -> CandidateFailure:
        """Have the failed process replaced; return the failure with its cause, which shows when the process is gone."""
        status, message, how = failed.args
        wait_status = self._replace(how)
        if how == GONE and os.WIFSIGNALED(wait_status):
            cause = os.WTERMSIG(wait_status)
            name = signal.Signals(cause).name if cause in set(signal.Signals) else f"signal {cause}"
            message = f"the process died of {name}"
            status = {int(signal.SIGKILL): "memory", int(signal.SIGXCPU): "timeout"}.get(cause, "crash")
        return CandidateFailure(status, message)

    def _replace(self, how: bytes) -> int:
        """Have the zygote end the process and start the spare one; return the exit status of the old one."""
        self.output_left = self.reader.left
        self._measure_family()
        cpu_before_s = self.process.read_times()[0]
        self.spare, (wait_status, cpu_s, memory) = replace_process(self.process, self.requests, how)
        self.past_cpu_s += max(cpu_s, cpu_before_s)  # children killed along with it are missing from its exit status
        self.past_memory = max(self.past_memory, memory)
        return wait_status


def diagnose_failure(error: Exception, allowed: float) -> ProcessFailed:
    """Say why an answer did not arrive, and what to ask the zygote for."""
    match error:
        case TooMuchMemory():
            return ProcessFailed("memory", str(error), HUNG)
        case wire.Late() | TimeoutError():
            return ProcessFailed("timeout", f"no answer within {allowed:g} s", HUNG)
        case wire.TooLarge():
            return ProcessFailed("output_limit", str(error), HUNG)
        case wire.Closed() | OSError():
            return ProcessFailed("crash", "the process died", GONE)
    return ProcessFailed("protocol", str(error), HUNG)


def describe_claim(value: list[Any]) -> str:
    """Format the message about an exception that :func:`magrpo.sandboxes.jail.exceptions.encode_exception` encoded."""
    known, own, text, *_ = value
    return describe_exception(known, text if own in ("", known) else f"{own}: {text}")


def check_answer(answer: Any, index: int) -> list[Any]:
    """Return ``[status, value, changes, calls]`` of an answer to question ``index``; WireError if it is malformed."""
    if not (isinstance(answer, list) and len(answer) == 5 and type(answer[0]) is int and answer[0] == index):
        raise wire.WireError("not the answer to the question")
    _, status, value, changes, calls = answer
    if not isinstance(status, str) or status not in STATUSES or type(calls) is not int or calls < 0:
        raise wire.WireError("malformed answer")
    if not isinstance(changes, list) or not all(isinstance(c, list) and len(c) == 2 for c in changes):
        raise wire.WireError("malformed changes")
    texts = value[:3] if isinstance(value, list) and len(value) == 4 else []
    if status != "ok" and [type(text) for text in texts] != [str, str, str]:
        raise wire.WireError("malformed exception")
    return answer[1:]
