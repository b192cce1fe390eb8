"""Plain data as it crosses between a test and the process of a program, in either direction.

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
    ["date" | "time" | "datetime" | "timedelta" | "timezone", part, ...]
    ["n", name, [field, ...], item, ...]          named tuple
    ["class", name]                               a builtin class
    ["N" | "S", dtype, [length, ...], "hex"]      numpy array, numpy scalar
    ["&", k]                                      the k-th mutable container of this exchange, again
    ["opaque", class, compares, true]             a value of the program that is not plain data

Nothing is unpickled or evaluated. Mutable containers are numbered in the order in which they are met, so shared and
cyclic containers stay so within a call, and a call can report how it changed its arguments.
"""

import builtins
import json
import sys
from collections import Counter, OrderedDict, UserDict, UserList, UserString, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from .wire import TooLarge, WireError

MAX_DEPTH = 100
MAX_NODES = 200_000
MAX_FRACTION_BITS = 10_000  # finding a greatest common divisor takes time that grows with the square
SMALL = 2**53


class NotPlain(WireError):
    """A value is not plain data."""


class Encoder:
    """Encodes the values of one exchange, read through the methods of exact types only: no foreign code runs.

    ``containers``: numbered mutable containers of the exchange so far. ``names_opaque``: whether a value that is not
    plain data is encoded as its class; otherwise it is refused.

    Raises:
        TooLarge: deeper than :data:`MAX_DEPTH` or more than :data:`MAX_NODES` values.
        NotPlain: a value is not plain data, and ``names_opaque`` is not set.
    """

    def __init__(self, containers: Iterable[Any] = (), names_opaque: bool = False) -> None:
        self.containers = list(containers)
        self.numbers = {id(item): number for number, item in enumerate(self.containers)}
        self.names_opaque = names_opaque
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
        if kind in _CONTAINERS:
            number = self.numbers.setdefault(id(value), len(self.containers))
            if number < len(self.containers):
                return ["&", number]
            self.containers.append(value)  # kept alive, because its number is found by its address
            return self.encode_content(value, depth)
        if kind in _FORMS:
            form = _FORMS[kind]
            if form.is_plain(value):
                return [form.tag, *[self.encode(part, depth + 1) for part in form.take_apart(value)]]
            return self._encode_opaque(value, kind)
        return self._encode_other(value, kind, depth)

    def encode_if_plain(self, value: Any) -> Any:
        """Return the encoding of a value; None if part of it is not plain data, or it is too large."""
        known = len(self.containers)
        names_opaque = self.names_opaque
        self.names_opaque = False
        try:
            return self.encode(value)
        except WireError:
            for container in self.containers[known:]:
                del self.numbers[id(container)]
            del self.containers[known:]
            return None
        finally:
            self.names_opaque = names_opaque

    def encode_content(self, container: Any, depth: int = 0) -> list[Any]:
        """Encode a mutable container by its content, even if it has been met before."""
        kind = type(container)
        tag, depth = _CONTAINERS[kind], depth + 1
        if kind is bytearray:
            return [tag, bytearray.hex(container)]
        if kind is list:
            return [tag, *[self.encode(item, depth) for item in list.__iter__(container)]]
        if kind is set:
            return [tag, *self._encode_sorted(set.__iter__(container), depth)]
        if kind is deque:
            return [tag, _MAXLEN(container), *[self.encode(item, depth) for item in deque.__iter__(container)]]
        parts = [self.encode(part, depth) for pair in dict.items(container) for part in pair]
        return [tag, self.encode(_FACTORY(container), depth), *parts] if kind is defaultdict else [tag, *parts]

    def _encode_sorted(self, items: Iterable[Any], depth: int) -> list[Any]:
        """Encode items in the order of their encodings, so that equal sets have equal encodings."""
        return sorted((self.encode(item, depth) for item in items), key=json.dumps)

    def _encode_other(self, value: Any, kind: type, depth: int) -> Any:
        if kind is frozenset:
            return ["f", *self._encode_sorted(frozenset.__iter__(value), depth + 1)]
        if kind is bytes:
            return ["b", bytes.hex(value)]
        if kind is type and vars(builtins).get(_NAME(value)) is value:
            return ["class", _NAME(value)]
        if fields := list_fields(kind):
            return ["n", _NAME(kind), fields, *[self.encode(item, depth + 1) for item in tuple.__iter__(value)]]
        if (numpy := sys.modules.get("numpy")) and kind.__module__ == "numpy":
            if kind is numpy.ndarray and value.dtype.kind in _NUMPY_KINDS:
                return ["N", value.dtype.str, list(value.shape), value.tobytes().hex()]
            if issubclass(kind, numpy.generic) and value.dtype.kind in _NUMPY_KINDS:
                return ["S", value.dtype.str, [], value.tobytes().hex()]
        base = find_data_base(kind)
        if base in _TAKE_DATA and not list_own_names(kind):
            return self.encode(_TAKE_DATA[base](value), depth)
        return self._encode_opaque(value, kind)

    def _encode_opaque(self, value: Any, kind: type) -> list[Any]:
        if not self.names_opaque:
            raise NotPlain(f"a {_NAME(kind)} is not plain data")
        return ["opaque", _name_builtin(kind), _may_equal_data(kind), _is_always_true(kind)]


