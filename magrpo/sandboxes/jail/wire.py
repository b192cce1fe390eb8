"""Frames and plain data: the only things that cross the border between a candidate and the test code.

A frame is a length (4 bytes, big endian) and that many bytes of ASCII JSON. Values travel as plain data of exact
builtin types; an array is always a tag and its payload::

    null, true, false, "text", 12, 1.5         themselves
    ["i", "0x..."]                             an integer beyond 2**53
    ["l" | "t" | "s" | "f", item, ...]         list, tuple, set, frozenset
    ["d", key, value, ...]                     dict
    ["b" | "B", "hex"]                         bytes, bytearray
    ["c", re, im], ["r", start, stop, step]    complex, range
    ["o", "type name"]                         anything else: opaque, equal to nothing

Nothing is ever unpickled or evaluated, and the reader limits sizes.
"""

import builtins
import json
import select
import struct
import time
import types
from collections.abc import Callable
from socket import socket
from typing import Any

TYPE_NAMES = frozenset(
    item.__name__ for module in (builtins, types) for item in vars(module).values() if isinstance(item, type)
)
MAX_DEPTH = 100
MAX_NODES = 200_000
SMALL = 2**53
HEADER = struct.Struct(">I")


class WireError(Exception):
    """The received bytes are not a frame, or not plain data."""


class NotPlain(WireError):
    """A value cannot cross the border."""


class Returned(WireError):
    """A value received as opaque is sent back."""


class TooLarge(WireError):
    """A value or a frame exceeds the size limit."""


class Closed(WireError):
    """The other side hung up."""


class Late(WireError):
    """No frame arrived before the deadline."""


class Opaque:
    """A value that is not plain data: only the name of its type is known, if it is Python's own. Equals nothing."""

    __slots__ = ("type_name",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name if type_name in TYPE_NAMES else "unknown"

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        raise TypeError(f"{self!r} cannot be compared")

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} has no truth value")

    def __repr__(self) -> str:
        return f"<{self.type_name} object>"


def encode_value(value: Any, *, plain: bool = False) -> Any:
    """Reduce ``value`` to tagged JSON, through the methods of the exact builtin types only.

    A subclass is encoded as its builtin base (``Counter`` as ``dict``, a named tuple as ``tuple``).

    Raises:
        TooLarge: deeper than :data:`MAX_DEPTH` or more than :data:`MAX_NODES` values.
        NotPlain: ``plain``, and the value holds something that is not plain data.
        Returned: ``plain``, and the value holds an :class:`Opaque`.
    """
    budget = MAX_NODES

    def reduce(item: Any, depth: int) -> Any:
        nonlocal budget
        budget -= 1
        if budget < 0 or depth > MAX_DEPTH:
            raise TooLarge("the value is too large or too deeply nested")
        kind = type(item)
        if item is None or kind is bool or kind is str or kind is float:
            return item
        if kind is int:
            return item if -SMALL < item < SMALL else ["i", hex(item)]
        if kind not in _TAGS:
            base = next((base for base in _MRO(kind) if base in _TAGS or base in _EXACT), None)
            if base is None:
                if plain and kind is Opaque:
                    raise Returned(f"{item!r} cannot be passed on")
                if plain:
                    raise NotPlain(f"a {_NAME(kind)} is not plain data")
                return ["o", _NAME(kind)[:100]]
            if base in _EXACT:
                return reduce(_EXACT[base](item), depth)
            kind = base
        tag = _TAGS[kind]
        if tag == "d":
            return [tag, *[reduce(part, depth + 1) for pair in dict.items(item) for part in pair]]
        if tag in "lt":
            return [tag, *[reduce(entry, depth + 1) for entry in kind.__iter__(item)]]
        if tag in "sf":  # sorted, so that equal sets have equal encodings
            return [tag, *sorted((reduce(entry, depth + 1) for entry in kind.__iter__(item)), key=json.dumps)]
        if tag in "bB":
            return [tag, kind.hex(item)]
        if tag == "c":
            return [tag, item.real, item.imag]
        return [tag, *[reduce(part, depth + 1) for part in (item.start, item.stop, item.step)]]

    return reduce(value, 0)


