"""Plain data survives the border, and nothing else passes it."""

from __future__ import annotations

import json
import math
import socket
import struct
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.sandboxes.jail import wire
from magrpo.sandboxes.jail.proxy import check_answer

GOLDEN = [
    (None, "null"),
    (True, "true"),
    (7, "7"),
    (-(2**53), '["i","-0x20000000000000"]'),
    (2**53 - 1, "9007199254740991"),
    (1.5, "1.5"),
    ("é", '"\\u00e9"'),
    ([1, (2,)], '["l",1,["t",2]]'),
    ({3, 1}, '["s",1,3]'),
    (frozenset(), '["f"]'),
    ({"a": [], 1: 2}, '["d","a",["l"],1,2]'),
    (b"\x00\xff", '["b","00ff"]'),
    (bytearray(b"a"), '["B","61"]'),
    (1 - 2j, '["c",1.0,-2.0]'),
    (range(1, 9, 2), '["r",1,9,2]'),
]


@pytest.mark.parametrize(("value", "code"), GOLDEN)
def test_golden(value: Any, code: str) -> None:
    assert json.dumps(wire.encode_value(value), separators=(",", ":")) == code
    back = wire.decode_value(wire.parse_frame(code.encode()))
    assert back == value
    assert type(back) is type(value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
PLAIN = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4) | st.sets(HASHABLE),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_data_comes_back_with_its_exact_types(value: Any) -> None:
    assert repr_of(wire.decode_value(wire.parse_frame(wire.frame_message(wire.encode_value(value))[4:]))) == repr_of(
        value
    )


def repr_of(value: Any) -> Any:
    """Text that tells types and values apart and does not depend on the order of sets."""
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(repr, map(repr_of, value)))
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [repr_of(item) for item in value]
    if isinstance(value, dict):
        return "dict", [(repr_of(key), repr_of(item)) for key, item in value.items()]
    return type(value).__name__, repr(value)


class Liar(list):  # type: ignore[type-arg]
    """A list that says it holds something else."""

    def __iter__(self) -> Any:
        return iter(["lie"])

    def __len__(self) -> int:
        return 99

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Colour(IntEnum):
    RED = 3


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Liar([1, 2]), [1, 2]),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (Point(1, [2]), (1, [2])),
        (Colour.RED, 3),
        (type("S", (str,), {"__eq__": lambda *_: True, "__hash__": str.__hash__})("x"), "x"),
        (type("F", (float,), {"__float__": lambda _: 9.0})(-0.0), -0.0),
    ],
)
def test_subclasses_are_reduced_to_their_builtin_base(value: Any, plain: Any) -> None:
    back = wire.decode_value(wire.encode_value(value))
    assert repr_of(back) == repr_of(plain)


def test_an_opaque_value_equals_nothing() -> None:
    back = wire.decode_value(wire.encode_value([object()]))[0]
    assert not any(other == back for other in (back, 1, None))
    with pytest.raises(TypeError):
        assert back != 3
    with pytest.raises(TypeError):
        bool(back)
    with pytest.raises(wire.NotPlain):
        wire.encode_value(object(), plain=True)


def test_cycles_and_depth_are_refused() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    for value in (cyclic, [0] * (wire.MAX_NODES + 1)):
        with pytest.raises(wire.TooLarge):
            wire.encode_value(value)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nope", b"\xff\xfe", b"1" * 5000, b"[" * 100_000, b'["i","zz"]', b'["i",7]', b'["c",1,"x"]',
        b'["d",1]', b'["s",["l"]]', b'["r",1,2,0]', b'["q",1]', b"[]", b"[[]]", b'{"a":1}', b'["b","0"]',
        b'["l",' * 101 + b"1" + b"]" * 101,
    ],
)  # fmt: skip
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_value(wire.parse_frame(body))


@pytest.mark.parametrize(
    "answer",
    [None, [], [1, "ok", 1, None, 0], [False, "ok", 1, None, 0], [0, "fine", 1, None, 0], [0, ["ok"], 1, None, 0],
     [0, "ok", 1, None, -1], [0, "ok", 1, None, True], [0, "exception", "ValueError", None, 0],
     [0, "exception", ["ValueError", 1], None, 0]],
)  # fmt: skip
def test_malformed_answers_are_refused(answer: Any) -> None:
    with pytest.raises(wire.WireError):
        check_answer(answer, 0)
    assert check_answer([0, "ok", 1, None, 0], 0) == ["ok", 1, None, 0]


def exchange(data: bytes, cap: int, wait_s: float = 1.0) -> Any:
    """What a reader makes of ``data`` followed by the end of the stream."""
    near, far = socket.socketpair()
    with near:
        with far:
            far.sendall(data)
        return wire.FrameReader(near, cap).read_message(lambda: wait_s)


def test_frames() -> None:
    assert exchange(wire.frame_message({"a": [1]}), 100) == {"a": [1]}
    with pytest.raises(wire.Closed):
        exchange(b"\x00\x00", 100)
    with pytest.raises(wire.Closed):
        exchange(b"\x00\x00\x00\x09[1]", 100)
    with pytest.raises(wire.TooLarge):
        exchange(struct.pack(">I", 101), 100)
    with pytest.raises(wire.Late):
        exchange(b"\x00\x00\x00\x09", 100, wait_s=-1.0)


def test_the_cap_is_on_all_frames_together() -> None:
    near, far = socket.socketpair()
    with near, far:
        reader = wire.FrameReader(near, 29)
        for _ in range(2):
            wire.send_message(far, "123456789")
        assert reader.read_message(lambda: 1.0) == "123456789"
        with pytest.raises(wire.TooLarge):
            reader.read_message(lambda: 1.0)


def test_non_finite_floats_travel() -> None:
    assert math.isnan(wire.decode_value(wire.parse_frame(b"NaN")))
    assert exchange(wire.frame_message(float("-inf")), 100) == float("-inf")
