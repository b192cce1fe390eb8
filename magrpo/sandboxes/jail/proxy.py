"""The proxy of the candidate in the tester: a callable whose body runs in another process, under limits."""

import builtins
import json
import os
import signal
import socket
import time
from typing import Any

from . import candidate, wire
from .candidate_process import CandidateProcess
from .confine import Limits
from .recorder import Callee, CandidateFailure, describe_exception

HUNG, GONE = b"h", b"g"
MAX_REPLAYS = 8
START_S = 10.0
WALL_FACTOR = 2.0
"""Wall time allowed for a call, as a multiple of its CPU limit, not counting time spent waiting for a CPU."""
WALL_CAP = 8.0
"""The same multiple, counting all waiting: otherwise a program could wait for its own children."""
WATCH_S = 0.05  # between two measurements of a candidate that may have children
STATUSES = frozenset({"ok", "exception", "memory", "output_limit"})
SPECIAL = (StopIteration, StopAsyncIteration, UnicodeError, BaseExceptionGroup)
EXCEPTIONS: dict[str, type[Exception]] = {
    item.__name__: item
    for item in vars(builtins).values()
    if isinstance(item, type) and issubclass(item, Exception) and not issubclass(item, SPECIAL)
}
"""Builtin exceptions that can be constructed from a message alone."""


class Inexpressible(BaseException):
    """The test passes a value to the candidate that is not plain data."""


class Broken(BaseException):
    """The jail, not the candidate, is at fault. Passes through every handler of the test."""


class TooMuchMemory(wire.WireError):
    """The candidate's processes together exceed the memory limit."""


class Proxy(Callee):
    """Calls the candidate, and replaces its process once if it hangs or dies.

    ``program``: source, entry point and watched function; ``requests``: channel to the zygote; ``process``: without a
    program yet; ``limits``: of the candidate; ``children``: whether it may have any.
    """

    def __init__(
        self, program: list[str], requests: socket.socket, process: CandidateProcess, limits: Limits, children: bool
    ) -> None:
        super().__init__()
        self.program, self.requests, self.limits, self.children = program, requests, limits, children
        self.measured = time.monotonic()
        self.spare: CandidateProcess | None = process
        self.lives, self.index, self.spent_s = 2, 0, 0.0
        self.past_cpu_s, self.past_memory = 0.0, 0
        self.output_left = limits.output_bytes
        self.watched_calls = 0
        self.replays: list[list[Any]] = []
        self.compiles = True
        self._load()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the candidate; CandidateFailure if there is no answer. Its exception is raised as a builtin class."""
        if self.failure:
            raise CandidateFailure(*self.failure)
        try:
            arguments, keywords = wire.encode_value(list(args), plain=True), wire.encode_value(kwargs, plain=True)
        except wire.WireError as error:
            # A returned value must not be able to move the test into the candidate's process, where it could be forged.
            if isinstance(error, wire.Returned) or (isinstance(error, wire.TooLarge) and self.values):
                raise CandidateFailure("wrong", f"the test passes on what the program returned: {error}") from None
            raise Inexpressible(str(error)) from None
        answer = self._ask("call", [arguments, keywords])
        status, value, mutated, calls = answer
        self.watched_calls += calls
        if calls and status in ("ok", "exception") and len(self.replays) < MAX_REPLAYS:
            self.replays.append([arguments, keywords, answer])
        if status != "ok":
            name, message = value
            exception = EXCEPTIONS.get(name, RuntimeError)(message)
            self.raised = exception, status, describe_exception(name, message)
            raise exception
        try:
            result, after = wire.decode_value(value), wire.decode_value(mutated)
            if mutated is not None:
                update_arguments(args, after)
        except wire.WireError as error:
            raise self._replace_failed("protocol", str(error), HUNG, "call") from None
        self.values.append(result)
        return result

    def result_used(self) -> bool:
        """Whether an answer changes when the watched function's results are hidden, as claimed by the candidate.

        A program that hangs or dies without the results counts as using them.
        """
        if not self.replays:
            return False
        self.spent_s = 0.0
        if self.spare:
            self._load()
        try:
            return self._ask("used", [self.replays])[1] is True
        except CandidateFailure as failure:
            return failure.args[0] in {"timeout", "crash"}

    def replace_process(self) -> None:
        self._replace_failed("not_run", "replaced", HUNG, "renew")
        self._load()

    def run_test(self, code: str) -> tuple[list[tuple[str, str]], int, bool]:
        """Run test code in the candidate's process, within the limits of all tests; return cases, calls, used."""
        status, value, _, calls = self._ask("beside", [code], self.limits.total_s)
        if status != "ok":
            raise CandidateFailure(status, describe_exception(*value))
        try:
            used, *pairs = value
            return [(str(case_status), str(message)) for case_status, message in pairs], calls, used is True
        except (TypeError, ValueError):
            raise self._replace_failed("protocol", "malformed cases", HUNG, "beside") from None

    def measure_usage(self) -> tuple[float, int]:
        """CPU seconds of all processes so far, and the largest memory of one in bytes."""
        self._measure_family()
        return self.past_cpu_s + self.process.read_times()[0], max(self.past_memory, self.process.read_peak_memory())

    def _measure_family(self) -> int:
        """Resident bytes of a candidate with its children; 0 if it may have none, or was measured a moment ago."""
        if not self.children or time.monotonic() - self.measured < WATCH_S:
            return 0
        self.measured = time.monotonic()
        return self.process.measure_family()

    def _load(self) -> None:
        assert self.spare
        self.failure = None
        self.process, self.spare = self.spare, None
        self.reader = wire.FrameReader(self.process.channel, self.output_left)
        self.lives -= 1
        try:
            assert self.reader.read_message(wire.wait_until(time.monotonic() + START_S)) == candidate.HELLO
        except wire.WireError as error:
            raise Broken(f"a candidate process could not be confined: {error}") from None
        for verb, rest in (("compile", self.program), ("load", [])):
            try:
                status, value, *_ = self._ask(verb, rest)
            except CandidateFailure as failure:
                self.failure = failure.args[0], f"cannot {verb} the program: {failure.args[1]}"
            else:
                if status != "ok":
                    self.failure = "memory" if status == "memory" else "load_error", describe_exception(*value)
            if self.failure:
                self.compiles &= verb != "compile"
                return

    def _ask(self, verb: str, rest: list[Any], limit_s: float | None = None) -> list[Any]:
        """One question, one answer, within the limits of one test or ``limit_s``."""
        self.index += 1
        allowed = min(limit_s or self.limits.test_s, self.limits.total_s - self.spent_s)
        began, (cpu, waited) = time.monotonic(), self.process.read_times()

        def charge() -> float:
            """The maximum of CPU time and scaled wall time, with and without the time spent waiting for a CPU."""
            cpu_now, waited_now = self.process.read_times()
            wall = time.monotonic() - began
            return max(cpu_now - cpu, (wall - waited_now + waited) / WALL_FACTOR, wall / WALL_CAP)

        def wait() -> float:
            left = allowed - charge()
            if left <= 0:
                return 0.0
            if self._measure_family() > self.limits.memory_bytes:
                raise TooMuchMemory("together its processes hold more memory than the limit")
            return max(min(left, WATCH_S) if self.children else left, 0.001)

        try:
            self.process.channel.settimeout(10 * allowed + 1)
            wire.send_message(self.process.channel, [self.index, verb, *rest])
            answer = check_answer(self.reader.read_message(wait), self.index)
        except (wire.WireError, OSError) as error:
            self.spent_s += charge()
            raise self._replace_failed(*diagnose_failure(error, allowed), verb) from None
        self.spent_s += charge()
        if self.spent_s >= self.limits.total_s:
            self.failure = "not_run", "out of time in all"
        return answer

    def _replace_failed(self, status: str, message: str, how: bytes, verb: str) -> CandidateFailure:
        """Have the failed process replaced, and load the program again if that is still allowed.

        A broken protocol and too much output are final: all later cases get the same status.
        """
        self.output_left = self.reader.left
        self._measure_family()
        cpu_before_s = self.process.read_times()[0]
        self.process.close()
        self.requests.send(how)
        reply, descriptors, _, _ = socket.recv_fds(self.requests, 200, 1)
        wait_status, cpu_s, memory, pid = json.loads(reply)
        self.past_cpu_s += max(cpu_s, cpu_before_s)  # children that are killed with it count in neither's exit status
        self.past_memory = max(self.past_memory, memory)
        self.spare = CandidateProcess(socket.socket(fileno=descriptors[0]), pid, self.process.proc)
        if how == GONE and os.WIFSIGNALED(wait_status):
            cause = os.WTERMSIG(wait_status)
            name = signal.Signals(cause).name if cause in set(signal.Signals) else f"signal {cause}"
            message = f"the process died of {name}"
            status = {int(signal.SIGKILL): "memory", int(signal.SIGXCPU): "timeout"}.get(cause, "crash")
        if verb in ("compile", "load") or status in ("protocol", "output_limit"):
            self.failure = status, message
        elif self.lives and self.limits.total_s > self.spent_s and verb == "call":
            self._load()
        else:
            self.failure = "not_run", "an earlier test ended the program"
        return CandidateFailure(status, message)


