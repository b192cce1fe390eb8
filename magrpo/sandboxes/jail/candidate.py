"""Runs one candidate's code and answers calls with claimed outputs, none of which can be trusted.

Runs in the same process as foreign code, so it protects nothing; it only has to serve honest programs well.
"""

import ast
import base64
import builtins
import gc
import json
import re
import sys
from _thread import RLock
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import update_wrapper
from socket import socket
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import recorder, wire
from .peer import Answered, Peer, describe_error, list_powers
from .seeds import seed_generators
from .surroundings import make_changes
from .values import find_in_library

MODULE = "candidate"
ADDRESS = re.compile(r"\b0x[0-9a-f]+")
HELLO = "confined"  # the first message, sent before any foreign code is there to send it
COMPILED = "compiled"  # sent before any of the program runs


class Watch:
    """Wraps the watched function: counts its outermost calls that return, and can ``hide`` what they do.

    The function itself still runs. Hidden are its ``result``, which nothing can be done with, or which another value
    of its type replaces (``value``), or the changes of its arguments (``changes``).
    """

    def __init__(self, hide: str = "") -> None:
        self.calls = self.depth = 0
        self.hide, self.running = hide, False

    def __call__(self, function: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            outermost = self.running and self.depth == 0
            if outermost and self.hide == "changes":
                with suppress(Exception):  # what cannot be copied is not hidden
                    args, kwargs = deepcopy((args, kwargs))
            self.depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self.depth -= 1
            self.calls += outermost
            if outermost and self.hide == "value":
                return exchange_value(result)
            return Hidden() if outermost and self.hide == "result" else result

        return watched


HIDDEN = ("result", "changes", "value")


def exchange_value(value: Any) -> Any:
    """Another value of the same builtin type; the value itself if it is of another type."""
    kind = type(value)
    if kind is bool:
        return not value
    if kind is int or kind is float:
        return value + 1
    if kind is str:
        return f"{value}?"
    if kind is list or kind is tuple:
        return kind(map(exchange_value, value)) if value else kind([None])
    if kind is dict:
        return {key: exchange_value(item) for key, item in value.items()} or {None: None}
    return {None, *value} if kind is set else value


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


class ProgramPeer(Peer):
    """The program's objects; what the test changes around a question is changed here, too."""

    def _perform(self, operation: str, target: Any, rest: list[Any]) -> Any:
        if operation != "amid":
            return super()._perform(operation, target, rest)
        operation, subject, *arguments = rest
        with make_changes(target):
            return super()._perform(operation, subject, arguments)


class CandidateProgram:
    """The candidate's module and its entry point. ``source``, ``entry_point`` and ``watch`` as in ``Execution``.

    ``ask(peer, operation, arguments)`` puts a question to the test. Compiles the program and runs nothing of it before
    :meth:`load`.
    """

    def __init__(self, ask: Callable[..., Any], source: str, entry_point: str, watch: str) -> None:
        self.ask, self.entry_point, self.watch = ask, entry_point, watch
        self.code: CodeType = compile(
            begin_watch(source, watch) if watch else source, "<program>", "exec", dont_inherit=True
        )

    def load(self, hide: str = "") -> Any:
        """Run the program from its beginning; return the encoding of its entry point."""
        function, self.tracer = self._load(hide)
        self.peer = ProgramPeer(
            self._ask_test, list_powers, lambda *_: None, library=find_in_library, caught=BaseException
        )
        self.peer.named_tuples = ChainMap({}, vars(sys.modules[MODULE]))
        return self.peer.export(function)

    def _ask_test(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        return self.ask(self.peer, operation, arguments)

    def _load(self, hide: str) -> tuple[Any, Watch]:
        """Run the program from its beginning; return the entry point and the watch on the watched function."""
        tracer = Watch(hide)
        module = ModuleType(MODULE)
        sys.modules[MODULE] = module  # dataclasses look up their module
        seed_generators()
        module.__dict__["__builtins__"] = builtins

        def begin() -> None:
            del module.__dict__["__watch__"]
            watched = module.__dict__.get(self.watch)
            if callable(watched):
                module.__dict__[self.watch] = tracer(watched)

        module.__dict__["__watch__"] = begin
        exec(self.code, module.__dict__)  # the one purpose of this process
        return module.__dict__[self.entry_point], tracer

    def answer(self, operation: str, *question: Any) -> list[Any]:
        """``[status, value, changes, calls of the watched function]``."""
        tracer = self.tracer
        tracer.calls, tracer.running, tracer.depth = 0, True, 0
        try:
            return [*self.peer.serve(operation, *question), tracer.calls]
        finally:
            tracer.running = False

    def is_result_used(self, transcript: list[Any]) -> bool:
        """Whether an answer of a transcript changes when what the watched function does is hidden."""
        for hide in HIDDEN:
            self.load(hide)
            for operation, question, answer in transcript:
                if strip_addresses(self.answer(operation, *question)[:3]) != strip_addresses(answer[:3]):
                    return True
        return False

    def run_test(self, code: str) -> list[Any]:
        """Run test code in this process: ``[status, [used, case, ...], [], calls of the watched function]``."""
        cases, tracer = self._judge(code, "")
        used = tracer.calls > 0 and any(self._judge(code, hide)[0] != cases for hide in HIDDEN)
        return ["ok", [used, *cases], [], tracer.calls]

    def _judge(self, code: str, hide: str) -> tuple[list[list[str]], Watch]:
        function, tracer = self._load(hide)
        tracer.running = True
        names = dict(vars(sys.modules[MODULE]))
        return recorder.run_test_code(base64.b64decode(code), self.entry_point, Local(function), names), tracer


def begin_watch(source: str, watch: str) -> ast.Module:
    """The program's tree, with a call of ``__watch__`` behind the last top-level statement that binds ``watch``.

    A function that is bound to the name later, by other means, is another one and is not watched.
    """
    tree = ast.parse(source, "<program>")
    for i in reversed(range(len(tree.body))):
        if watch in list_bound_names(tree.body[i]):
            tree.body[i + 1 : i + 1] = ast.parse("__watch__()").body
            break
    return tree


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


def strip_addresses(answer: list[Any]) -> str:
    """An answer without the addresses in its texts, so that equal calls have equal answers."""
    return ADDRESS.sub("", json.dumps(answer))


class Local(recorder.Callee):
    """The candidate, for a test that runs in the same process."""

    def __init__(self, function: Any) -> None:
        super().__init__()

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                value = function(*args, **kwargs)
            except Exception as error:
                self.raised = error, *_summarize(error)
                raise
            self.note_value(value)
            return value

        self.entry = function if isinstance(function, type) else call
        if isinstance(function, FunctionType):
            update_wrapper(call, function).__dict__ = vars(function)


def _summarize(error: BaseException) -> tuple[str, str]:
    """Status and message of an exception."""
    status, (known, _, text, _) = describe_error(error)
    return status, recorder.describe_exception(known, text)


class Server:
    """Answers the tester's questions over ``channel``, and asks it questions while it waits for an answer."""

    def __init__(self, channel: socket) -> None:
        self.channel = channel
        self.reader = wire.FrameReader(channel, 1 << 40)
        self.program: CandidateProgram | None = None
        self.turn = RLock()  # threads of the program ask one after another: answers do not say whose they are

    def serve_calls(self) -> None:
        """Report that the process is confined, then answer the tester's requests until it hangs up."""
        wire.send_message(self.channel, HELLO)
        while True:
            try:
                self.answer_question(self.reader.read_message(lambda: None))
            except wire.Closed:
                return

    def answer_question(self, question: list[Any]) -> None:
        index, verb, *rest = question
        try:
            reply = self.answer_verb(verb, *rest)
        except BaseException as error:  # noqa: BLE001 - a program that does not load says why
            reply = [*describe_error(error), [], 0]
        wire.send_message(self.channel, [index, *reply])

    def answer_verb(self, verb: str, *rest: Any) -> list[Any]:
        """``[status, value, changes, calls of the watched function]``."""
        if verb == "load":
            self.program = CandidateProgram(self.ask_test, *rest)
            wire.send_message(self.channel, COMPILED)
            return ["ok", self.program.load(), [], 0]
        assert self.program
        match verb:
            case "beside":
                return self.program.run_test(*rest)
            case "forget":
                return self.forget_program()
            case "replay":
                return ["ok", self.program.is_result_used(*rest), [], 0]
        return self.program.answer(verb, *rest)

    def forget_program(self) -> list[Any]:
        """Destroy the program and all it holds, at its own expense: CPython may overflow its stack over it."""
        self.program = None
        del sys.modules[MODULE]
        gc.collect()
        return ["ok", None, [], 0]

    def ask_test(self, peer: Peer, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Ask the tester to do something to an object of the test."""
        with self.turn:
            wire.send_message(self.channel, ["ask", operation, *peer.write_question(arguments)])
            while True:
                message = self.reader.read_message(lambda: None)
                if message[0] == "answer":
                    _, status, value, changes = message
                    try:
                        return peer.read_answer(status, value, changes)
                    except Answered as answered:
                        raise answered.args[0] from None
                self.answer_question(message)
