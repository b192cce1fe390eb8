"""Objects that are no data: each side keeps its own and knows those of the other side by handles.

An operator, call or attribute of a handle is asked of the process that has the object, under the same deadlines as any
other call; the answer is data or another handle. So a handle answers only for itself, and the program could have
returned each of its answers as data. What would make the object the judge of a value of the test is therefore not asked
but decided here: ``==``, order, arithmetic and ``in`` between a handle and data. Such an operator sees the data that a
subclass of a builtin type holds, and nothing of any other object.

The test's own functions, iterators, files and objects reach the program in the same way. There, only what
:func:`list_powers` names can be asked, so that a function gives away neither its code nor its globals.
"""

import builtins
import copy
import io
import itertools
import math
import operator
import re
import sys
import types
from array import array
from collections import Counter, deque
from collections.abc import Callable, MutableMapping
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

from . import values
from .recorder import name_builtin_class
from .wire import TooLarge, WireError

MAX_OBJECTS = 100_000
MAX_SHARED, MAX_SHARED_VALUES = 64, 50_000
"""Containers, and values in them, that both sides know; beyond, changes between calls are lost."""
MAX_TEXT = 1000  # of an exception
BATCH = 256
"""Items fetched at once from an iterator that has given as many already."""
ASYNC = ("await", "aiter", "anext", "aenter", "aexit")
READING = ("iter", "next", "len", "getitem", "reversed", "call", "enter", "exit", *ASYNC)
WRITING = ("setitem", "delitem")
ORDER = ("eq", "lt", "le", "gt", "ge")
ARITHMETIC = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or", "xor"
)  # fmt: skip
UNARY = ("bool", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "neg", "pos", "abs", "invert")
REFLECTED = tuple(f"r{power}" for power in ARITHMETIC)
POWERS = frozenset((*READING, *WRITING, *ORDER, *ARITHMETIC, *REFLECTED, *UNARY, "hash"))
"""What an object may be able to do, by the name of its special method without underscores."""
_EMPTY: dict[Any, Any] = {}
_ITERABLES: tuple[Any, ...] = ([], (), set(), _EMPTY, _EMPTY.values(), _EMPTY.items(), range(0), "", b"")
VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_KNOWN: dict[str, type] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *[item for item in vars(builtins).values() if isinstance(item, type)],
        *[item for item in vars(types).values() if isinstance(item, type)],
        *[item for item in vars(itertools).values() if isinstance(item, type)],
        *[type(iter(item)) for item in _ITERABLES],
        *VIEWS,
        io.StringIO, io.BytesIO, io.TextIOWrapper, re.Pattern, re.Match,
    )
}  # fmt: skip
"""Classes that a handle may say it is an instance of: those that both sides have."""
_NAME = re.compile(r"[^\W\d]\w{0,99}", re.ASCII)


