"""Runs one candidate's code and answers calls with claimed outputs, none of which can be trusted.

Runs in the same process as foreign code, so it protects nothing; it only has to serve honest programs well.
"""

import ast
import base64
import builtins
import random
import re
import sys
from socket import socket
from types import CodeType, ModuleType
from typing import Any

from . import recorder, wire

MODULE = "candidate"
ADDRESS = re.compile(r"\b0x[0-9a-f]+")
HELLO = "confined"  # the first message, sent before any foreign code is there to send it


class Watch:
    """Wraps the watched function: counts its outermost calls that return, and can hide their results.

    The function itself still runs, so its side effects remain.
    """

    def __init__(self) -> None:
        self.calls = self.depth = 0
        self.hide = self.running = False

    def __call__(self, function: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            outermost = self.running and self.depth == 0
            self.depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self.depth -= 1
            self.calls += outermost
            return Hidden() if outermost and self.hide else result

        return watched


class HiddenResultUsed(Exception):
    """The program used a hidden result."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise HiddenResultUsed


OPERATIONS = (
    "bool eq ne lt le gt ge hash len iter next contains getitem setitem delitem call int float complex index round "
    "trunc floor ceil abs neg pos invert add radd iadd sub rsub isub mul rmul imul truediv rtruediv floordiv "
    "rfloordiv mod rmod divmod rdivmod pow rpow and rand or ror xor rxor lshift rlshift rshift rrshift str repr "
    "format bytes reversed enter exit getattr deepcopy copy"
)
Hidden = type("Hidden", (), {f"__{name}__": _refuse for name in OPERATIONS.split()})
"""A value on which every operation raises."""


class CandidateProgram:
    """The candidate's module and its entry point. ``source``, ``entry_point`` and ``watch`` as in ``Execution``.

    Compiles the program and runs nothing of it before :meth:`load`.
    """

    def __init__(self, source: str, entry_point: str, watch: str) -> None:
        self.entry_point, self.watch = entry_point, watch
        tree = ast.parse(source, "<program>")
        bound = [i for i, node in enumerate(tree.body, start=1) if watch in list_bound_names(node)]
        if bound:  # a function bound to the name later, by other means, is another one and is not watched
            tree.body[bound[-1] : bound[-1]] = ast.parse("__watch__()").body
        self.code: CodeType = compile(tree, "<program>", "exec", dont_inherit=True)

    def load(self) -> None:
        """Run the program for the first time."""
        self.function, self.tracer = self._load()

    def _load(self) -> tuple[Any, Watch]:
        """Run the program from its beginning; return the entry point and the watch on the watched function."""
        tracer = Watch()
        module = ModuleType(MODULE)
        sys.modules[MODULE] = module  # dataclasses look up their module
        random.seed(0)
        module.__dict__["__builtins__"] = builtins

        def begin() -> None:
            del module.__dict__["__watch__"]
            watched = module.__dict__.get(self.watch)
            if callable(watched):
                module.__dict__[self.watch] = tracer(watched)

        module.__dict__["__watch__"] = begin
        exec(self.code, module.__dict__)  # the one purpose of this process
        return module.__dict__[self.entry_point], tracer

    def is_result_used(self, args: Any, kwargs: Any, answer: list[Any]) -> bool:
        """Whether the answer to a call changes when results of the watched function are hidden."""
        function, tracer = self._load()
        tracer.hide = True
        again = answer_call(function, tracer, args, kwargs)
        return tracer.calls > 0 and strip_addresses(again) != strip_addresses(answer)

    def run_test(self, code: str) -> list[Any]:
        """Run test code in this process: ``[status, [used, case, ...], None, calls of the watched function]``."""
        cases, tracer = self._judge(code, hide=False)
        used = tracer.calls > 0 and self._judge(code, hide=True)[0] != cases
        return ["ok", [used, *cases], None, tracer.calls]

    def _judge(self, code: str, hide: bool) -> tuple[list[list[str]], Watch]:
        function, tracer = self._load()
        tracer.hide, tracer.running = hide, True
        names = dict(vars(sys.modules[MODULE]))
        return recorder.run_test_code(base64.b64decode(code), self.entry_point, Local(function), names), tracer


def answer_call(function: Any, tracer: Watch, args: Any, kwargs: Any) -> list[Any]:
    """``[status, value, arguments if changed, calls of the watched function]``."""
    arguments, keywords = wire.decode_value(args), wire.decode_value(kwargs)
    tracer.calls, tracer.running, tracer.depth = 0, True, 0
    try:
        value = wire.encode_value(function(*arguments, **keywords))
    except BaseException as error:  # noqa: BLE001 - whatever it raises is its answer
        return [*describe_error(error), None, tracer.calls]
    finally:
        tracer.running = False
    after = wire.encode_value(arguments)
    return ["ok", value, None if after == args else after, tracer.calls]


def list_bound_names(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement defines, imports or assigns to."""
    names: set[str] = set()
    for node in ast.walk(statement):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=alias):
                names.add((alias or name).partition(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def strip_addresses(answer: list[Any]) -> list[Any]:
    """An answer without the addresses in an exception's message, so that equal calls have equal answers."""
    status, value, arguments, _ = answer
    return [status, value if status == "ok" else [value[0], ADDRESS.sub("", value[1])], arguments]


class Local(recorder.Callee):
    """The candidate, for a test that runs in the same process."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            value = self.function(*args, **kwargs)
        except Exception as error:
            status, claim = describe_error(error)
            self.raised = error, status, recorder.describe_exception(*claim)
            raise
        self.values.append(value)
        return value


def describe_error(error: BaseException) -> list[Any]:
    """``[status, [builtin class, message]]`` of an exception."""
    if isinstance(error, wire.TooLarge):
        return ["output_limit", ["ValueError", str(error)]]
    status = "memory" if isinstance(error, MemoryError) else "exception"
    known, own = recorder.name_builtin_class(error), type(error).__name__
    try:
        message = str(error) if own == known else f"{own}: {error}"
    except BaseException:  # noqa: BLE001 - its __str__ may raise
        message = own
    return [status, [known, message[:1000]]]


def serve_calls(channel: socket) -> None:
    """Report that the process is confined, then answer the tester's requests until it hangs up."""
    wire.send_message(channel, HELLO)
    reader = wire.FrameReader(channel, 1 << 40)
    program: CandidateProgram | None = None
    while True:
        try:
            index, verb, *rest = reader.read_message(lambda: None)
        except wire.Closed:
            return
        try:
            if verb == "compile":
                program = CandidateProgram(*rest)
                reply = ["ok", None, None, 0]
            elif program is None:
                return
            elif verb == "load":
                program.load()
                reply = ["ok", None, None, 0]
            elif verb == "call":
                reply = answer_call(program.function, program.tracer, *rest)
            elif verb == "beside":
                reply = program.run_test(*rest)
            else:
                reply = ["ok", any(program.is_result_used(*call) for call in rest[0]), None, 0]
        except BaseException as error:  # noqa: BLE001 - a program that does not load says why
            reply = [*describe_error(error), None, 0]
        wire.send_message(channel, [index, *reply])