def find_data_base(kind: type) -> type | None:
    """Return the builtin data type that a class derives from; None if its instances hold no data of their own."""
    return next((base for base in _MRO(kind) if base in _DATA), None)


def is_of_data_class(value: Any) -> bool:
    """Whether a value is an instance of exactly a class of plain data, whatever it contains; not for numpy's."""
    kind = type(value)
    if kind is type:
        return vars(builtins).get(_NAME(value)) is value
    return value is None or kind in _EXACT or bool(list_fields(kind))


def _may_equal_data(kind: type) -> bool:
    """Whether instances of a class that are not plain data may equal plain data, as those of numpy's classes may."""
    return find_data_base(kind) is not None or any(base.__module__ == "numpy" for base in _MRO(kind))


def list_own_names(kind: type) -> list[str]:
    """List public names that a class and its bases add to the builtin ones, which make an instance more than data."""
    own = (name for base in _MRO(kind) if base.__module__ != "builtins" for name in base.__dict__)
    return [name for name in own if not name.startswith("_")]


def list_fields(kind: type) -> list[str]:
    """List the fields of a named tuple's class that adds nothing else; empty for any other class."""
    fields = kind.__dict__.get("_fields", ()) if issubclass(kind, tuple) else ()
    is_named = type(fields) is tuple and all(type(name) is str and name.isidentifier() for name in fields)
    adds_nothing = is_named and set(list_own_names(kind)) <= set(fields)
    return list(fields) if adds_nothing and _NAME(kind).isidentifier() else []


def _is_always_true(kind: type) -> bool:
    """Whether all instances of a class are true, because it defines neither truth nor length."""
    return not any("__bool__" in base.__dict__ or "__len__" in base.__dict__ for base in _MRO(kind))


def _name_builtin(kind: type) -> str:
    """Return the name of the nearest builtin class."""
    return str(next(_NAME(base) for base in _MRO(kind) if base.__module__ == "builtins"))


def _refuse_opaque(*_: Any) -> Any:
    raise NotPlain("not plain data")


