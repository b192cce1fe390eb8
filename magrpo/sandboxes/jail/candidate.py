"""Runs a candidate's code and answers calls with claimed outputs, none of which can be trusted.

This runs in the same process as foreign code, so it protects nothing; it only has to serve honest programs well.
"""

import ast
import base64
import builtins
import gc
import inspect
import json
import operator
import re
import sys
from contextlib import suppress
from copy import deepcopy
from functools import update_wrapper
from socket import socket
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import recorder, wire
from .exceptions import encode_details, encode_exception
from .seeds import seed_generators
from .stand_ins import OPERATIONS, make_special_methods
from .surroundings import make_changes
from .values import MAX_NODES, Decoder, Encoder

MODULE = "candidate"
ADDRESS = re.compile(r"\b0x[0-9a-f]+")
HELLO = "confined"  # first message, sent before any foreign code exists that could forge it
COMPILED = "compiled"  # sent before any of the program runs


class Watch:
    """Wraps the watched function: counts its outermost calls that return, and can ``hide`` their effects.

    The function itself still runs. ``hide`` is one of :data:`HIDDEN`: ``result`` replaces its result by an object on
    which every operation raises, ``value`` by another value of the same type; ``changes`` undoes changes of arguments.
    """

    def __init__(self, hide: str = "") -> None:
        self.calls = self.depth = 0
        self.hide, self.running = hide, False

    def __call__(self, function: Any, names: dict[str, Any], name: str) -> Any:
        """Wrap ``function``, which ``names[name]`` is to hold. It calls itself unwrapped, so as deeply as in Python."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            outermost = self.running and self.depth == 0
            if outermost and self.hide == "changes":
                with suppress(Exception):  # if an argument cannot be copied, changes of it are not hidden
                    args, kwargs = deepcopy((args, kwargs))
            is_bound = names.get(name) is watched
            if is_bound:
                names[name] = function
            self.depth += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self.depth -= 1
                if is_bound and names.get(name) is function:
                    names[name] = watched
            self.calls += outermost
            if outermost and self.hide == "value":
                return exchange_value(result)
            return Hidden() if outermost and self.hide == "result" else result

        if not isinstance(function, type):
            update_wrapper(watched, function)
            for attribute in ("cache_clear", "cache_info", "cache_parameters"):  # of functools.cache
                if hasattr(function, attribute):
                    setattr(watched, attribute, getattr(function, attribute))
        return watched


HIDDEN = ("result", "changes", "value")


def exchange_value(value: Any) -> Any:
    """Return another value of the same builtin type; a value of any other type is returned itself."""
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
    """Raised when the program uses a hidden result."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise HiddenResultUsed


Hidden = type("Hidden", (), make_special_methods(OPERATIONS, _refuse))
"""A value on which every operation raises."""


class CandidateProgram:
    """The candidate's module and its entry point. ``source``, ``entry_point`` and ``watch`` as in ``Execution``.

    Compiles the program and runs nothing of it before :meth:`load`.
    """

    def __init__(self, source: str, entry_point: str, watch: str) -> None:
        self.entry_point, self.watch = entry_point, watch
        self.code: CodeType = compile(
            begin_watch(source, watch) if watch else source, "<program>", "exec", dont_inherit=True
        )

    def load(self, hide: str = "") -> bool:
        """Run the program from its beginning; return whether its entry point is a class."""
        self.function, self.tracer = self._load(hide)
        return isinstance(self.function, type)

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
                module.__dict__[self.watch] = tracer(watched, module.__dict__, self.watch)

        module.__dict__["__watch__"] = begin
        exec(self.code, module.__dict__)  # running foreign code is the purpose of this process
        return module.__dict__[self.entry_point], tracer

    def answer_call(self, question: Any) -> list[Any]:
        """Call the entry point: ``[status, value, changes, calls of the watched function]``.

        ``question``: encoded changes of the surroundings, arguments and keyword arguments. ``changes``: number and new
        content of each mutable container among the arguments whose content the call has changed.
        """
        decoder = Decoder()
        surroundings, args, kwargs = decoder.decode(question)
        contents = list(map(copy_content, decoder.containers))
        encoder = Encoder(decoder.containers, names_opaque=True)
        tracer = self.tracer
        tracer.calls, tracer.running, tracer.depth = 0, True, 0
        try:
            make_changes(surroundings)
            value = self.function(*args, **dict(kwargs))
        except BaseException as error:  # noqa: BLE001 - whatever a program raises is its answer
            status, answer = encode_exception(error)
            answer[3] = encode_details(error, encoder)
        else:
            status = "ok"
            answer = encoder.encode(value)
        finally:
            tracer.running = False
        encoder.budget = MAX_NODES  # the changed arguments get a budget of their own
        changes = [
            [number, encoder.encode_content(container)]
            for number, (container, content) in enumerate(zip(decoder.containers, contents, strict=True))
            if has_changed(container, content)
        ]
        return [status, answer, changes, tracer.calls]

    def is_result_used(self, transcript: list[Any]) -> bool:
        """Whether an answer of a transcript changes when the effects of the watched function are hidden."""
        for hide in HIDDEN:
            self.load(hide)
            for question, answer in transcript:
                if strip_addresses(self.answer_call(question)[:3]) != strip_addresses(answer[:3]):
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
    """Return the program's tree with a call of ``__watch__`` after the last top-level statement that binds ``watch``.

    A function that is bound to the name later, by other means, is a different one and is not watched.
    """
    tree = ast.parse(source, "<program>")
    for i in reversed(range(len(tree.body))):
        if watch in list_bound_names(tree.body[i]):
            tree.body[i + 1 : i + 1] = ast.parse("__watch__()").body
            break
    return tree


