"""Values as they cross the border between a candidate and the test code, in either direction.

Values travel as JSON of exact types; an array is always a tag and its payload::

    null, true, false, "text", 12, 1.5            themselves
    ["i", "0x..."]                                an integer beyond 2**53
    ["l" | "t" | "s" | "f", item, ...]            list, tuple, set, frozenset
    ["d" | "O" | "C", key, value, ...]            dict, OrderedDict, Counter
    ["v", factory, key, value, ...]               defaultdict
    ["q", maxlen, item, ...]                      deque
    ["b" | "B", "hex"]                            bytes, bytearray
    ["c", re, im]                                 complex
    ["r" | "slice", start, stop, step]            range, slice
    ["D", "text"], ["F", numerator, denominator]  Decimal, Fraction
    ["date" | "time" | "datetime" | "timedelta", number, ...]
    ["tz", timedelta | "zone"]                    timezone, ZoneInfo
    ["a", typecode, item, ...]                    array
    ["n", name, [field, ...], item, ...]          named tuple
    ["x", class, argument, ...]                   an exception of a builtin class
    ["g", module, name]                           a function or class of the standard library
    ["N" | "S", dtype, [length, ...], "hex"]      numpy array, numpy scalar
    ["&", k]                                      the k-th mutable container of this exchange, again
    ["h", id], ["h", id, ...]                     an object of the sender, see ``peer.py``
    ["H", id]                                     an object of the receiver, sent back

Nothing is unpickled or evaluated. Mutable containers are numbered in the order in which they are met: shared and cyclic
ones stay so, and a call can report what it changed in its arguments.
"""

import builtins
import json
import operator
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, MutableMapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

from .wire import TooLarge, WireError

MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_FRACTION_BITS = 10_000  # a greatest common divisor takes time that grows with the square
SMALL = 2**53


class NotPlain(WireError):
    """A value cannot cross the border."""


def _refuse(value: Any) -> Any:
    raise NotPlain(f"a {_NAME(type(value))} is not plain data")