class Peer:
    """This side's objects, by number, and its handles of the other side's objects.

    ``ask(operation, arguments)`` puts a question to the other side and returns its answer; ``grant(value)`` lists what
    the other side may do to an object, or raises NotPlain; ``check(value, operation, arguments)`` raises TypeError for
    the rest; ``library(module, name)`` finds what the other side names, and ``find_name(value)`` names what that side
    can find; ``caught``: exceptions that are answers.
    """

    def __init__(
        self,
        ask: Callable[[str, tuple[Any, ...]], Any],
        grant: Callable[[Any], list[str]],
        check: Callable[[Any, str, list[Any]], None],
        library: Callable[[str, str], Any] = values.find_builtin,
        find_name: Callable[[Any], tuple[str, str] | None] = values.find_builtin_name,
        caught: type[BaseException] = Exception,
    ) -> None:
        self._ask, self.grant, self.check, self.library, self.caught = ask, grant, check, library, caught
        self.find_name = find_name
        self.sent_names: set[tuple[str, str]] = set()
        self.received_names: dict[int, tuple[str, str]] = {}
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.handles: dict[int, Handle] = {}
        self.shared: list[Any] = []
        """Mutable containers that both sides know, in the order in which they crossed."""
        self.contents: list[Any] = []
        """What each of them held when a message crossed last."""
        self.depth = 0
        """Number of messages of the other side that are being read or answered."""
        self.data: dict[int, Any] = {}
        self.named_tuples: MutableMapping[str, Any] = {}
        self.failed: dict[int, Exception] = {}
        """What ended an iterator that had given other items in the same answer, by its address."""
        self.is_quiet = False
        """While it is set, handles describe themselves without asking."""

    def fetch_data(self, handle: "Handle") -> Any:
        """The data that an object of the other side holds: the same until something else is asked."""
        number = object.__getattribute__(handle, "_id")
        if number not in self.data:
            self.data[number] = _ask(handle, "data")
        return self.data[number]

    def ask(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Put a question about an object of the other side."""
        if operation != "data":
            self.data.clear()
        return self._ask(operation, arguments)

    def export(self, value: Any) -> list[Any]:
        """The encoding of an object that is no data; NotPlain if the other side may not have it."""
        if isinstance(value, Handle):
            if object.__getattribute__(value, "_peer") is not self:
                raise values.NotPlain("an object of a process that has ended")
            return ["H", object.__getattribute__(value, "_id")]
        number = self.numbers.get(id(value))
        if number is not None:
            return ["h", number]
        powers = self.grant(value)
        if len(self.objects) >= MAX_OBJECTS:
            raise TooLarge("too many objects")
        self.numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        described = _describe_class(type(value))
        return ["h", len(self.objects) - 1, described.name, described.known, powers, described.holds_data]

    def find_own(self, number: Any) -> Any:
        """The object of this side that the other sent back."""
        if type(number) is not int or not 0 <= number < len(self.objects):
            raise WireError("no such object")
        return self.objects[number]

    def import_handle(self, number: Any, *description: Any) -> Any:
        """The handle of an object of the other side; the same one each time."""
        if type(number) is not int:
            raise WireError("malformed handle")
        if not description:
            return self.handles[number]
        name, known, powers, holds_data = description
        if number in self.handles or len(self.handles) >= MAX_OBJECTS:
            raise WireError("malformed handle")
        if not _NAME.fullmatch(name):
            name = "object"
        kind = make_handle_class(name, known, POWERS.intersection(powers), holds_data is True)
        self.handles[number] = kind(self, number)
        return self.handles[number]

    def _find_name(self, value: Any) -> tuple[str, str] | None:
        """As ``find_name``, or the name under which the other side has sent the value."""
        path = self.find_name(value) or self.received_names.get(id(value))
        if path:
            self.sent_names.add(path)
        return path

    def _find_named(self, module: str, name: str) -> Any:
        """As ``library``, or what this side has sent by that name."""
        find = values.find_in_library if (module, name) in self.sent_names else self.library
        found = find(module, name)
        self.received_names[id(found)] = module, name
        return found

    # --------------------------------------------------------------------------------------------------- messages
    def write_question(self, arguments: tuple[Any, ...]) -> list[Any]:
        """``[data, changes, forget]``: the arguments of an operation, and what has changed in shared containers.

        ``forget``: the containers that both sides know so far are shared no more.
        """
        forget = self.depth == 0 and not self._is_sharing()
        if forget:
            self._forget()
        return [*self._write(lambda encoder: encoder.encode(arguments)), forget]

    def serve(self, operation: str, data: Any, changes: Any, forget: Any) -> list[Any]:
        """``[status, value, changes]``: do to an object of this side what the other side asks.

        Raises WireError if the question is malformed, and passes on exceptions that are not ``caught``.
        """
        if forget is True:
            self._forget()
        arguments = self._read(lambda decoder: decoder.decode(data), changes)
        self.depth += 1
        try:
            target, *rest = arguments
            self.check(target, operation, rest)
            result = self._perform(operation, target, rest)
            return ["ok", *self._write(lambda encoder: encoder.encode(result))]
        except self.caught as error:
            status, described = describe_error(error)
            try:
                return [status, *self._write(partial(_encode_details, error, described))]
            except WireError:
                return [status, *self._write(lambda _: described)]
        finally:
            self.depth -= 1

    def read_answer(self, status: str, value: Any, changes: Any) -> Any:
        """The value of an answer; raises the exception that it reports.

        Raises:
            WireError: it is malformed.
        """
        if status == "ok":
            return self._read(lambda decoder: decoder.decode(value), changes)
        raise Answered(self._read(lambda decoder: self._build_error(decoder, value), changes))

    def _write(self, encode: Callable[[values.Encoder], Any]) -> list[Any]:
        """A value, and number and new content of each shared container whose content is another one now."""
        known, exported = len(self.contents), len(self.objects)
        encoder = values.Encoder(self.shared, self.export, self._find_name)
        try:
            value = encode(encoder)
            encoder.budget = values.MAX_NODES  # as much again
            changed = [number for number in range(known) if _differs(self.shared[number], self.contents[number])]
            changes = [[number, encoder.encode_content(self.shared[number])] for number in changed]
        except BaseException:
            del self.shared[known:]
            for unsent in self.objects[exported:]:
                del self.numbers[id(unsent)]
            del self.objects[exported:]
            raise
        self._note_contents(changed)
        return [value, changes]

    def _read(self, decode: Callable[[values.Decoder], Any], changes: Any) -> Any:
        """The value that :meth:`_write` wrote, after its changes are made; WireError if it is malformed."""
        decoder = values.Decoder(self.shared, self.find_own, self.import_handle, self._find_named, self.named_tuples)
        self.depth += 1  # keys are hashed, by their own process if they are handles
        try:
            value = decode(decoder)
            for number, content in changes:
                decoder.decode_content(content, self.shared[values.read_index(number)])
        except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            raise WireError(f"malformed message: {type(error).__name__}") from None
        finally:
            self.depth -= 1
        self._note_contents([number for number, _ in changes])
        return value

    def _note_contents(self, changed: list[int]) -> None:
        """Remember what new and changed containers hold."""
        for number in changed:
            self.contents[number] = _copy_content(self.shared[number])
        self.contents += map(_copy_content, self.shared[len(self.contents) :])

    def _is_sharing(self) -> bool:
        """Whether anybody on this side still has a container that both sides know, and they are not too many."""
        if not self.shared or len(self.shared) > MAX_SHARED or sum(map(len, self.contents)) > MAX_SHARED_VALUES:
            return False
        inside = Counter(map(id, chain.from_iterable(self.contents)))  # as often in the containers themselves
        counts = map(sys.getrefcount, self.shared)  # with the list's own and the call's
        return any(count > 2 + 2 * inside[id(item)] for item, count in zip(self.shared, counts, strict=True))

    def _forget(self) -> None:
        self.shared.clear()
        self.contents.clear()

    def _build_error(self, decoder: values.Decoder, value: Any) -> BaseException:
        """An exception of the nearest builtin class, with the name, text and attributes of the original."""
        known, name, text, details = value
        path, arguments, attributes, cause = details or (None, None, None, None)
        kind = _find_exception(known, path)
        if type(text) is not str or type(name) is not str:
            raise WireError("malformed exception")
        given = (text,) if arguments is None else decoder.decode(arguments)
        own = name if _NAME.fullmatch(name) else known
        error = _make_error(kind, given)
        if own != kind.__name__ or str(error) != text:
            error = _make_error(type(own, (kind,), {"__str__": lambda _: text}), given)
        if attributes is not None:
            error.__dict__.update(decoder.decode(attributes))
        error.__cause__ = None if cause is None else self._build_error(decoder, cause)
        return error

    def _perform(self, operation: str, target: Any, rest: list[Any]) -> Any:
        match operation:
            case "getattr" | "setattr" | "delattr":
                return getattr(builtins, operation)(target, *rest)
            case "call":
                args, kwargs = rest
                return target(*args, **dict(kwargs))
            case "take":
                return self._take(target, *rest)
        return _OPERATIONS[operation](target, *rest)

    def _take(self, iterator: Any, count: int) -> tuple[Any, ...]:
        """Up to ``count`` items, at least one; raises what ends the iterator."""
        if id(iterator) in self.failed:
            raise self.failed.pop(id(iterator))
        items = [next(iterator)]
        try:
            while len(items) < count:
                items.append(next(iterator))
        except Exception as error:  # noqa: BLE001 - for the next question
            self.failed[id(iterator)] = error
        return tuple(items)


class Answered(Exception):
    """The other side answered with an exception, ``args[0]``."""


def describe_error(error: BaseException) -> tuple[str, list[Any]]:
    """Status and ``[builtin class, own class, text, details]`` of an exception; :func:`_encode_details` adds these."""
    if isinstance(error, TooLarge):
        return "output_limit", ["Exception", "", str(error), None]
    status = "memory" if isinstance(error, MemoryError) else "exception"
    known = name_builtin_class(error)
    try:
        text = str(error)[:MAX_TEXT]
    except BaseException:  # noqa: BLE001 - its __str__ may raise
        text = ""
    return status, [known, type(error).__name__, text, None]


def _encode_details(error: BaseException, described: list[Any], encoder: values.Encoder) -> list[Any]:
    """A description with ``[class of the library, arguments, attributes, cause]``; WireError if these are no values."""
    cause, arguments = error.__cause__, error.args
    if isinstance(error, OSError) and error.filename is not None:
        arguments = (*arguments[:2], error.filename)
    details = [_name_library_class(error), encoder.encode(arguments), encoder.encode(dict(vars(error))), None]
    if cause is not None and cause.__cause__ is None:
        details[3] = _encode_details(cause, describe_error(cause)[1], encoder)
    return [*described[:3], details]


def _copy_content(container: Any) -> Any:
    """The items of a mutable container, to be compared by :func:`_differs`."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return bytes(container) if isinstance(container, (bytearray, array)) else list(container)


def _differs(container: Any, content: Any) -> bool:
    """Whether a container holds other objects than it did. What its own containers hold is their affair."""
    now = _copy_content(container)
    if isinstance(now, bytes):
        return bool(now != content)
    return len(now) != len(content) or not all(map(operator.is_, now, content))


def _name_library_class(error: BaseException) -> list[str]:
    """Module and name of the nearest class of the standard library."""
    kinds = (base for base in type(error).__mro__ if base.__module__.partition(".")[0] in sys.stdlib_module_names)
    kind = next(kinds)
    return [kind.__module__, kind.__qualname__]


def _find_exception(known: Any, path: Any) -> type[BaseException]:
    """The class of the standard library, if it is loaded here, else the builtin class. WireError: there is none."""
    if path is not None:
        module, name = path
        found = vars(sys.modules.get(module, builtins)).get(name)
        if module.partition(".")[0] in sys.stdlib_module_names and isinstance(found, type) and _is_exception(found):
            return found
    kind = values.find_builtin("builtins", known)
    if not _is_exception(kind):
        raise WireError("not an exception")
    return kind  # type: ignore[no-any-return]


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _make_error(kind: type[BaseException], arguments: Any) -> BaseException:
    try:
        error = kind(*arguments)
    except (TypeError, ValueError, AttributeError):
        error = kind.__new__(kind)
        error.args = tuple(arguments)
    return error


def list_powers(value: Any) -> list[str]:
    """What an object of a program can do: all that its class defines."""
    return _describe_class(type(value)).powers


class _Description(NamedTuple):
    """A class's name, nearest base that both sides have, whether its instances hold data, and what they can do."""

    kind: type
    name: str
    known: str
    holds_data: bool
    powers: list[str]


_DESCRIBED: dict[int, _Description] = {}


def _describe_class(kind: type) -> _Description:
    """By address: a metaclass may forbid to hash its classes."""
    found = _DESCRIBED.get(id(kind))
    if found is None:
        names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
        known = next(name for name in names if name in _KNOWN)
        found = _Description(kind, kind.__name__, known, values.holds_data(kind), _find_powers(kind))
        _DESCRIBED[id(kind)] = found
    return found


def _find_powers(kind: type) -> list[str]:
    plain = vars(object)
    found = []
    for power in POWERS:
        method = next((vars(base)[f"__{power}__"] for base in kind.__mro__ if f"__{power}__" in vars(base)), None)
        if method is not None and method is not plain.get(f"__{power}__"):
            found.append(power)
    return sorted(found)


# ---------------------------------------------------------------------------------------------------------- handles
class Handle:
    """An object of the other side. ``_informed``: it comes from an operator that has seen a value of this side."""

    __slots__ = ("__weakref__", "_fetched", "_given", "_id", "_informed", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_id", number)
        object.__setattr__(self, "_informed", False)
        object.__setattr__(self, "_fetched", deque())
        object.__setattr__(self, "_given", 0)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __repr__(self) -> str:
        return self._describe("repr")

    def __str__(self) -> str:
        return self._describe("str")

    def _describe(self, operation: str) -> str:
        peer = object.__getattribute__(self, "_peer")
        text = f"<{type(self).__qualname__} object>" if peer.is_quiet else _ask(self, operation)
        if type(text) is not str:
            raise TypeError(f"__{operation}__ returned no text")
        return text

    def __format__(self, specification: str) -> str:
        return str(_ask(self, "format", specification))

    def __dir__(self) -> Any:
        return _ask(self, "dir")

    def __copy__(self) -> Any:
        return _ask(self, "copy")

    def __deepcopy__(self, _: Any) -> Any:
        return _ask(self, "deepcopy")

    def __instancecheck__(self, instance: Any) -> Any:
        return _ask(self, "instancecheck", instance)

    def __subclasscheck__(self, subclass: Any) -> Any:
        return _ask(self, "subclasscheck", subclass)

    def __eq__(self, other: object) -> Any:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)


def _ask(handle: Handle, operation: str, *arguments: Any) -> Any:
    answer = object.__getattribute__(handle, "_peer").ask(operation, (handle, *arguments))
    if object.__getattribute__(handle, "_informed") and operation not in ORDER:
        _inform(answer)
    return answer


def _inform(answer: Any) -> None:
    """Let no data come out of an object that has seen a value of this side."""
    if not isinstance(answer, Handle):
        raise TypeError("an object that has seen a value of the test cannot judge it")
    object.__setattr__(answer, "_informed", True)


@lru_cache(maxsize=1024)
@cache
def make_handle_class(name: str, known: str, powers: frozenset[str], holds_data: bool) -> type[Handle]:
    """The class of handles of objects with certain powers, of the class ``known`` as far as anybody can see."""
    methods: dict[str, Any] = {f"__{power}__": _SPECIAL.get(power) or _ask_for(power) for power in powers}
    for power in (*ORDER, *ARITHMETIC):
        if power in powers or (holds_data and power in ORDER):
            methods[f"__{power}__"] = _make_binary(power, power in powers, holds_data)
        if f"r{power}" in powers:
            methods[f"__r{power}__"] = _make_binary(power, False, holds_data, swapped=True)
    if "eq" in methods and "hash" not in methods:
        methods["__hash__"] = _ask_for("hash") if holds_data else None
    if "await" in powers:
        methods |= {"send": _send, "throw": _raise, "close": lambda self: None}
    kind = _KNOWN[known]
    methods |= {"__slots__": (), "__qualname__": kind.__name__}
    if kind is not object:
        methods["__class__"] = property(lambda self: kind)
    methods |= {name: property(partial(_ask_attribute, name=name)) for name in ("__doc__", "__module__")}
    return type(name, (Handle,), methods)


def _ask_for(power: str) -> Callable[..., Any]:
    return lambda self, *arguments: _ask(self, power, *arguments)


def _make_binary(power: str, is_defined: bool, holds_data: bool, swapped: bool = False) -> Callable[..., Any]:
    """An operator between two values: asked of the other side between two of its objects, else applied to data."""
    operate = _OPERATIONS[power]

    def apply(self: Any, other: Any) -> Any:
        if isinstance(other, Handle) and not swapped:
            if is_defined or power != "eq":
                return _ask(self, power, other)
            return self is other
        if power in ARITHMETIC and not holds_data and not isinstance(other, Handle):
            answer = _ask(self, f"r{power}" if swapped else power, other)
            _inform(answer)
            return answer
        if not holds_data or isinstance(other, Handle):
            return NotImplemented
        data = object.__getattribute__(self, "_peer").fetch_data(self)
        if isinstance(data, Handle):
            return NotImplemented
        return operate(other, data) if swapped else operate(data, other)

    return apply


def _ask_attribute(self: Any, name: str) -> Any:
    return _ask(self, "getattr", name)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _ask(self, "call", args, tuple(kwargs.items()))


def _next(self: Any) -> Any:
    """The next item; after the first few, as many more at once as there have been."""
    fetched, given = object.__getattribute__(self, "_fetched"), object.__getattribute__(self, "_given")
    if not fetched:
        fetched.extend(_ask(self, "take", min(given, BATCH) if given > 3 else 1))
    object.__setattr__(self, "_given", given + 1)
    return fetched.popleft()


def _round(self: Any, digits: Any = None) -> Any:
    return _ask(self, "round", digits)


def _await(self: Any) -> Any:
    return _ask(self, "await")
    yield


def _bool(self: Any) -> bool:
    return _ask(self, "bool") is True


def _send(self: Any, _: Any) -> Any:
    raise StopIteration(_ask(self, "await"))


def _raise(self: Any, error: BaseException, *_: Any) -> Any:
    raise error


def _exit(self: Any, *arguments: Any) -> Any:
    return _ask(self, "exit", *arguments[:2], None)


async def _anext(self: Any) -> Any:
    return _ask(self, "anext")


async def _aenter(self: Any) -> Any:
    return _ask(self, "aenter")


async def _aexit(self: Any, *arguments: Any) -> Any:
    return _ask(self, "aexit", *arguments[:2], None)


_SPECIAL: dict[str, Any] = {
    "call": _call, "next": _next, "round": _round, "await": _await, "bool": _bool, "anext": _anext, "exit": _exit,
    "aenter": _aenter, "aexit": _aexit,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- operations
def _run_awaitable(awaitable: Any) -> Any:
    import asyncio  # slow to import; few programs need it

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def _swap(power: str) -> Callable[[Any, Any], Any]:
    return lambda right, left: _OPERATIONS[power](left, right)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{power: getattr(operator, power) for power in ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul")},
    **{power: getattr(operator, power) for power in ("truediv", "floordiv", "mod", "pow", "lshift", "rshift", "xor")},
    **{power: getattr(operator, power) for power in ("neg", "pos", "abs", "invert", "index")},
    **{power: getattr(operator, power) for power in ("getitem", "setitem", "delitem")},
    **{power: getattr(builtins, power) for power in ("bool", "int", "float", "complex", "round", "divmod", "hash")},
    **{power: getattr(builtins, power) for power in ("len", "iter", "reversed", "repr", "str", "format", "dir")},
    **{power: getattr(math, power) for power in ("trunc", "floor", "ceil")},
    **{f"r{power}": _swap(power) for power in ARITHMETIC},
    "and": operator.and_,
    "or": operator.or_,
    "data": values.take_data,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "instancecheck": lambda kind, value: isinstance(value, kind),
    "subclasscheck": lambda kind, value: issubclass(value, kind),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, *arguments: type(manager).__exit__(manager, *arguments),
    "await": _run_awaitable,
    "aenter": lambda manager: _run_awaitable(type(manager).__aenter__(manager)),
    "aexit": lambda manager, *arguments: _run_awaitable(type(manager).__aexit__(manager, *arguments)),
    "aiter": lambda iterable: iterable.__aiter__(),
    "anext": lambda iterator: _run_awaitable(iterator.__anext__()),
}