_TAGS = {
    list: "l", tuple: "t", set: "s", frozenset: "f", dict: "d",
    bytes: "b", bytearray: "B", complex: "c", range: "r",
}  # fmt: skip
_EXACT: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__, float: float.__pos__, str: str.__str__, complex: complex.__pos__,
}  # fmt: skip
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"l": list, "t": tuple, "s": set, "f": frozenset}
_MRO = type.__dict__["__mro__"].__get__
_NAME = type.__dict__["__name__"].__get__


def decode_value(data: Any) -> Any:
    """Rebuild a value from tagged JSON of bounded size; WireError if :func:`encode_value` did not make it."""
    try:
        return _build(data, 0)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise WireError(f"malformed value: {error}") from None


def _build(data: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise WireError("the value is too deeply nested")
    match data:
        case None | bool() | str() | float() | int():
            return data
        case ["l" | "t" | "s" | "f" as tag, *items]:
            return _SEQUENCES[tag](_build(item, depth + 1) for item in items)
        case ["d", *items]:
            parts = [_build(item, depth + 1) for item in items]
            return dict(zip(parts[::2], parts[1::2], strict=True))
        case ["r", *items]:
            start, stop, step = (_build(item, depth + 1) for item in items)
            return range(start, stop, step)
        case ["c", float(real), float(imaginary)]:
            return complex(real, imaginary)
        case ["i", str(text)]:
            return int(text, 16)
        case ["b", str(text)]:
            return bytes.fromhex(text)
        case ["B", str(text)]:
            return bytearray.fromhex(text)
        case ["o", str(name)]:
            return Opaque(name[:100])
    raise WireError("malformed value")


def frame_message(message: Any) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return HEADER.pack(len(body)) + body


def parse_frame(body: bytes) -> Any:
    """The message of a frame's body; WireError if it is no JSON, too deep, or has a large integer not in hex."""

    def parse_small_int(digits: str) -> int:
        if len(digits) > 17:
            raise ValueError("integer out of range")
        return int(digits)

    try:
        return json.loads(body.decode("ascii"), parse_int=parse_small_int)
    except (ValueError, RecursionError) as error:
        raise WireError(f"malformed frame: {type(error).__name__}") from None


def send_message(channel: socket, message: Any) -> None:
    channel.sendall(frame_message(message))


class FrameReader:
    """Reads frames from a stream socket, at most ``cap`` bytes in all; longer frames are rejected before buffering."""

    def __init__(self, channel: socket, cap: int) -> None:
        self.channel = channel
        self.left = cap
        self.poll = select.poll()
        self.poll.register(channel, select.POLLIN)

    def read_message(self, wait: Callable[[], float | None]) -> Any:
        """The next message. ``wait()`` returns the seconds to wait next: None: forever; 0 or less: give up.

        Raises:
            Late: ``wait()`` gave up. Closed: end of file. TooLarge, WireError: the other side broke the rules.
        """
        (size,) = HEADER.unpack(self._receive(HEADER.size, wait))
        if size + HEADER.size > self.left:
            raise TooLarge("more output than the limit allows")
        self.left -= size + HEADER.size
        return parse_frame(self._receive(size, wait))

    def _receive(self, size: int, wait: Callable[[], float | None]) -> bytes:
        data = bytearray()
        while len(data) < size:
            seconds = wait()
            if seconds is not None and seconds <= 0:
                raise Late("no answer in time")
            if not self.poll.poll(None if seconds is None else seconds * 1000 + 1):
                continue
            try:
                piece = self.channel.recv(min(size - len(data), 1 << 16))
            except ConnectionError:
                piece = b""
            if not piece:
                raise Closed("the other side is gone")
            data += piece
        return bytes(data)


def wait_until(deadline: float) -> Callable[[], float]:
    """A ``wait`` for :meth:`FrameReader.read_message`: until ``time.monotonic()`` reaches ``deadline``."""
    return lambda: deadline - time.monotonic()