class Decoder:
    """Decodes the values of one exchange; WireError if no :class:`Encoder` made them.

    ``containers``: as for the encoder; ``make_opaque(class, compares, true)`` makes the stand-in for a value
    that is not plain data.
    """

    def __init__(
        self, containers: Iterable[Any] = (), make_opaque: Callable[[str, bool, bool], Any] = _refuse_opaque
    ) -> None:
        self.containers = list(containers)
        self.make_opaque = make_opaque

    def decode(self, data: Any) -> Any:
        try:
            return self._build(data, 0)
        except _MALFORMED as error:
            raise WireError(f"malformed value: {type(error).__name__}") from None

    def decode_content(self, data: Any, container: Any) -> None:
        """Fill ``container`` with the content that :meth:`Encoder.encode_content` wrote."""
        try:
            tag, *items = data
            if tag != _CONTAINERS[type(container)]:
                raise WireError("the kind of a container changed")
            content = _make_empty(tag, items)
            self._fill(content, tag, items, 1)
            _replace_content(container, content)
        except _MALFORMED as error:
            raise WireError(f"malformed value: {type(error).__name__}") from None

    def _build(self, data: Any, depth: int) -> Any:
        if not isinstance(data, list):
            if isinstance(data, dict):
                raise WireError("malformed value")
            return data
        if depth > MAX_DEPTH + 2:
            raise WireError("the value is too deeply nested")
        tag, *items = data
        if tag in _KINDS:
            container = _make_empty(tag, items)
            self.containers.append(container)
            self._fill(container, tag, items, depth + 1)
            return container
        if tag in _FORMS_BY_TAG:
            return _FORMS_BY_TAG[tag].assemble(*[self._build(item, depth + 1) for item in items])
        return self._build_other(tag, items, depth + 1)

    def _build_other(self, tag: Any, items: list[Any], depth: int) -> Any:
        match tag, items:
            case "i", [str(text)]:
                return int(text, 16)
            case "b", [str(text)]:
                return bytes.fromhex(text)
            case "f", _:
                found: set[Any] = set()
                self._fill(found, "s", items, depth)
                return frozenset(found)
            case "class", [str(name)] if name in _BUILTIN_CLASSES:
                return vars(builtins)[name]
            case "n", [name, fields, *parts]:
                return make_named_tuple(name, tuple(fields))._make([self._build(part, depth) for part in parts])
            case "N", [str(kind), shape, str(text)]:
                return _read_numpy(kind, shape, text)
            case "S", [str(kind), shape, str(text)]:
                return _read_numpy(kind, shape, text)[()]
            case "&", [number]:
                return self.containers[read_index(number)]
            case "opaque", [str(name), bool(compares), bool(is_true)]:
                return self.make_opaque(name, compares, is_true)
        raise WireError("malformed value")

    def _fill(self, container: Any, tag: str, items: list[Any], depth: int) -> None:
        """Fill a container item by item: an alarm must be able to interrupt a set or dict whose keys collide."""
        if tag == "l":
            for position, item in enumerate(items):  # as little memory as a display takes, because programs measure it
                container[position] = self._build(item, depth)
        elif tag == "B":
            [text] = items
            container += bytes.fromhex(text)
        elif tag == "s":
            for item in items:
                container.add(self._build(item, depth))
        elif tag == "q":
            for item in items[1:]:
                container.append(self._build(item, depth))
        else:
            if tag == "v":
                factory, *items = items
                container.default_factory = self._build(factory, depth)
                if not (factory is None or callable(container.default_factory)):
                    raise WireError("malformed default of a dict")
            parts = [self._build(item, depth) for item in items]
            for key, value in zip(parts[::2], parts[1::2], strict=True):
                container[key] = value


@lru_cache(maxsize=1024)
def make_named_tuple(name: Any, fields: tuple[Any, ...]) -> Any:
    """Return the class of named tuples with this name and these fields, the same class each time."""
    if len(fields) > 100 or not all(isinstance(field, str) and len(field) <= 100 for field in (name, *fields)):
        raise WireError("malformed named tuple")
    return namedtuple(name, fields)


def _make_empty(tag: str, items: list[Any]) -> Any:
    if tag == "l":
        return [None] * len(items)
    return deque(maxlen=items[0]) if tag == "q" else _KINDS[tag]()


def _replace_content(container: Any, content: Any) -> None:
    if isinstance(container, (list, bytearray)):
        container[:] = content
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(content)
    else:
        container.update(content)


def _read_numpy(kind: str, shape: Any, text: str) -> Any:
    numpy = sys.modules["numpy"]
    dtype = numpy.dtype(kind)
    if dtype.kind not in _NUMPY_KINDS:
        raise WireError("not an array of numbers")
    return numpy.frombuffer(bytes.fromhex(text), dtype).reshape(shape).copy()


def read_index(value: Any) -> int:
    """Return the number of a container; WireError if the value is none."""
    if type(value) is not int or value < 0:
        raise WireError("malformed number of a container")
    return value


class ValueForm(NamedTuple):
    """How an immutable type is taken apart into values and rebuilt; some values are not ``is_plain``."""

    tag: str
    take_apart: Callable[[Any], Iterable[Any]]
    assemble: Callable[..., Any]
    is_plain: Callable[[Any], bool] = lambda _: True


