"""The proxy of the candidate in the tester: a callable whose body runs in another process, under limits."""

import os
import signal
import socket
import time
from functools import cache
from typing import Any

from . import candidate, wire
from .candidate_process import CandidateProcess, replace_process
from .clock import limit_cpu
from .confine import Limits
from .exports import check_operation, grant
from .peer import Answered, Peer
from .recorder import Abort, Callee, CandidateFailure, OutOfTime, describe_exception
from .surroundings import Surroundings
from .values import find_library_name
from .wire import TooLarge

HUNG, GONE = b"h", b"g"
MAX_TRANSCRIPT = 200
OWN_VERBS = frozenset({"load", "replay", "beside", "renew", "forget"})
"""What the tester asks on its own account, not for the test."""
START_S = 10.0
WALL_FACTOR = 2.0
"""Wall time allowed for a call, as a multiple of its CPU limit, not counting time spent waiting for a CPU."""
WALL_CAP = 8.0
"""The same multiple for one call, counting all waiting: otherwise a program could wait for its own children."""
WATCH_S = 0.05  # between two measurements of a candidate that may have children
STATUSES = frozenset({"ok", "exception", "memory", "output_limit"})
REUSE_CPU_S, REUSE_MEMORY_FRACTION = 1.0, 16
"""A process that has used more CPU time, or more than one part in so many of its memory, runs no further program."""
DECODING_S = 1.0
"""CPU time for decoding one answer: keys may collide."""


class Inexpressible(Abort):
    """The test passes a value to the candidate that is not plain data."""


class Broken(Abort):
    """The jail, not the candidate, is at fault."""


class TooMuchMemory(wire.WireError):
    """The candidate's processes together exceed the memory limit."""


class EntryPoint:
    """The entry point as the test sees it. ``proxy.ask_entry(operation, ...)`` asks the candidate about it."""

    def __init__(self, proxy: Any) -> None:
        object.__setattr__(self, "_proxy", proxy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "_proxy").call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return object.__getattribute__(self, "_proxy").ask_entry("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_proxy").ask_entry("setattr", name, value)

    def __instancecheck__(self, instance: Any) -> Any:
        return object.__getattribute__(self, "_proxy").ask_entry("instancecheck", instance)

    def __mro_entries__(self, _: Any) -> Any:
        raise Inexpressible("the test derives a class from it")

    @property
    def __class__(self) -> type:
        """That of the object itself, as far as the test can see."""
        return object.__getattribute__(self, "_proxy").target.__class__  # type: ignore[no-any-return]

    @__class__.setter
    def __class__(self, _: Any) -> None:
        raise TypeError("the class of an entry point cannot be changed")

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return object.__getattribute__(self, "_proxy").ask_entry("getattr", "__doc__")


def make_entry_point(proxy: Any) -> EntryPoint:
    """The entry point with the special methods of its target: an enumeration can be iterated over."""
    kind: Any = type(proxy.target)
    return _make_entry_point_class(kind)(proxy)


