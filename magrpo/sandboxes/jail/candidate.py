"""Runs a candidate's code and answers calls with claimed outputs, none of which can be trusted.

This runs in the same process as foreign code, so it protects nothing; it only has to serve honest programs well.
"""

import ast
import base64
import builtins
import gc
import inspect
import operator
import sys
from functools import update_wrapper
from socket import socket
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import recorder, wire
from .exceptions import encode_details, encode_exception
from .seeds import seed_generators
from .surroundings import make_changes
from .values import MAX_NODES, Decoder, Encoder

MODULE = "candidate"
HELLO = "confined"  # first message, sent before any foreign code exists that could forge it
COMPILED = "compiled"  # sent before any of the program runs


class Watch:
    """Wraps the watched function, and counts its outermost calls that return."""

    def __init__(self) -> None:
        self.calls = self.depth = 0
        self.running = False

    def __call__(self, function: Any, names: dict[str, Any], name: str) -> Any:
        """Wrap ``function``, which ``names[name]`` is to hold. It calls itself unwrapped, so as deeply as in Python."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            outermost = self.running and self.depth == 0
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
            return result

        if not isinstance(function, type):
            update_wrapper(watched, function)
            for attribute in ("cache_clear", "cache_info", "cache_parameters"):  # of functools.cache
                if hasattr(function, attribute):
                    setattr(watched, attribute, getattr(function, attribute))
        return watched


class CandidateProgram:
    """The candidate's module and its entry point. ``source``, ``entry_point`` and ``watch`` as in ``Execution``.

    Compiles the program and runs nothing of it before :meth:`load`.
    """

    def __init__(self, source: str, entry_point: str, watch: str) -> None:
        self.entry_point, self.watch = entry_point, watch
        self.code: CodeType = compile(
            begin_watch(source, watch) if watch else source, "<program>", "exec", dont_inherit=True
        )

    def load(self) -> bool:
        """Run the program from its beginning; return whether its entry point is a class."""
        tracer = self.tracer = Watch()
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
        self.function = module.__dict__[self.entry_point]
        return isinstance(self.function, type)

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

    def run_test(self, code: str) -> list[Any]:
        """Run test code in this process: ``[status, cases, [], calls of the watched function]``."""
        self.tracer.running = True
        names = dict(vars(sys.modules[MODULE]))
        cases = recorder.run_test_code(base64.b64decode(code), self.entry_point, Local(self.function), names)
        return ["ok", cases, [], self.tracer.calls]


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
        assert verb == "forget"
        return self.forget_program()

    def forget_program(self) -> list[Any]:
        """Destroy the program and all it holds here, in its own process, because CPython may overflow its stack."""
        self.program = None
        del sys.modules[MODULE]
        gc.collect()
        return ["ok", None, [], 0]