def diagnose_failure(error: Exception, allowed: float) -> tuple[str, str, bytes]:
    """Status, message and request to the zygote for an answer that did not arrive."""
    match error:
        case TooMuchMemory():
            return "memory", str(error), HUNG
        case wire.Late() | TimeoutError():
            return "timeout", f"no answer within {allowed:g} s", HUNG
        case wire.TooLarge():
            return "output_limit", str(error), HUNG
        case wire.Closed() | OSError():
            return "crash", "the process died", GONE
    return "protocol", str(error), HUNG


def check_answer(answer: Any, index: int) -> list[Any]:
    """``[status, value, arguments, calls]`` of an answer to question ``index``; WireError if it is malformed."""
    if not (isinstance(answer, list) and len(answer) == 5 and type(answer[0]) is int and answer[0] == index):
        raise wire.WireError("not the answer to the question")
    _, status, value, _, calls = answer
    if not isinstance(status, str) or status not in STATUSES or type(calls) is not int or calls < 0:
        raise wire.WireError("malformed answer")
    if status != "ok" and not (isinstance(value, list) and [type(item) for item in value] == [str, str]):
        raise wire.WireError("malformed exception")
    return answer[1:]


def update_arguments(args: tuple[Any, ...], after: Any) -> None:
    """Copy the candidate's changes into mutable arguments; WireError if the numbers of arguments differ."""
    if not isinstance(after, list) or len(after) != len(args):
        raise wire.WireError("malformed arguments")
    for old, new in zip(args, after, strict=True):
        if isinstance(old, (list, bytearray)) and isinstance(new, (list, bytearray)):
            old[:] = new
        elif isinstance(old, (dict, set)) and isinstance(new, type(old)):
            old.clear()
            old.update(new)