@cache
def _make_entry_point_class(target: type) -> type[EntryPoint]:
    def forward(name: str) -> Any:
        return lambda self, *arguments: getattr(object.__getattribute__(self, "_proxy").target, name)(*arguments)

    special = vars(target)
    names = special.keys() - vars(EntryPoint).keys()
    methods = {name: forward(name) for name in names if name.startswith("__") and callable(special[name])}
    methods["__doc__"] = vars(EntryPoint)["__doc__"]
    return type("EntryPoint", (EntryPoint,), methods)


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
        self.watch, self.surroundings = program[2], Surroundings()
        self.target = None
        self.spare: CandidateProcess | None = process
        self.lives, self.index, self.spent_s = 2, 0, 0.0
        self.past_cpu_s, self.past_memory = -process.read_times()[0] if process.has_greeted else 0.0, 0
        self.output_left = limits.output_bytes
        self.watched_calls = 0
        self.transcript: list[list[Any]] = []
        self.compiles = False
        self._load()
        self.entry = EntryPoint(self) if self.target is None else make_entry_point(self)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the entry point; CandidateFailure if there is no answer. Exceptions have their nearest builtin class."""
        result = self.ask_entry("call", args, tuple(kwargs.items()))
        self.note_value(result)
        return result

    def describe(self, value: Any) -> str:
        self.peer.is_quiet = True
        try:
            return super().describe(value)
        finally:
            self.peer.is_quiet = False

    def ask_entry(self, operation: str, *arguments: Any) -> Any:
        """Ask the candidate to do something to its entry point."""
        return self._ask_program(self.peer, operation, (self.target, *arguments))

    def _ask_program(self, peer: Peer, operation: str, arguments: tuple[Any, ...]) -> Any:
        if self.failure:
            raise CandidateFailure(*self.failure)
        if peer is not self.peer:
            raise CandidateFailure("not_run", "an earlier test ended the process that this object lived in")
        changes = self.surroundings.list_changes()
        if changes:
            operation, arguments = "amid", (changes, operation, *arguments)
        try:
            question = peer.write_question(arguments)
        except wire.WireError as error:
            # A returned value must not be able to move the test into the candidate's process, where it could be forged.
            if isinstance(error, TooLarge) and self.has_answered:
                raise CandidateFailure("wrong", f"the test passes on what the program returned: {error}") from None
            raise Inexpressible(str(error)) from None
        status, value, after, calls = answer = self._ask(operation, question)
        self.watched_calls += calls
        if self.watch and self.lives == 1 and len(self.transcript) < MAX_TRANSCRIPT:
            self.transcript.append([operation, question, answer])
        if status == "ok" and not after and (value is None or type(value) in (bool, int, float, str)):
            return value
        try:
            with limit_cpu(DECODING_S):
                return peer.read_answer(status, value, after)
        except Answered as answered:
            raised = answered.args[0]
            self.raised = raised, status, describe_claim(value)
            raise raised from raised.__cause__
        except (wire.WireError, OutOfTime) as error:
            raise self._replace_failed(
                "protocol", str(error) or "an answer takes too long to read", HUNG, "call"
            ) from None

    def is_result_used(self) -> bool:
        """Whether an answer changes when the watched function's results are hidden, as claimed by the candidate.

        A program that hangs or dies without the results counts as using them.
        """
        if not self.watched_calls or not self.transcript:
            return False
        self.spent_s = 0.0
        if self.spare:
            self._load()
        try:
            return self._ask("replay", [self.transcript])[1] is True
        except CandidateFailure as failure:
            return failure.args[0] in {"timeout", "crash"}

    def replace_process(self) -> None:
        self._replace_failed("not_run", "replaced", HUNG, "renew")
        self._load()

    def run_test(self, code: str) -> tuple[list[tuple[str, str]], int, bool]:
        """Run test code in the candidate's process, within the limits of all tests; return cases, calls, used."""
        status, value, _, calls = self._ask("beside", [code], self.limits.total_s)
        if status != "ok":
            raise CandidateFailure(status, describe_claim(value))
        try:
            used, *pairs = value
            return [(str(case_status), str(message)) for case_status, message in pairs], calls, used is True
        except (TypeError, ValueError):
            raise self._replace_failed("protocol", "malformed cases", HUNG, "beside") from None

    def measure_usage(self) -> tuple[float, int]:
        """CPU seconds of all processes so far, and the largest memory of one in bytes."""
        self._measure_family()
        return self.past_cpu_s + self.process.read_times()[0], max(self.past_memory, self.process.read_peak_memory())

    def pass_on_process(self, may_share: bool) -> CandidateProcess:
        """The process for the next program: a fresh one, or this one if they ``may_share`` it and it is as before."""
        if self.spare:
            return self.spare
        if may_share and self.failure is None:
            try:
                self._ask("forget", [])
            except CandidateFailure:
                assert self.spare
                return self.spare
            if self._leaves_no_trace():
                return self.process
        return replace_process(self.process, self.requests, HUNG)[0]

    def _leaves_no_trace(self) -> bool:
        """Whether the process is as it was before the program, as far as can be told from outside."""
        return (
            self.process.is_alone(self.children)
            and self.process.read_times()[0] < REUSE_CPU_S
            and self.process.read_peak_memory() < self.limits.memory_bytes // REUSE_MEMORY_FRACTION
        )

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
        self.peer = peer = Peer(
            lambda *question: self._ask_program(peer, *question), grant, check_operation, find_name=find_library_name
        )
        self.reader = wire.FrameReader(self.process.channel, self.output_left)
        self.lives -= 1
        self._await_greeting()
        try:
            status, value, *_ = self._ask("load", self.program)
        except CandidateFailure as failure:
            what, reason = failure.args
            self.failure = what, f"cannot {'load' if self.compiles else 'compile'} the program: {reason}"
            return
        if status != "ok":
            self.failure = "memory" if status == "memory" else "load_error", describe_claim(value)
            return
        try:
            self.target = self.peer.read_answer("ok", value, [])
        except wire.WireError as error:
            self._replace_failed("protocol", str(error), HUNG, "load")

    def _await_greeting(self) -> None:
        """Wait until the process is confined."""
        try:
            if not self.process.has_greeted:
                assert self.reader.read_message(wire.wait_until(time.monotonic() + START_S)) == candidate.HELLO
        except wire.WireError as error:
            raise Broken(f"a candidate process could not be confined: {error}") from None
        self.process.has_greeted = True

    def _ask(self, verb: str, rest: list[Any], limit_s: float | None = None) -> list[Any]:
        """One question, one answer, within the limits of one test or ``limit_s``."""
        self.index = index = self.index + 1
        allowed = min(limit_s or self.limits.test_s, self.limits.total_s - self.spent_s)
        process = self.process
        began, (cpu, waited) = time.monotonic(), process.read_times()

        def charge() -> float:
            """The maximum of CPU time and scaled wall time without the time spent waiting for a CPU."""
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
            while isinstance(message, list) and message[:1] == ["ask"] and verb not in OWN_VERBS:
                self._answer_question(*message[1:])
                if process is not self.process:
                    raise CandidateFailure("not_run", "an earlier test ended the program")
                message = self.reader.read_message(wait)
            answer = check_answer(message, index)
        except (wire.WireError, OSError) as error:
            self.spent_s += charge()
            raise self._replace_failed(*diagnose_failure(error, allowed), verb) from None
        self.spent_s += charge()
        if self.spent_s >= self.limits.total_s:
            self.failure = "timeout", "out of time in all"
        return answer

    def _answer_question(self, *question: Any) -> None:
        """Answer what the program asks about an object of the test."""
        try:
            operation, *rest = question
            with limit_cpu(DECODING_S):
                answer = self.peer.serve(operation, *rest)
        except (ValueError, TypeError, OutOfTime) as error:
            raise wire.WireError(f"a question of the program: {type(error).__name__}") from None
        wire.send_message(self.process.channel, ["answer", *answer])

    def _replace_failed(self, status: str, message: str, how: bytes, verb: str) -> CandidateFailure:
        """Have the failed process replaced, and load the program again if that is still allowed.

        A broken protocol and too much output are final: all later cases get the same status.
        """
        self.output_left = self.reader.left
        self._measure_family()
        cpu_before_s = self.process.read_times()[0]
        self.spare, (wait_status, cpu_s, memory) = replace_process(self.process, self.requests, how)
        self.past_cpu_s += max(cpu_s, cpu_before_s)  # children that are killed with it count in neither's exit status
        self.past_memory = max(self.past_memory, memory)
        if how == GONE and os.WIFSIGNALED(wait_status):
            cause = os.WTERMSIG(wait_status)
            name = signal.Signals(cause).name if cause in set(signal.Signals) else f"signal {cause}"
            message = f"the process died of {name}"
            status = {int(signal.SIGKILL): "memory", int(signal.SIGXCPU): "timeout"}.get(cause, "crash")
        if verb == "load" or status in ("protocol", "output_limit"):
            self.failure = status, message
        elif self.lives and self.limits.total_s > self.spent_s and verb not in OWN_VERBS:
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


def describe_claim(value: list[Any]) -> str:
    """The message about an exception as :func:`magrpo.sandboxes.jail.peer.describe_error` describes it."""
    known, own, text, *_ = value
    return describe_exception(known, text if own in ("", known) else f"{own}: {text}")


def check_answer(answer: Any, index: int) -> list[Any]:
    """``[status, value, changes, calls]`` of an answer to question ``index``; WireError if it is malformed."""
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