def _take_slice(value: Any) -> tuple[Any, ...]:
    return value.start, value.stop, value.step


def _take_clock(value: Any) -> tuple[Any, ...]:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold


def _has_plain_zone(value: Any) -> bool:
    return value.tzinfo is None or type(value.tzinfo) is timezone


def _is_short(value: range) -> bool:
    return not value[MAX_NODES:]


def _make_range(*parts: Any) -> range:
    made = range(*parts)
    if not _is_short(made):
        raise WireError("the range is too long")
    return made


def _is_small_fraction(value: Fraction) -> bool:
    return max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_FRACTION_BITS


def _make_fraction(numerator: int, denominator: int) -> Fraction:
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        raise WireError("the fraction is too large")
    return Fraction(numerator, denominator)


def _make_complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise WireError("malformed number")
    return complex(real, imaginary)


def _make_time(*parts: Any) -> time:
    return time(*parts[:-1], fold=parts[-1])


def _make_datetime(*parts: Any) -> datetime:
    return datetime(*parts[:-1], fold=parts[-1])


_FORMS: dict[type, ValueForm] = {
    tuple: ValueForm("t", tuple.__iter__, lambda *items: items),
    complex: ValueForm("c", lambda value: (value.real, value.imag), _make_complex),
    slice: ValueForm("slice", _take_slice, slice),
    range: ValueForm("r", _take_slice, _make_range, _is_short),
    Decimal: ValueForm("D", lambda value: (str(value),), Decimal),
    Fraction: ValueForm("F", lambda value: (value.numerator, value.denominator), _make_fraction, _is_small_fraction),
    date: ValueForm("date", lambda value: (value.year, value.month, value.day), date),
    time: ValueForm("time", _take_clock, _make_time, _has_plain_zone),
    datetime: ValueForm(
        "datetime",
        lambda value: (value.year, value.month, value.day, *_take_clock(value)),
        _make_datetime,
        _has_plain_zone,
    ),
    timedelta: ValueForm("timedelta", lambda value: (value.days, value.seconds, value.microseconds), timedelta),
    timezone: ValueForm("timezone", lambda value: (value.utcoffset(None),), timezone),
}
_FORMS_BY_TAG = {form.tag: form for form in _FORMS.values()}
_ATOMS = frozenset({bool, str, float})
_CONTAINERS: dict[type, str] = {
    list: "l", set: "s", dict: "d", OrderedDict: "O", Counter: "C", defaultdict: "v", deque: "q", bytearray: "B",
}  # fmt: skip
_KINDS: dict[str, Any] = {tag: kind for kind, tag in _CONTAINERS.items()}
_TAKE_DATA: dict[type | None, Callable[[Any], Any]] = {
    int: int.__pos__, float: float.__pos__, str: str.__str__, complex: complex.__pos__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple(tuple.__iter__(value)), frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    list: lambda value: list(list.__iter__(value)), set: lambda value: set(set.__iter__(value)),
    dict: lambda value: dict(dict.items(value)), bytearray: lambda value: bytearray(bytes(bytearray.__iter__(value))),
    deque: lambda value: deque(deque.__iter__(value)),
}  # fmt: skip
"""Reads the data of an instance of a subclass of a builtin type, without the subclass's own methods."""
_EXACT = _ATOMS | {int, bytes, frozenset} | _CONTAINERS.keys() | _FORMS.keys()
_VIEWS = {type({}.keys()), type({}.items()), memoryview, MappingProxyType, UserDict, UserList, UserString}
_DATA = _TAKE_DATA.keys() | _VIEWS | {range, Decimal, Fraction, date, time, timedelta}
"""Types whose instances, and instances of their subclasses, may equal plain data."""
_BUILTIN_CLASSES = frozenset(name for name, item in vars(builtins).items() if isinstance(item, type))
_NUMPY_KINDS = "?biufcSUmM"
_MALFORMED = (TypeError, ValueError, ArithmeticError, MemoryError, AttributeError, KeyError, IndexError)
_MRO = type.__dict__["__mro__"].__get__
_NAME = type.__dict__["__name__"].__get__
_FACTORY = defaultdict.__dict__["default_factory"].__get__
_MAXLEN = deque.__dict__["maxlen"].__get__