class Encoder:
    """Encodes the values of one exchange, read through the methods of exact types only: no foreign code runs.

    ``containers``: numbered mutable containers of the exchange so far; ``export(value)`` encodes what is not data;
    ``find_name(value)``: module and name of what the other side knows by name.

    Raises:
        TooLarge: deeper than :data:`MAX_DEPTH` or more than :data:`MAX_NODES` values.
        NotPlain: a value can neither be encoded nor exported.
    """

    def __init__(
        self,
        containers: list[Any] | None = None,
        export: Callable[[Any], Any] = _refuse,
        find_name: Callable[[Any], tuple[str, str] | None] | None = None,
    ) -> None:
        self.containers = [] if containers is None else containers
        self.numbers = {id(item): number for number, item in enumerate(self.containers)}
        self.export, self.find_name = export, find_name or find_builtin_name
        self.budget = MAX_NODES

    def encode(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind in _ATOMS:
            return value
        self.budget -= 1
        if self.budget < 0 or depth > MAX_DEPTH:
            raise TooLarge("the value is too large or too deeply nested")
        if kind is int:
            return value if -SMALL < value < SMALL else ["i", hex(value)]
        if kind in _MUTABLE:
            number = self.numbers.setdefault(id(value), len(self.containers))
            if number < len(self.containers):
                return ["&", number]
            self.containers.append(value)  # and kept alive: its number is its address
            return self.encode_content(value, depth)
        if kind in _WRITERS:
            return _WRITERS[kind](self, value, depth + 1)
        return self._encode_other(value, kind, depth)

    def encode_content(self, container: Any, depth: int = 0) -> list[Any]:
        """A mutable container by its content, though it has been met before."""
        return _WRITERS[type(container)](self, container, depth + 1)  # type: ignore[no-any-return]

    def _encode_other(self, value: Any, kind: type, depth: int) -> Any:
        if issubclass(kind, tuple) and (fields := _list_fields(kind)):
            return ["n", _NAME(kind), fields, *[self.encode(item, depth + 1) for item in tuple.__iter__(value)]]
        if issubclass(kind, BaseException) and kind.__module__ == "builtins" and not _STATE(value):
            return ["x", _NAME(kind), *[self.encode(item, depth + 1) for item in _ARGS(value)]]
        if kind.__module__ == "zoneinfo" and _NAME(kind) == "ZoneInfo" and value.key:
            return ["tz", value.key]
        if kind in _NAMED and (path := self.find_name(value)):
            return ["g", *path]
        if (numpy := sys.modules.get("numpy")) and kind.__module__ == "numpy":
            if kind is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS:
                return ["N", value.dtype.str, list(value.shape), value.tobytes().hex()]
            if issubclass(kind, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
                return ["S", value.dtype.str, [], value.tobytes().hex()]
        if holds_data(kind) and not keeps_identity(kind):
            return self.encode(take_data(value), depth)
        return self.export(value)


def holds_data(kind: type) -> bool:
    """Whether instances of a class hold data: it is a view of a dict, or a subclass of a builtin type."""
    return any(base in DATA for base in _MRO(kind))


def take_data(value: Any) -> Any:
    """The data that an object holds."""
    return DATA[next(base for base in _MRO(type(value)) if base in DATA)](value)


def keeps_identity(kind: type) -> bool:
    """Whether an object that holds data is more: a view, an enumeration, a subclass with names of its own."""
    own = [name for base in _MRO(kind) if base.__module__ != "builtins" for name in base.__dict__]
    return kind in DATA or any(not name.startswith("_") for name in own)


def find_builtin_name(value: Any) -> tuple[str, str] | None:
    """As :func:`find_library_name`, for what a candidate may name: see :func:`find_builtin`."""
    name = (
        "Ellipsis" if value is ... else "NotImplemented" if value is NotImplemented else getattr(value, "__name__", "")
    )
    found = vars(builtins).get(name) if type(name) is str else None
    return ("builtins", name) if found is value and name in _BUILTINS else None


def find_library_name(value: Any) -> tuple[str, str] | None:
    """Module and qualified name of a function or class of the standard library; None: it is none."""
    if builtin := find_builtin_name(value):
        return builtin
    module = getattr(value, "__module__", None) or getattr(getattr(value, "__objclass__", None), "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str) and module.partition(".")[0] in sys.stdlib_module_names):
        return None
    module = {"_operator": "operator", "_functools": "functools"}.get(module, module)
    try:
        found = operator.attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None
    return (module, name) if found is value else None


class Decoder:
    """Decodes the values of one exchange; WireError if no :class:`Encoder` made them.

    ``containers``: as for the encoder; ``own(id)``: the receiver's object that was sent back;
    ``import_handle(id, ...)``: the handle of a sender's object; ``library(module, name)``: something of the standard
    library; ``names``: classes of named tuples by name.
    """

    def __init__(
        self,
        containers: list[Any] | None = None,
        own: Callable[[Any], Any] = _refuse,
        import_handle: Callable[..., Any] = _refuse,
        library: Callable[[str, str], Any] | None = None,
        names: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.containers = [] if containers is None else containers
        self.own, self.import_handle = own, import_handle
        self.library, self.names = library or find_builtin, {} if names is None else names

    def decode(self, data: Any) -> Any:
        try:
            return self._build(data, 0)
        except (TypeError, ValueError, ArithmeticError, MemoryError, AttributeError, KeyError, IndexError) as error:
            raise WireError(f"malformed value: {type(error).__name__}") from None

    def decode_content(self, data: Any, container: Any) -> None:
        """Give ``container`` the content that :meth:`Encoder.encode_content` wrote."""
        try:
            tag, *items = data
            if tag != _TAGS[type(container)]:
                raise WireError("the kind of a container changed")
            content = _make_empty(tag, items)
            _FILLERS[tag](self, content, items, 1)
            _replace_content(container, content)
        except (TypeError, ValueError, ArithmeticError, MemoryError, AttributeError, KeyError, IndexError) as error:
            raise WireError(f"malformed value: {type(error).__name__}") from None

    def _build(self, data: Any, depth: int) -> Any:
        if not isinstance(data, list):
            if isinstance(data, dict):
                raise WireError("malformed value")
            return data
        if depth > MAX_DEPTH + 2:
            raise WireError("the value is too deeply nested")
        tag, *items = data
        if tag in _FILLERS:
            container = _make_empty(tag, items)
            self.containers.append(container)
            _FILLERS[tag](self, container, items, depth + 1)
            return container
        if tag in _READERS:
            return _READERS[tag](self, items, depth + 1)
        raise WireError("malformed value")

    def build_all(self, items: list[Any], depth: int) -> list[Any]:
        return [self._build(item, depth) for item in items]


def find_builtin(module: str, name: str) -> Any:
    """A builtin class or constant, the only things of the library that a candidate may name. WireError: it is none."""
    if module != "builtins" or name not in _BUILTINS:
        raise WireError("not a builtin class")
    return vars(builtins)[name]


def find_in_library(module: str, name: str) -> Any:
    """A function or class of the standard library by its name, as the test passed it to a candidate."""
    return operator.attrgetter(name)(__import__(module, fromlist=["_"]))


# --------------------------------------------------------------------------------------------------------- encoding
def _sequence(tag: str, kind: Any) -> Callable[[Encoder, Any, int], list[Any]]:
    return lambda encoder, value, depth: [tag, *[encoder.encode(item, depth) for item in kind.__iter__(value)]]


def _mapping(tag: str) -> Callable[[Encoder, Any, int], list[Any]]:
    def write(encoder: Encoder, value: Any, depth: int) -> list[Any]:
        return [tag, *[encoder.encode(part, depth) for pair in dict.items(value) for part in pair]]

    return write


def _set(tag: str, kind: Any) -> Callable[[Encoder, Any, int], list[Any]]:
    def write(encoder: Encoder, value: Any, depth: int) -> list[Any]:  # sorted: equal sets have equal encodings
        return [tag, *sorted((encoder.encode(item, depth) for item in kind.__iter__(value)), key=json.dumps)]

    return write


def _write_defaultdict(encoder: Encoder, value: Any, depth: int) -> list[Any]:
    factory = _FACTORY(value)
    is_named = factory is None or (isinstance(factory, type) and factory.__module__ == "builtins")
    made_by = encoder.encode(factory, depth) if not is_named else factory and _NAME(factory)
    return ["v", made_by, *_mapping("")(encoder, value, depth)[1:]]


def _write_deque(encoder: Encoder, value: Any, depth: int) -> list[Any]:
    return ["q", _MAXLEN(value), *[encoder.encode(item, depth) for item in deque.__iter__(value)]]


def _write_fraction(encoder: Encoder, value: Any, depth: int) -> Any:
    if value.denominator.bit_length() > MAX_FRACTION_BITS or value.numerator.bit_length() > MAX_FRACTION_BITS:
        return encoder.export(value)
    return ["F", encoder.encode(value.numerator, depth), encoder.encode(value.denominator, depth)]


def _write_range(encoder: Encoder, value: range, depth: int) -> Any:
    if value[MAX_NODES:]:
        return encoder.export(value)
    return ["r", *[encoder.encode(part, depth) for part in (value.start, value.stop, value.step)]]


def _write_zone(encoder: Encoder, value: Any, depth: int) -> Any:
    return ["tz", encoder.encode(value.utcoffset(None), depth)]


def _parts(tag: str, *names: str) -> Callable[[Encoder, Any, int], list[Any]]:
    return lambda encoder, value, depth: [tag, *[encoder.encode(getattr(value, name), depth) for name in names]]


_CLOCK = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")
_WRITERS: dict[type, Callable[[Encoder, Any, int], Any]] = {
    list: _sequence("l", list),
    tuple: _sequence("t", tuple),
    set: _set("s", set),
    frozenset: _set("f", frozenset),
    dict: _mapping("d"),
    OrderedDict: _mapping("O"),
    Counter: _mapping("C"),
    defaultdict: _write_defaultdict,
    deque: _write_deque,
    bytes: lambda encoder, value, depth: ["b", bytes.hex(value)],
    bytearray: lambda encoder, value, depth: ["B", bytearray.hex(value)],
    complex: lambda encoder, value, depth: ["c", value.real, value.imag],
    range: _write_range,
    slice: _parts("slice", "start", "stop", "step"),
    Decimal: lambda encoder, value, depth: ["D", str(value)],
    Fraction: _write_fraction,
    date: _parts("date", "year", "month", "day"),
    time: _parts("time", *_CLOCK),
    datetime: _parts("datetime", "year", "month", "day", *_CLOCK),
    timedelta: _parts("timedelta", "days", "seconds", "microseconds"),
    timezone: _write_zone,
    array: lambda encoder, value, depth: ["a", value.typecode, *[encoder.encode(x, depth) for x in value.tolist()]],
}
_ATOMS = frozenset({bool, str, float})
_MUTABLE = frozenset({list, set, dict, OrderedDict, Counter, defaultdict, deque, bytearray, array})
_IMMUTABLE: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__, float: float.__pos__, str: str.__str__, complex: complex.__pos__,
    tuple: lambda value: tuple(tuple.__iter__(value)), frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}  # fmt: skip
DATA: dict[type, Callable[[Any], Any]] = {
    **_IMMUTABLE, list: lambda value: list(list.__iter__(value)), set: lambda value: set(set.__iter__(value)),
    dict: lambda value: dict(dict.items(value)), bytearray: lambda value: bytearray(bytes(bytearray.__iter__(value))),
    deque: lambda value: deque(deque.__iter__(value)), type({}.keys()): set, type({}.items()): set,
}  # fmt: skip
"""The data of an instance of a class or its subclasses, read without the subclass's own methods."""
_BUILTINS = frozenset(
    {"Ellipsis", "NotImplemented"} | {name for name, item in vars(builtins).items() if isinstance(item, type)}
)
_NAMED = (type, type(...), type(NotImplemented), BuiltinFunctionType, MethodDescriptorType)
_NUMPY_KINDS = "?biufcSUmM"
_TAGS: dict[type, str] = {
    list: "l",
    set: "s",
    dict: "d",
    OrderedDict: "O",
    Counter: "C",
    defaultdict: "v",
    deque: "q",
    bytearray: "B",
    array: "a",
}
_MRO = type.__dict__["__mro__"].__get__
_NAME = type.__dict__["__name__"].__get__
_FACTORY = defaultdict.__dict__["default_factory"].__get__
_MAXLEN = deque.__dict__["maxlen"].__get__
_ARGS = BaseException.__dict__["args"].__get__
_STATE = BaseException.__dict__["__dict__"].__get__


def _list_fields(kind: type) -> list[str]:
    """The fields of a named tuple's class; none: it is another class."""
    fields = kind.__dict__.get("_fields", ())
    named = type(fields) is tuple and all(type(name) is str and name.isidentifier() for name in fields)
    return list(fields) if named and _NAME(kind).isidentifier() else []


# --------------------------------------------------------------------------------------------------------- decoding
def _fill_exact_list(decoder: Decoder, container: Any, items: list[Any], depth: int) -> None:
    for position, item in enumerate(items):  # of no more memory than a display has, which programs measure
        container[position] = decoder._build(item, depth)


def _fill_list(decoder: Decoder, container: Any, items: list[Any], depth: int) -> None:
    for item in items:
        container.append(decoder._build(item, depth))


def _fill_set(decoder: Decoder, container: Any, items: list[Any], depth: int) -> None:
    for item in items:  # one by one: an alarm may interrupt a set whose items collide
        container.add(decoder._build(item, depth))


def _fill_dict(decoder: Decoder, container: Any, items: list[Any], depth: int) -> None:
    parts = decoder.build_all(items, depth)
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        container[key] = value


def _fill_bytes(decoder: Decoder, container: Any, items: list[Any], depth: int) -> None:
    [text] = items
    container += bytes.fromhex(text)


def _fill_defaultdict(decoder: Decoder, container: Any, items: list[Any], depth: int) -> None:
    if isinstance(items[0], list):  # a function of the other side
        container.default_factory = decoder._build(items[0], depth)
    _fill_dict(decoder, container, items[1:], depth)


_FILLERS: dict[str, Callable[[Decoder, Any, list[Any], int], None]] = {
    "l": _fill_exact_list, "s": _fill_set, "d": _fill_dict, "O": _fill_dict, "C": _fill_dict, "B": _fill_bytes,
    "v": _fill_defaultdict,
    "q": lambda decoder, container, items, depth: _fill_list(decoder, container, items[1:], depth),
    "a": lambda decoder, container, items, depth: _fill_list(decoder, container, items[1:], depth),
}  # fmt: skip
_KINDS: dict[str, Callable[[], Any]] = {"s": set, "d": dict, "O": OrderedDict, "C": Counter, "B": bytearray}
_EMPTY: dict[str, Callable[[list[Any]], Any]] = {
    "l": lambda items: [None] * len(items),
    "v": lambda items: defaultdict(find_builtin("builtins", items[0]) if isinstance(items[0], str) else None),
    "q": lambda items: deque(maxlen=items[0]),
    "a": lambda items: array(items[0]),
}


def _make_empty(tag: str, items: list[Any]) -> Any:
    return _EMPTY[tag](items) if tag in _EMPTY else _KINDS[tag]()


def _replace_content(container: Any, content: Any) -> None:
    if isinstance(container, (list, bytearray, array)):
        container[:] = content
    else:
        container.clear()
        (container.extend if isinstance(container, deque) else container.update)(content)


def _read_fraction(decoder: Decoder, items: list[Any], depth: int) -> Fraction:
    numerator, denominator = decoder.build_all(items, depth)
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        raise WireError("the fraction is too large")
    return Fraction(numerator, denominator)


def _read_range(decoder: Decoder, items: list[Any], depth: int) -> range:
    found = range(*decoder.build_all(items, depth))
    if len(found) > MAX_NODES:
        raise WireError("the range is too long")
    return found


def _read_clock(kind: Any) -> Callable[[Decoder, list[Any], int], Any]:
    def read(decoder: Decoder, items: list[Any], depth: int) -> Any:
        *parts, fold = decoder.build_all(items, depth)
        return kind(*parts, fold=fold)

    return read


def _read_zone(decoder: Decoder, items: list[Any], depth: int) -> Any:
    [zone] = decoder.build_all(items, depth)
    if not isinstance(zone, str):
        return timezone(zone)
    from zoneinfo import ZoneInfo  # imports much, and few values need it

    return ZoneInfo(zone)


def _read_named_tuple(decoder: Decoder, items: list[Any], depth: int) -> Any:
    name, fields, *values = items
    known: Any = decoder.names.get(name)
    if getattr(known, "_fields", None) != tuple(fields):
        if len(fields) > 100 or not all(isinstance(field, str) and len(field) <= 100 for field in (name, *fields)):
            raise WireError("malformed named tuple")
        known = decoder.names[name] = namedtuple(name, fields)
    return known._make(decoder.build_all(values, depth))


def _read_exception(decoder: Decoder, items: list[Any], depth: int) -> BaseException:
    name, *arguments = items
    kind = find_builtin("builtins", name)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise WireError("not an exception")
    return kind(*decoder.build_all(arguments, depth))


def _read_numpy(decoder: Decoder, items: list[Any], depth: int) -> Any:
    kind, shape, text = items
    numpy = sys.modules["numpy"]
    dtype = numpy.dtype(str(kind))
    if dtype.kind not in _NUMPY_KINDS:
        raise WireError("not an array of numbers")
    return numpy.frombuffer(bytes.fromhex(text), dtype).reshape(shape).copy()


def _read_decimal(decoder: Decoder, items: list[Any], depth: int) -> Decimal:
    [text] = items
    return Decimal(str(text))


def _read_int(decoder: Decoder, items: list[Any], depth: int) -> int:
    [text] = items
    return int(text, 16)


_READERS: dict[str, Callable[[Decoder, list[Any], int], Any]] = {
    "i": _read_int,
    "t": lambda decoder, items, depth: tuple(decoder.build_all(items, depth)),
    "f": lambda decoder, items, depth: frozenset(_build_set(decoder, items, depth)),
    "b": lambda decoder, items, depth: bytes.fromhex(*items),
    "c": lambda decoder, items, depth: complex(*map(_read_float, items)),
    "r": _read_range,
    "slice": lambda decoder, items, depth: slice(*decoder.build_all(items, depth)),
    "D": _read_decimal,
    "F": _read_fraction,
    "date": lambda decoder, items, depth: date(*items),
    "time": _read_clock(time),
    "datetime": _read_clock(datetime),
    "timedelta": lambda decoder, items, depth: timedelta(*items),
    "tz": _read_zone,
    "n": _read_named_tuple,
    "x": _read_exception,
    "g": lambda decoder, items, depth: decoder.library(*items),
    "N": _read_numpy,
    "S": lambda decoder, items, depth: _read_numpy(decoder, items, depth)[()],
    "&": lambda decoder, items, depth: decoder.containers[read_index(*items)],
    "h": lambda decoder, items, depth: decoder.import_handle(*items),
    "H": lambda decoder, items, depth: decoder.own(*items),
}


def _build_set(decoder: Decoder, items: list[Any], depth: int) -> set[Any]:
    found: set[Any] = set()
    _fill_set(decoder, found, items, depth)
    return found


def _read_float(value: Any) -> float:
    if type(value) is not float:
        raise WireError("malformed number")
    return value


def read_index(value: Any) -> int:
    """The number of a container; WireError if it is none."""
    if type(value) is not int or value < 0:
        raise WireError("malformed number of a container")
    return value