def list_bound_names(statement: ast.stmt) -> set[str]:
    """List the names that a top-level statement defines, imports or assigns to."""
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


def copy_content(container: Any) -> Any:
    """Copy the items of a mutable container, for comparison by :func:`has_changed`."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return bytes(container) if isinstance(container, bytearray) else list(container)


def has_changed(container: Any, content: Any) -> bool:
    """Whether a container holds other objects than before; containers inside it are compared separately."""
    now = copy_content(container)
    if isinstance(now, bytes):
        return bool(now != content)
    return len(now) != len(content) or not all(map(operator.is_, now, content))


def strip_addresses(answer: list[Any]) -> str:
    """Return an answer without the addresses in its texts, so that equal calls have equal answers."""
    return ADDRESS.sub("", json.dumps(answer))


class Local(recorder.Callee):
    """The candidate, for a test that runs in its process."""

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

        if isinstance(function, FunctionType):
            if not vars(function).keys() & {"__signature__", "__wrapped__"}:
                function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # for the test
            update_wrapper(call, function).__dict__ = vars(function)
            self.entry = call
        else:  # a class, or an object that the test may use in ways other than calls, which go unnoticed
            self.entry, self.has_answered = function, True


def _summarize(error: BaseException) -> tuple[str, str]:
    """Return status and message of an exception."""
    status, (known, _, text, _) = encode_exception(error)
    return status, recorder.describe_exception(known, text)


class CandidateServer:
    """Answers the tester's questions over ``channel``."""

    def __init__(self, channel: socket) -> None:
        self.channel = channel
        self.reader = wire.FrameReader(channel, 1 << 40)
        self.program: CandidateProgram | None = None

    def serve_calls(self) -> None:
        """Report that the process is confined, then answer the tester's requests until it hangs up."""
        wire.send_message(self.channel, HELLO)
        while True:
            try:
                index, verb, *rest = self.reader.read_message(lambda: None)
            except wire.Closed:
                return
            try:
                reply = self.answer_verb(verb, *rest)
            except BaseException as error:  # noqa: BLE001 - a program that does not load says why
                reply = [*encode_exception(error), [], 0]
            wire.send_message(self.channel, [index, *reply])

    def answer_verb(self, verb: str, *rest: Any) -> list[Any]:
        """Carry out a request: ``[status, value, changes, calls of the watched function]``."""
        if verb == "load":
            self.program = CandidateProgram(*rest)
            wire.send_message(self.channel, COMPILED)
            return ["ok", self.program.load(), [], 0]
        assert self.program
        match verb:
            case "call":
                return self.program.answer_call(*rest)
            case "beside":
                return self.program.run_test(*rest)
            case "replay":
                return ["ok", self.program.is_result_used(*rest), [], 0]
        assert verb == "forget"
        return self.forget_program()

    def forget_program(self) -> list[Any]:
        """Destroy the program and all it holds here, in its own process, because CPython may overflow its stack."""
        self.program = None
        del sys.modules[MODULE]
        gc.collect()
        return ["ok", None, [], 0]
