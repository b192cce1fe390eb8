"""Values survive the border with their exact types and their sharing, and nothing else passes it."""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.sandboxes.jail import values, wire
from magrpo.sandboxes.jail.values import Decoder, Encoder


def encode(value: Any) -> Any:
    return Encoder().encode(value)


def travel(value: Any) -> Any:
    """What arrives on the other side."""
    return Decoder().decode(wire.parse_frame(wire.frame_message(encode(value))[4:]))


GOLDEN: list[tuple[Any, str]] = [
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
    (Counter("aab"), '["C","a",2,"b",1]'),
    (OrderedDict(a=1), '["O","a",1]'),
    (defaultdict(list, {1: [2]}), '["v",["class","list"],1,["l",2]]'),
    (deque([1], 3), '["q",3,1]'),
    (Decimal("1.50"), '["D","1.50"]'),
    (Fraction(1, 3), '["F",1,3]'),
    (date(2024, 2, 29), '["date",2024,2,29]'),
    (time(1, 2, 3, 4, fold=1), '["time",1,2,3,4,null,1]'),
    (datetime(2024, 1, 2, 3, tzinfo=UTC), '["datetime",2024,1,2,3,0,0,0,["timezone",["timedelta",0,0,0]],0]'),
    (timedelta(1, 2), '["timedelta",1,2,0]'),
    (timezone(timedelta(hours=2)), '["timezone",["timedelta",0,7200,0]]'),
    (slice(1, None), '["slice",1,null,null]'),
    (int, '["class","int"]'),
    ("\ud800", '"\\ud800"'),
]


@pytest.mark.parametrize(("value", "code"), GOLDEN)
def test_golden(value: Any, code: str) -> None:
    assert json.dumps(encode(value), separators=(",", ":")) == code
    back = Decoder().decode(wire.parse_frame(code.encode()))
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_named_tuples() -> None:
    point = travel(Point(1, [2]))
    assert (repr(point), point.y, point == (1, [2])) == ("Point(x=1, y=[2])", [2], True)
    assert type(point) is type(travel(Point(3, 4)))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
PLAIN = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4) | st.sets(HASHABLE),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_data_comes_back_with_its_exact_types(value: Any) -> None:
    assert repr_of(travel(value)) == repr_of(value)


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

    __hash__ = None


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Liar([1, 2]), [1, 2]),
        (type("S", (str,), {"__eq__": lambda *_: True, "__hash__": str.__hash__})("x"), "x"),
        (type("F", (float,), {"__float__": lambda _: 9.0})(-0.0), -0.0),
    ],
)
def test_subclasses_without_names_of_their_own_are_their_builtin_base(value: Any, plain: Any) -> None:
    assert repr_of(travel(value)) == repr_of(plain)


class Colour(IntEnum):
    RED = 3


class Stack(list):  # type: ignore[type-arg]
    def push(self, item: Any) -> None:
        self.append(item)


class Named(Point):
    def norm(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (object(), ("object", False, True)),
        (lambda: 0, ("function", False, True)),
        (iter([]), ("list_iterator", False, True)),
        (re.match("x", "x"), ("object", False, True)),
        (Colour, ("type", False, False)),
        (Colour.RED, ("int", True, False)),
        (Stack(), ("list", True, False)),
        (Named(1, 2), ("tuple", True, False)),
        ({}.keys(), ("dict_keys", True, False)),
        (range(10**9), ("range", True, False)),
        (Fraction(1, 2**20000), ("object", True, False)),
    ],
)
def test_what_is_more_than_data_is_refused_or_named(value: Any, described: tuple[str, bool, bool]) -> None:
    with pytest.raises(values.NotPlain):
        encode([value])
    data = Encoder(names_opaque=True).encode([value])
    assert data == ["l", ["opaque", *described]]
    assert Decoder(make_opaque=lambda *given: given).decode(data) == [described]
    with pytest.raises(values.NotPlain):
        Decoder().decode(data)


def test_a_refused_value_leaves_no_number_behind() -> None:
    encoder = Encoder(names_opaque=True)
    assert encoder.encode_if_plain([[1], object()]) is None
    assert encoder.encode_if_plain([[1], [2]]) == ["l", ["l", 1], ["l", 2]]
    assert encoder.containers == [[[1], [2]], [1], [2]]


def test_sharing_and_cycles_survive() -> None:
    shared: list[Any] = []
    back = travel([shared, (shared,), {"k": shared}])
    assert back[0] is back[1][0] is back[2]["k"]
    shared.append(shared)
    back = travel(shared)
    assert back[0] is back


def test_a_change_of_a_container_reaches_the_original() -> None:
    given_list: list[Any] = [[1], {2: 3}]
    encoder = Encoder()
    data = encoder.encode(given_list)
    decoder = Decoder()
    other = decoder.decode(data)
    other[0].append(other)
    after = Encoder(decoder.containers).encode_content(other[0])
    Decoder(encoder.containers).decode_content(after, encoder.containers[1])
    assert given_list[0][1] is given_list


def test_depth_and_size_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(values.MAX_DEPTH + 1):
        deep = [deep]
    for value in (deep, [0] * (values.MAX_NODES + 1)):
        with pytest.raises(wire.TooLarge):
            encode([value] if value is deep else [[i] for i in value])


_TAGS = "i l t s f d O C v q b B c r slice D F date time datetime timedelta timezone n class N S & opaque"
TAGS = _TAGS.split()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.sampled_from(["x", "0x10", "int"]),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(st.sampled_from(TAGS), st.lists(inner, max_size=5)).map(
        lambda pair: [pair[0], *pair[1]]
    ),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_any_json_is_a_value_or_an_error(data: Any) -> None:
    try:
        Decoder().decode(data)
    except wire.WireError:
        return


@pytest.mark.parametrize(
    "data",
    [["i", "zz"], ["i", 7], ["c", 1, "x"], ["d", 1], ["s", ["l"]], ["r", 1, 2, 0], ["q", 1, 2, "x", {}], [], [[]],
     {"a": 1}, ["b", "0"], ["r", 0, 10**12, 1], ["F", 1, 0], ["class", "print"], ["class", "os"], ["v", "eval"],
     ["n", "class", ["x"], 1], ["n", "P", ["_x"], 1], ["n", "P", [["x"]], 1], ["D", "x"], ["&", 0], ["&", -1],
     ["timezone", 1], ["opaque", "x", True, 1], ["opaque"], ["F", 1, ["i", hex(2**20000)]], ["datetime", 1], ["time"]],
)  # fmt: skip
def test_malformed_values_are_refused(data: Any) -> None:
    with pytest.raises(wire.WireError):
        Decoder().decode(data)
