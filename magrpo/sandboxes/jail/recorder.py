"""The recorder that instrumented test code reports to, and the other names in that code's namespace.

``instrument.py`` has the rules. The recorder runs in the tester, or in the candidate's process for tests that cannot be
separated from it.
"""

import builtins
import marshal
import re
import reprlib
import sys
from types import ModuleType
from typing import Any

HOOK = "__magrpo__"
MAX_CASES = 10_000
MAX_MESSAGE = 500
EXCEPTION_NAMES = frozenset(
    name for name, item in vars(builtins).items() if isinstance(item, type) and issubclass(item, BaseException)
)


class CandidateFailure(BaseException):
    """A call returned no value; no handler of the test may mistake that for an answer. ``args``: status, message."""


class Abort(BaseException):
    """Ends the test without a verdict. Passes through every handler of the test."""


class Unusable(Abort):
    """The fault lies with the test, not the candidate."""


class EnoughCases(Abort):
    """The test has reached the maximum number of cases."""


class OutOfTime(BaseException):
    """The test code has used up its CPU time."""


class Callee:
    """The record of a candidate, and ``entry``, the candidate as the test code sees it."""

    entry: Any

    def __init__(self) -> None:
        self.values: list[Any] = []  # returned since the current assert began
        self.has_answered = False  # since the test began
        self.raised: tuple[BaseException, str, str] | None = None  # the last exception, with status and message
        self.failure: tuple[str, str] | None = None  # status and message once it can no longer be called

    def note_value(self, value: Any) -> None:
        """Record the result of a call."""
        self.values.append(value)
        self.has_answered = True

    def describe(self, value: Any) -> str:
        """Describe briefly a value that the candidate returned."""
        return _DESCRIBER.repr(value)


class _Describer(reprlib.Repr):
    """Describes values briefly, also integers with more digits than Python converts to text."""

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"<integer of {x.bit_length()} bits>"


_DESCRIBER = _Describer()


class DeadCallee(Callee):
    """A candidate that cannot be called."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__()
        self.failure = status, message

        def entry(*_: Any, **__: Any) -> Any:
            raise CandidateFailure(status, message)

        self.entry = entry


def escape_text(text: str) -> str:
    """Cut text to 500 characters and escape line breaks, control and other unprintable characters."""
    text = text[:MAX_MESSAGE]
    if text.isprintable():
        return text
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return escaped[:MAX_MESSAGE]


def describe_exception(name: str, text: str) -> str:
    """``name: text`` for the message of a case; a name of no builtin exception becomes ``Exception``."""
    known = name if name in EXCEPTION_NAMES else "Exception"
    return f"{known}: {text}"


def name_builtin_class(error: BaseException) -> str:
    """Return the name of the nearest builtin class of an exception."""
    return next((base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"), "Exception")


class Recorder:
    """Records the cases of instrumented test code, which calls the first six methods by name."""

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self.cases: list[list[str]] = []
        self.undefined: dict[str, tuple[str, str]] = {}
        self.trouble: tuple[str, str] | None = None

    def begin(self) -> None:
        """Called when an assert begins."""
        self.callee.values.clear()

    def verdict(self, source: str, counts: bool, value: Any) -> None:
        """Called when an assert's expression was evaluated."""
        if not value:
            got = [self.callee.describe(value) for value in self.callee.values[-2:]]
            remark = f"  # got {', '.join(got)}" if got else ""
            self.add_case("wrong", f"assert {source}{remark}")
        elif counts:
            self.add_case("pass", "")

    def pass_on(self) -> None:
        """Called when a handler of all exceptions begins; reraises what no test expects, such as a hang."""
        error = sys.exc_info()[1]
        if isinstance(error, (CandidateFailure, Abort, OutOfTime, SystemExit)):
            raise error

    def error(self, source: str, error: BaseException, expecting: bool) -> None:
        """Called when an assert raised. ``expecting``: the test expects an exception, which goes on to its handlers."""
        if expecting and not isinstance(error, (CandidateFailure, OutOfTime)):
            raise error
        status, message = self.classify_error(error)
        self.add_case(status, f"assert {source}: {message}")

    def mark(self) -> int:
        """Called when a guarded statement begins."""
        return len(self.cases)

    def skipped(self, error: BaseException, mark: int, number: int, names: list[str]) -> None:
        """Called when a guarded statement raised: it holds ``number`` asserts and would have set ``names``."""
        status, message = self.classify_error(error)
        self.trouble = self.trouble or (status, message)
        self.undefined.update(dict.fromkeys(names, (status, message)))
        if number == 0 and not names:
            self.add_case(status, message)
        missing = number - (len(self.cases) - mark)
        for i in range(missing):
            self.add_case("not_run" if i else status, message)

    def settle(self, mark: int, number: int, hides: bool) -> None:
        """Called when a handler ends. Asserts its ``try`` skipped failed if it ``hides`` the error or fails itself."""
        cases = self.cases[mark:]
        error = sys.exc_info()[1]
        assert error
        if hides:
            self.skipped(error, mark, number, [])
        elif any(status != "pass" for status, _ in cases):
            for _ in range(number - len(cases)):
                self.add_case("not_run", "an earlier exception kept it from running")

    def classify_error(self, error: BaseException) -> tuple[str, str]:
        """Return status and message of an exception that reached the test."""
        if isinstance(error, Abort):
            raise error
        if isinstance(error, OutOfTime):
            self.callee.failure = "timeout", "the test ran out of time on what the program returned"
            return self.callee.failure
        if isinstance(error, CandidateFailure):
            return error.args[0], error.args[1]
        if self.callee.raised and error is self.callee.raised[0]:
            return self.callee.raised[1:]
        if isinstance(error, ImportError):
            raise Unusable(f"its test cannot be run: {error}; add that to sandbox.packages, or leave the problem out")
        if isinstance(error, NameError):
            name = re.search(r"'(\w+)'", str(error))  # only the message names an unbound local
            if name and name[1] in self.undefined:
                return self.undefined[name[1]]
        return "wrong", describe_exception(name_builtin_class(error), str(error))

    def add_case(self, status: str, message: str) -> None:
        if len(self.cases) == MAX_CASES:
            self.cases[-1] = ["output_limit", f"more than {MAX_CASES} cases"]
            raise EnoughCases
        self.cases.append([status, escape_text(message)])

    def finish_test(self) -> None:
        """Add a case for trouble outside of asserts; called at the end of the test."""
        trouble = self.trouble or self.callee.failure
        if trouble and all(case[0] == "pass" for case in self.cases):
            self.add_case(*trouble)
        if not self.cases:
            if not self.callee.has_answered and not self.callee.raised:
                raise Unusable("its test neither asserts anything nor calls the candidate")
            self.add_case("pass", "")


def run_test_code(code: bytes, entry_point: str, callee: Callee, names: dict[str, Any]) -> list[list[str]]:
    """Run instrumented test code that also sees ``names``; return ``[status, message]`` for each case.

    Raises:
        Unusable: the test itself cannot be run.
    """
    recorder = Recorder(callee)
    module = sys.modules["test"] = ModuleType("test")  # dataclasses look up their module
    vars(module).update(names)
    vars(module)["__builtins__"] = builtins
    vars(module).update({HOOK: recorder, "candidate": callee.entry, entry_point: callee.entry})
    try:
        try:
            exec(marshal.loads(code), vars(module))  # the test code, compiled by the parent
        except BaseException as error:  # noqa: BLE001 - whatever the test raises outside of a guard
            recorder.skipped(error, len(recorder.cases), 0, [])
        recorder.finish_test()
    except EnoughCases:
        pass
    return recorder.cases
