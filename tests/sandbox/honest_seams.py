"""Honest programs at the seams between test and program, each with a test that passes in plain execution.

The entry point of each is ``f``. A heading names the program, a line of three hyphens ends it, its test follows.
"""

import re

_TEXT = r'''
### not_reached_branch_of_if
def f(n):
    return n if n > 0 else None
---
r = f(3)
if r is None:
    assert f(-1) is None
    assert f(0) is None
else:
    assert r == 3
### not_reached_after_expected_exception
def f(n):
    if n < 0:
        raise ValueError("negative")
    return n
---
try:
    f(-1)
    assert False, "no error"
except ValueError:
    pass
assert f(1) == 1
### not_reached_assert_after_call_in_try
def f(n):
    return 10 // n
---
try:
    assert f(0) == 1
    assert f(1) == 1
except ZeroDivisionError:
    caught = True
assert caught
assert f(5) == 2
### not_reached_loop_over_nothing
def f(n):
    return list(range(n))
---
for item in f(0):
    assert item < 0
    assert item > 0
assert f(2) == [0, 1]
### not_reached_while
def f(n):
    return n // 2
---
n = 0
while f(n):
    n = f(n)
    assert n > 0
assert f(4) == 2
### not_reached_for_else
def f(items):
    return sorted(items)
---
for item in f([3, 1]):
    if item == 3:
        break
else:
    assert False, "no three"
assert f([2, 1]) == [1, 2]
### not_reached_return_in_check
def f(n):
    return n
---
def check(candidate):
    assert candidate(1) == 1
    if candidate(2) == 2:
        return
    assert candidate(3) == 3
    assert candidate(4) == 4
### not_reached_continue
def f(n):
    return n % 3
---
for n in range(9):
    if f(n) == 0:
        continue
    assert f(n) in (1, 2)
### not_reached_else_of_try
def f(s):
    return int(s)
---
for text in ("1", "x", "2"):
    try:
        value = f(text)
    except ValueError:
        assert text == "x"
    else:
        assert value == int(text)
    finally:
        assert isinstance(text, str)
### not_reached_match_case
def f(n):
    return {"kind": "even" if n % 2 == 0 else "odd"}
---
match f(4):
    case {"kind": "even"}:
        assert f(2)["kind"] == "even"
    case {"kind": "odd"}:
        assert False
    case _:
        assert False
### not_reached_version_branch
import sys
def f():
    return sys.version_info[0]
---
import sys
if sys.version_info < (3, 0):
    assert f() == 2
else:
    assert f() == 3
### not_reached_short_helper
def f(n):
    return n * 2
---
def unused(x):
    assert x == 0
    assert f(x) == 1
def used(x):
    assert f(x) == 2 * x
used(2)
used(3)
### not_reached_raise_stops_loop
def f(limit):
    for i in range(3):
        if i == limit:
            raise RuntimeError("limit")
    return limit
---
try:
    for n in (5, 1, 7):
        assert f(n) == n
except RuntimeError as error:
    assert str(error) == "limit"
### suppress_expected
def f(key):
    return {"a": 1}[key]
---
from contextlib import suppress
with suppress(KeyError):
    f("z")
    assert False
assert f("a") == 1
### only_expects_exception
def f(n):
    raise NotImplementedError("later")
---
def check(candidate):
    try:
        candidate(1)
    except NotImplementedError:
        return
    raise AssertionError("no error")
### only_expects_exception_at_top
def f(n):
    raise KeyError(n)
---
try:
    f(1)
except KeyError:
    pass
else:
    raise AssertionError("no error")
### only_calls
def f(n):
    return n
---
f(1)
f(2)
### only_calls_in_check
def f(items):
    items.append(1)
---
def check(candidate):
    candidate([])
    candidate([1])
### raises_helper_of_the_test
def f(n):
    if n < 0:
        raise ValueError("negative")
    return n
---
def raises(kind, function, *args):
    try:
        function(*args)
    except kind:
        return True
    return False
assert raises(ValueError, f, -1)
assert not raises(ValueError, f, 1)
### assert_raises_of_unittest
def f(n):
    if not isinstance(n, int):
        raise TypeError("an integer, please")
    return n
---
import unittest
case = unittest.TestCase()
with case.assertRaises(TypeError):
    f("x")
with case.assertRaisesRegex(TypeError, "integer"):
    f(None)
case.assertEqual(f(3), 3)
### unittest_class
def f(n):
    return n + 1
---
import io
import unittest
class TestF(unittest.TestCase):
    def test_one(self):
        self.assertEqual(f(1), 2)
    def test_two(self):
        self.assertTrue(f(2) == 3)
result = unittest.TextTestRunner(stream=io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(TestF))
assert result.wasSuccessful() and result.testsRun == 2
### iterator_list_iterator
def f(items):
    return iter(items)
---
it = f([1, 2, 3])
assert next(it) == 1
assert next(it) == 2
assert list(it) == [3]
assert next(it, None) is None
### generator_collected
def f(n):
    for i in range(n):
        yield i * i
---
assert list(f(4)) == [0, 1, 4, 9]
assert sum(f(3)) == 5
assert tuple(f(0)) == ()
### generator_step_by_step
def f(n):
    while n:
        yield n
        n -= 1
---
g = f(2)
assert next(g) == 2
assert next(g) == 1
try:
    next(g)
    assert False
except StopIteration:
    assert True
### generator_endless
def f():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b
---
import itertools
assert list(itertools.islice(f(), 10)) == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
g = f()
assert [next(g) for _ in range(5)] == [0, 1, 1, 2, 3]
### generator_with_send
def f():
    total = 0
    while True:
        got = yield total
        if got is None:
            return
        total += got
---
g = f()
assert next(g) == 0
assert g.send(5) == 5
assert g.send(7) == 12
g.close()
### generator_for_loop
def f(words):
    yield from (word.upper() for word in words)
---
found = []
for word in f(["a", "b"]):
    found.append(word)
assert found == ["A", "B"]
### map_object
def f(items):
    return map(str, items)
---
assert list(f([1, 2])) == ["1", "2"]
assert ",".join(f([3, 4])) == "3,4"
### filter_and_zip
def f(items):
    return zip(filter(None, items), items)
---
assert dict(f([1, 0, 2])) == {1: 1, 2: 0}
### enumerate_and_reversed
def f(items):
    return enumerate(reversed(items))
---
assert list(f("ab")) == [(0, "b"), (1, "a")]
### itertools_objects
import itertools
def f(items):
    return itertools.permutations(items)
---
import itertools
assert sorted(f([1, 2, 3])) == sorted(itertools.permutations([1, 2, 3]))
assert len(list(f("ab"))) == 2
### groupby_object
from itertools import groupby
def f(text):
    return groupby(text)
---
assert [(key, len(list(group))) for key, group in f("aabc")] == [("a", 2), ("b", 1), ("c", 1)]
### dict_keys_view
def f(d):
    return d.keys()
---
assert list(f({"a": 1, "b": 2})) == ["a", "b"]
assert f({"a": 1}) == {"a"}
assert "a" in f({"a": 1})
assert len(f({})) == 0
### dict_values_view
def f(d):
    return d.values()
---
assert sorted(f({"a": 2, "b": 1})) == [1, 2]
assert sum(f({1: 1, 2: 5})) == 6
### dict_items_view
def f(d):
    return d.items()
---
assert dict(f({"a": 1})) == {"a": 1}
for key, value in f({"x": 1}):
    assert (key, value) == ("x", 1)
### memoryview_result
def f(data):
    return memoryview(data)[1:]
---
assert bytes(f(b"abc")) == b"bc"
assert f(b"abc")[0] == 98
assert len(f(b"abc")) == 2
### string_io_result
import io
def f(text):
    out = io.StringIO()
    out.write(text.upper())
    return out
---
assert f("ab").getvalue() == "AB"
stream = f("x\ny")
stream.seek(0)
assert stream.readlines() == ["X\n", "Y"]
### string_io_argument
def f(stream):
    return [line.rstrip("\n") for line in stream]
---
import io
assert f(io.StringIO("a\nb\n")) == ["a", "b"]
assert f(io.StringIO("")) == []
### string_io_argument_written_to
def f(stream, text):
    print(text, file=stream)
---
import io
out = io.StringIO()
f(out, "hello")
assert out.getvalue() == "hello\n"
### match_object
import re
def f(text):
    return re.match(r"(?P<word>\w+) (\d+)", text)
---
assert f("abc 12").group(2) == "12"
assert f("abc 12").groups() == ("abc", "12")
assert f("abc 12")["word"] == "abc"
assert f("abc 12").span() == (0, 6)
assert f("?") is None
assert f("a 1")
### pattern_object
import re
def f(text):
    return re.compile(text)
---
assert f("a+").pattern == "a+"
assert f("a+").findall("aab a") == ["aa", "a"]
assert f("a+").match("b") is None
### instance_result
class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def norm(self):
        return self.x ** 2 + self.y ** 2
def f(x, y):
    return Point(x, y)
---
p = f(3, 4)
assert p.x == 3
assert p.norm() == 25
p.x = 0
assert p.norm() == 16
### instance_with_equality
from dataclasses import dataclass
@dataclass(frozen=True, order=True)
class Pair:
    a: int
    b: int = 0
def f(a, b=0):
    return Pair(a, b)
---
assert f(1) == f(1, 0)
assert f(1) != f(2)
assert f(1) < f(2)
assert len({f(1), f(1, 0), f(2)}) == 2
assert repr(f(1)) == "Pair(a=1, b=0)"
assert max(f(1), f(5), f(2)).a == 5
### instance_with_len_and_bool
class Bag:
    def __init__(self, items):
        self.items = list(items)
    def __len__(self):
        return len(self.items)
    def __contains__(self, item):
        return item in self.items
    def __getitem__(self, i):
        return self.items[i]
def f(items):
    return Bag(items)
---
assert len(f([1, 2])) == 2
assert not f([])
assert f([1])
assert 1 in f([1])
assert f("abc")[1:] == ["b", "c"]
assert [item for item in f([4, 5])] == [4, 5]
### instance_with_operators
class Vector:
    def __init__(self, *parts):
        self.parts = parts
    def __add__(self, other):
        return Vector(*[a + b for a, b in zip(self.parts, other.parts)])
    def __mul__(self, k):
        return Vector(*[a * k for a in self.parts])
    __rmul__ = __mul__
    def __eq__(self, other):
        return self.parts == other.parts
    def __neg__(self):
        return self * -1
    def __str__(self):
        return "<" + ", ".join(map(str, self.parts)) + ">"
def f(*parts):
    return Vector(*parts)
---
assert f(1, 2) + f(3, 4) == f(4, 6)
assert 2 * f(1, 2) == f(2, 4)
assert str(-f(1, 2)) == "<-1, -2>"
assert f"{f(1)}" == "<1>"
assert abs(f(1).parts[0]) == 1
### instance_context_manager
class Managed:
    def __init__(self):
        self.log = []
    def __enter__(self):
        self.log.append("in")
        return self
    def __exit__(self, *details):
        self.log.append("out")
def f():
    return Managed()
---
m = f()
with m as inner:
    assert inner.log == ["in"]
assert m.log == ["in", "out"]
### class_as_entry_point
class f:
    """A stack."""
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        return self.items.pop()
    def __len__(self):
        return len(self.items)
---
s = f()
s.push(1).push(2)
assert len(s) == 2
assert s.pop() == 2
assert s.items == [1]
try:
    f().pop()
    assert False
except IndexError:
    assert True
### class_with_properties
class f:
    created = 0
    def __init__(self, celsius):
        self.celsius = celsius
        f.created += 1
    @property
    def fahrenheit(self):
        return self.celsius * 9 / 5 + 32
    @fahrenheit.setter
    def fahrenheit(self, value):
        self.celsius = (value - 32) * 5 / 9
    @classmethod
    def boiling(cls):
        return cls(100)
    @staticmethod
    def name():
        return "temperature"
---
t = f(0)
assert t.fahrenheit == 32
t.fahrenheit = 212
assert t.celsius == 100
assert f.boiling().celsius == 100
assert f.name() == "temperature"
assert f.created == 2
assert isinstance(t, f)
### class_subclassed_by_the_test
class f:
    def area(self):
        return 0
    def double(self):
        return 2 * self.area()
---
class Square(f):
    def area(self):
        return 9
assert Square().double() == 18
assert f().double() == 0
### linked_list_result
class Node:
    def __init__(self, value, rest=None):
        self.value, self.rest = value, rest
def f(items):
    head = None
    for item in reversed(items):
        head = Node(item, head)
    return head
---
node, seen = f([1, 2, 3]), []
while node is not None:
    seen.append(node.value)
    node = node.rest
assert seen == [1, 2, 3]
assert f([]) is None
### linked_list_argument
class Node:
    def __init__(self, value, rest=None):
        self.value, self.rest = value, rest
def f(node):
    total = 0
    while node:
        total += node.value
        node = node.rest
    return total
---
class Node:
    def __init__(self, value, rest=None):
        self.value, self.rest = value, rest
assert f(Node(1, Node(2))) == 3
assert f(None) == 0
### instance_passed_back
class Account:
    def __init__(self):
        self.balance = 0
def f(account=None, amount=0):
    account = account or Account()
    account.balance += amount
    return account
---
a = f()
b = f(a, 5)
assert a.balance == 5
assert b is a
assert f(b, 1).balance == 6
### returned_function
def f(n):
    def add(m):
        return n + m
    return add
---
assert f(1)(2) == 3
add = f(10)
assert [add(i) for i in range(3)] == [10, 11, 12]
assert callable(add)
assert add.__name__ == "add"
### returned_lambda_in_list
def f(n):
    return [lambda x, i=i: x * i for i in range(n)]
---
assert [g(2) for g in f(3)] == [0, 2, 4]
### returned_closure_with_state
def f():
    count = 0
    def step():
        nonlocal count
        count += 1
        return count
    return step
---
step, other = f(), f()
assert step() == 1
assert step() == 2
assert other() == 1
### decorator
import functools
def f(function):
    @functools.wraps(function)
    def wrapped(*args):
        return 2 * function(*args)
    return wrapped
---
@f
def three():
    "Three."
    return 3
assert three() == 6
assert three.__name__ == "three"
assert three.__doc__ == "Three."
### function_argument
def f(function, items):
    return [function(item) for item in items]
---
assert f(lambda x: x + 1, [1, 2]) == [2, 3]
assert f(str, [1]) == ["1"]
assert f(len, ["ab"]) == [2]
### builtin_argument
def f(kind, value):
    return isinstance(value, kind)
---
assert f(int, 3)
assert not f(str, 3)
assert f((int, float), 2.5)
### callback_records
def f(items, report):
    for item in items:
        report(item)
---
seen = []
f([1, 2], seen.append)
assert seen == [1, 2]
### key_function_raises
def f(items, key):
    return sorted(items, key=key)
---
def bad(item):
    raise LookupError(item)
try:
    f([1], bad)
    assert False
except LookupError as error:
    assert error.args == (1,)
assert f([2, 1], key=lambda x: -x) == [2, 1]
### coroutine
import asyncio
async def f(n):
    await asyncio.sleep(0)
    return n * 2
---
import asyncio
assert asyncio.run(f(4)) == 8
async def both():
    return await asyncio.gather(f(1), f(2))
assert asyncio.run(both()) == [2, 4]
### async_generator
async def f(n):
    for i in range(n):
        yield i
---
import asyncio
async def collect():
    return [item async for item in f(3)]
assert asyncio.run(collect()) == [0, 1, 2]
### exception_as_value
def f(n):
    return ValueError(f"bad {n}") if n < 0 else n
---
assert isinstance(f(-1), ValueError)
assert str(f(-1)) == "bad -1"
assert f(-1).args == ("bad -1",)
assert f(1) == 1
### exception_as_argument
def f(error):
    return type(error).__name__ + ": " + str(error)
---
assert f(KeyError("a")) == "KeyError: 'a'"
### type_as_value
def f(value):
    return type(value)
---
assert f(1) is int
assert f("x") == str
assert f([]) in (list, tuple)
assert f(1.0).__name__ == "float"
### module_function_as_value
import math, operator
def f(name):
    return {"+": operator.add, "sqrt": math.sqrt}[name]
---
assert f("+")(1, 2) == 3
assert f("sqrt")(9.0) == 3.0
### ellipsis_and_not_implemented
def f(n):
    return [..., NotImplemented, None][n]
---
assert f(0) is ...
assert f(1) is NotImplemented
assert f(2) is None
### sentinel_object
MISSING = object()
def f(d, key):
    return d.get(key, MISSING)
---
a, b = f({}, 1), f({}, 2)
assert a is b
assert f({1: 2}, 1) == 2
assert a is not None
### slice_value
def f(text, cut):
    return text[cut], slice(1, 2)
---
assert f("hello", slice(1, 3)) == ("el", slice(1, 2))
### decimal_result
from decimal import Decimal
def f(a, b):
    return Decimal(a) / Decimal(b)
---
from decimal import Decimal
assert f("1", "4") == Decimal("0.25")
assert f("1", "4") * 4 == 1
assert str(f("1", "8")) == "0.125"
assert isinstance(f("1", "2"), Decimal)
assert f("1", "3").quantize(Decimal("0.01")) == Decimal("0.33")
### decimal_argument
def f(price, rate):
    return (price * (1 + rate)).quantize(price)
---
from decimal import Decimal
assert f(Decimal("10.00"), Decimal("0.2")) == Decimal("12.00")
assert f(price=Decimal("1.00"), rate=1) == 2
### fraction_both_ways
from fractions import Fraction
def f(values):
    return sum(values, Fraction(0)) / len(values)
---
from fractions import Fraction
assert f([Fraction(1, 2), Fraction(1, 3)]) == Fraction(5, 12)
assert f([Fraction(1, 2)]).denominator == 2
assert float(f([Fraction(1, 4)])) == 0.25
### date_both_ways
import datetime
def f(day, days):
    return day + datetime.timedelta(days=days)
---
import datetime
from datetime import date
assert f(date(2024, 2, 28), 1) == date(2024, 2, 29)
assert f(date(2024, 1, 1), 1).isoformat() == "2024-01-02"
assert f(datetime.datetime(2024, 1, 1, 12), 1).hour == 12
assert f(date(2024, 1, 1), 31).month == 2
### time_and_delta
from datetime import datetime, time, timedelta
def f(start, end):
    return end - start, (datetime(2000, 1, 1) + (end - start)).time()
---
from datetime import datetime, time, timedelta
delta, clock = f(datetime(2000, 1, 1), datetime(2000, 1, 2, 1, 30))
assert delta == timedelta(days=1, hours=1, minutes=30)
assert delta.total_seconds() == 91800
assert clock == time(1, 30)
assert delta > timedelta(0)
### aware_datetime
from datetime import datetime, timezone, timedelta
def f(hours):
    return datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=hours)))
---
from datetime import datetime, timezone
assert f(0) == datetime(2024, 1, 1, tzinfo=timezone.utc)
assert f(2).utcoffset().seconds == 7200
assert f(2).astimezone(timezone.utc).hour == 22
### zoneinfo
from datetime import datetime
from zoneinfo import ZoneInfo
def f(name):
    return datetime(2024, 7, 1, 12, tzinfo=ZoneInfo(name)).utcoffset().total_seconds() / 3600
---
assert f("UTC") == 0
assert f("Europe/Berlin") == 2
### complex_result
import cmath
def f(a, b, c):
    d = cmath.sqrt(b * b - 4 * a * c)
    return (-b + d) / (2 * a), (-b - d) / (2 * a)
---
assert f(1, 0, 1) == (1j, -1j)
assert f(1, 0, 1)[0].imag == 1.0
assert abs(f(1, 2, 1)[0] + 1) < 1e-9
### deque_both_ways
from collections import deque
def f(items, k):
    items.rotate(k)
    return deque(items, maxlen=3)
---
from collections import deque
given = deque([1, 2, 3, 4])
result = f(given, 1)
assert given == deque([4, 1, 2, 3])
assert result == deque([1, 2, 3])
assert result.maxlen == 3
assert result.popleft() == 1
assert isinstance(result, deque)
### enum_result
from enum import Enum, IntEnum
class Color(Enum):
    RED = 1
    BLUE = "b"
def f(name):
    return Color[name]
---
assert f("RED").value == 1
assert f("BLUE").name == "BLUE"
assert f("RED") is f("RED")
assert f("RED") != f("BLUE")
assert str(f("RED")) == "Color.RED"
### int_enum_and_flag
from enum import IntEnum, Flag, auto
class Level(IntEnum):
    LOW = 1
    HIGH = 2
def f(n):
    return Level(n)
---
assert f(1) == 1
assert f(2) > 1
assert f(2).name == "HIGH"
assert f(1) + f(2) == 3
### counter_result
from collections import Counter
def f(text):
    return Counter(text)
---
from collections import Counter
assert f("aab") == Counter("baa")
assert f("aab") == {"a": 2, "b": 1}
assert f("aab").most_common(1) == [("a", 2)]
assert f("aab")["z"] == 0
assert (f("aab") - f("a"))["a"] == 1
assert isinstance(f(""), Counter)
### counter_argument
def f(counter):
    counter["z"] += 1
    return counter.total()
---
from collections import Counter
c = Counter("ab")
assert f(c) == 3
assert c["z"] == 1
### ordered_dict
from collections import OrderedDict
def f(pairs):
    return OrderedDict(sorted(pairs))
---
from collections import OrderedDict
assert f([(2, "b"), (1, "a")]) == OrderedDict([(1, "a"), (2, "b")])
assert f([(1, 2), (0, 1)]) != OrderedDict([(1, 2), (0, 1)])
d = f([(1, 1), (2, 2)])
d.move_to_end(1)
assert list(d) == [2, 1]
assert d.popitem(last=False) == (2, 2)
### default_dict_result
from collections import defaultdict
def f(words):
    groups = defaultdict(list)
    for word in words:
        groups[len(word)].append(word)
    return groups
---
groups = f(["a", "bb", "c"])
assert groups == {1: ["a", "c"], 2: ["bb"]}
assert groups[9] == []
assert dict(groups)[1] == ["a", "c"]
### default_dict_argument
def f(graph, a, b):
    graph[a].append(b)
    return len(graph["nowhere"])
---
from collections import defaultdict
graph = defaultdict(list)
assert f(graph, 1, 2) == 0
assert graph == {1: [2], "nowhere": []}
### namedtuple_result
from collections import namedtuple
Point = namedtuple("Point", "x y")
def f(x, y):
    return Point(x, y)
---
p = f(1, 2)
assert p.x == 1
assert p == (1, 2)
assert p._asdict() == {"x": 1, "y": 2}
assert p._replace(x=5) == (5, 2)
assert repr(p) == "Point(x=1, y=2)"
x, y = p
assert (x, y) == (1, 2)
### typed_named_tuple_argument
def f(p):
    return p.x + p.y
---
from typing import NamedTuple
class P(NamedTuple):
    x: int
    y: int = 3
assert f(P(1)) == 4
assert f(P(1, 1)) == 2
### array_both_ways
from array import array
def f(a):
    a.append(4)
    return array("d", a)
---
from array import array
a = array("i", [1, 2])
assert f(a) == array("d", [1, 2, 4])
assert a == array("i", [1, 2, 4])
assert f(a).typecode == "d"
assert f(a).itemsize == 8
### range_both_ways
def f(r):
    return r[::2]
---
assert f(range(6)) == range(0, 6, 2)
assert f(range(6)).step == 2
assert len(f(range(10 ** 12))) == 5 * 10 ** 11
assert 4 in f(range(6))
### bytes_both_ways
def f(data):
    data += b"!"
    return data
---
assert f(b"ab") == b"ab!"
data = bytearray(b"x")
result = f(data)
assert data == bytearray(b"x!")
assert result is data
assert f(b"a")[0] == 97
### uuid_and_path
import pathlib, uuid
def f(text):
    return uuid.UUID(text), pathlib.PurePosixPath("/a") / text
---
text = "12345678-1234-5678-1234-567812345678"
made, path = f(text)
assert str(made) == text
assert made.hex == text.replace("-", "")
assert path.name == text
assert path.parent.as_posix() == "/a"
### mapping_proxy
from types import MappingProxyType, SimpleNamespace
def f(d):
    return MappingProxyType(d), SimpleNamespace(**d)
---
view, space = f({"a": 1})
assert view["a"] == 1
assert dict(view) == {"a": 1}
assert space.a == 1
try:
    view["b"] = 2
    assert False
except TypeError:
    assert True
### nan_and_infinities
def f(name):
    return float(name)
---
import math
assert math.isnan(f("nan"))
assert f("nan") != f("nan")
assert f("inf") == math.inf
assert f("-inf") < 0
### opaque_value_as_member
import re
def f(text):
    return {"number": re.compile(r"\d+"), "text": text, "many": [re.compile("a")]}
---
result = f("x")
assert result["text"] == "x"
assert result["number"].search("a12").group() == "12"
assert result["many"][0].match("abc")
assert set(result) == {"number", "text", "many"}
### opaque_value_as_key
class Key:
    def __init__(self, n):
        self.n = n
    def __hash__(self):
        return self.n
    def __eq__(self, other):
        return self.n == other.n
def f(n):
    return {Key(i): i for i in range(n)}
---
result = f(3)
assert len(result) == 3
assert sorted(key.n for key in result) == [0, 1, 2]
assert sorted(result.values()) == [0, 1, 2]
### special_values_as_keys
from datetime import date
from fractions import Fraction
from decimal import Decimal
def f():
    return {date(2024, 1, 1): 1, Fraction(1, 2): 2, (1, Decimal(2)): 3, frozenset([1]): 4, None: 5, 1.5: 6}
---
from datetime import date
from fractions import Fraction
from decimal import Decimal
result = f()
assert result[date(2024, 1, 1)] == 1
assert result[Fraction(1, 2)] == 2
assert result[(1, Decimal(2))] == 3
assert result[frozenset({1})] == 4
assert result[None] == 5
### enum_keys
from enum import Enum
class Side(Enum):
    LEFT = 1
    RIGHT = 2
def f():
    return {Side.LEFT: "l", Side.RIGHT: "r"}
---
assert {side.name: letter for side, letter in f().items()} == {"LEFT": "l", "RIGHT": "r"}
### set_of_special_values
from fractions import Fraction
def f(n):
    return {Fraction(1, i) for i in range(1, n)}
---
from fractions import Fraction
assert f(3) == {Fraction(1), Fraction(1, 2)}
assert Fraction(1, 2) in f(4)
### alias_in_result
def f():
    row = [0]
    return [row, row]
---
grid = f()
grid[0].append(1)
assert grid[1] == [0, 1]
assert grid[0] is grid[1]
### alias_of_argument_in_result
def f(items):
    items.append(1)
    return items
---
given = []
result = f(given)
assert result is given
result.append(2)
assert given == [1, 2]
### alias_copied_in_result
def f(items):
    return list(items)
---
given = [[1]]
result = f(given)
assert result == given
assert result is not given
assert result[0] is given[0]
### alias_shared_arguments
def f(a, b):
    a.append(1)
    return b
---
shared = []
assert f(shared, shared) == [1]
assert shared == [1]
### alias_nested_argument
def f(grid):
    grid[0][0] = 5
    grid[1]["x"].append(1)
---
inner, cell = [0], []
grid = [inner, {"x": cell}]
f(grid)
assert inner == [5]
assert cell == [1]
assert grid[0] is inner
### alias_repeated_rows
def f(grid):
    grid[0][0] = 1
    return sum(map(sum, grid))
---
grid = [[0] * 2] * 2
assert f(grid) == 2
assert grid == [[1, 0], [1, 0]]
### mutates_keyword_argument
def f(*, out):
    out["a"] = 1
    out.setdefault("list", []).append(2)
---
out = {}
f(out=out)
assert out == {"a": 1, "list": [2]}
f(out=out)
assert out["list"] == [2, 2]
### mutates_set_and_tuple_member
def f(pair):
    pair[0].add(3)
    pair[1].reverse()
---
numbers, items = {1}, [1, 2]
f((numbers, items))
assert numbers == {1, 3}
assert items == [2, 1]
### mutates_then_raises
def f(items):
    items.append(1)
    raise ValueError("after the change")
---
items = []
try:
    f(items)
    assert False
except ValueError:
    assert items == [1]
### mutates_instance_of_the_test
def f(account, amount):
    account.balance += amount
---
class Account:
    balance = 0
account = Account()
f(account, 5)
assert account.balance == 5
### keeps_a_reference
kept = []
def f(item):
    kept.append(item)
    return kept
---
first = []
f(first)
first.append(1)
assert f(2) == [[1], 2]
### cyclic_value
def f():
    items = [1]
    items.append(items)
    return items
---
items = f()
assert items[0] == 1
assert items[1] is items
assert items[1][1][0] == 1
### cyclic_argument
def f(items):
    return items[1] is items
---
items = [1]
items.append(items)
assert f(items)
### error_message
def f(n):
    raise ValueError(f"{n} is bad")
---
try:
    f(3)
    assert False
except ValueError as error:
    assert str(error) == "3 is bad"
    assert error.args == ("3 is bad",)
    assert repr(error) == "ValueError('3 is bad')"
### error_args
def f():
    raise ValueError("a", 2, [3])
---
try:
    f()
    assert False
except ValueError as error:
    assert error.args == ("a", 2, [3])
    assert str(error) == "('a', 2, [3])"
### error_key
def f(d, key):
    return d[key]
---
try:
    f({}, "a")
    assert False
except KeyError as error:
    assert error.args[0] == "a"
    assert str(error) == "'a'"
### error_errno
import errno
def f():
    raise FileNotFoundError(errno.ENOENT, "none such", "x.txt")
---
import errno
try:
    f()
    assert False
except OSError as error:
    assert error.errno == errno.ENOENT
    assert error.strerror == "none such"
    assert error.filename == "x.txt"
    assert isinstance(error, FileNotFoundError)
### error_unicode_is_value_error
def f(data):
    return data.decode("ascii")
---
try:
    f(b"\xff")
    assert False
except ValueError as error:
    assert isinstance(error, UnicodeDecodeError)
    assert error.start == 0
    assert error.encoding == "ascii"
assert f(b"a") == "a"
### error_registered_class
import json
def f(text):
    return json.loads(text)
---
import json
try:
    f("{")
    assert False
except json.JSONDecodeError as error:
    assert error.pos == 1
try:
    f("{")
    assert False
except ValueError:
    assert True
### error_decimal
from decimal import Decimal
def f(text):
    return Decimal(text)
---
from decimal import InvalidOperation
try:
    f("x")
    assert False
except InvalidOperation:
    assert True
### error_own_class_with_attributes
class Refused(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code
def f(n):
    raise Refused(n)
---
try:
    f(7)
    assert False
except Exception as error:
    assert type(error).__name__ == "Refused"
    assert error.code == 7
    assert str(error) == "code 7"
### error_cause
def f():
    try:
        {}[1]
    except KeyError as error:
        raise RuntimeError("outer") from error
---
try:
    f()
    assert False
except RuntimeError as error:
    assert isinstance(error.__cause__, KeyError)
    assert str(error) == "outer"
### error_stop_iteration
def f(items):
    return next(iter(items))
---
try:
    f([])
    assert False
except StopIteration as stop:
    assert stop.value is None
assert f([1]) == 1
### error_system_exit
import sys
def f(code):
    sys.exit(code)
---
try:
    f(3)
    assert False
except SystemExit as stop:
    assert stop.code == 3
### error_assertion_in_the_program
def f(n):
    assert n > 0, "positive, please"
    return n
---
try:
    f(-1)
except AssertionError as error:
    assert str(error) == "positive, please"
else:
    raise RuntimeError("no error")
assert f(1) == 1
### error_recursion
def f(n):
    return f(n + 1)
---
try:
    f(0)
    assert False
except RecursionError:
    assert True
### error_of_wrong_call
def f(a, b):
    return a + b
---
for bad in ((1,), (1, 2, 3), (1, "x")):
    try:
        f(*bad)
        assert False
    except TypeError:
        assert True
assert f(b=1, a=2) == 3
### error_group
def f():
    raise ExceptionGroup("several", [ValueError(1), KeyError(2)])
---
try:
    f()
    assert False
except ExceptionGroup as group:
    assert len(group.exceptions) == 2
    assert group.message == "several"
### error_memorized_and_compared_later
def f(n):
    return [1, 2, 3][n]
---
error = None
try:
    f(9)
except IndexError as caught:
    error = caught
assert error is not None
assert "out of range" in str(error)
### error_warning
import warnings
def f(n):
    warnings.warn("old", DeprecationWarning)
    return n
---
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert f(1) == 1
assert [str(item.message) for item in caught] == ["old"]
### helper_named_check
def check(n):
    return n > 0
def f(items):
    return [n for n in items if check(n)]
---
assert f([1, -1]) == [1]
assert f([]) == []
### dataclass_in_the_test
def f(record):
    return record["a"] + 1
---
from dataclasses import asdict, dataclass
@dataclass
class Record:
    a: int
assert f(asdict(Record(1))) == 2
assert f({"a": Record(3).a}) == 4
### dataclass_of_the_test_as_argument
def f(records):
    return sorted(records, key=lambda r: r.age)[0].name
---
from dataclasses import dataclass
@dataclass
class Person:
    name: str
    age: int
assert f([Person("a", 9), Person("b", 3)]) == "b"
### function_cache_info
from functools import lru_cache
@lru_cache(maxsize=None)
def f(n):
    return n if n < 2 else f(n - 1) + f(n - 2)
---
f.cache_clear()
assert f(10) == 55
assert f.cache_info().misses == 11
assert f.cache_info().hits > 0
### function_name_and_doc
def f(a, b=2, *, c: int = 3) -> int:
    """Adds."""
    return a + b + c
---
import inspect
assert f.__name__ == "f"
assert f.__doc__ == "Adds."
assert f(1) == 6
assert f.__defaults__ == (2,)
assert f.__annotations__["c"] is int
assert list(inspect.signature(f).parameters) == ["a", "b", "c"]
assert callable(f)
### function_attribute_counter
def f(n):
    f.calls += 1
    return n
f.calls = 0
---
f(1)
f(2)
assert f.calls == 2
f.calls = 0
f(1)
assert f.calls == 1
### stdout_redirected
def f(name):
    print(f"hello {name}")
---
import contextlib, io
out = io.StringIO()
with contextlib.redirect_stdout(out):
    f("you")
assert out.getvalue() == "hello you\n"
### stdout_replaced
def f(n):
    for i in range(n):
        print(i, end=" ")
---
import io, sys
saved, sys.stdout = sys.stdout, io.StringIO()
f(3)
text, sys.stdout = sys.stdout.getvalue(), saved
assert text == "0 1 2 "
### stdin_replaced
import sys
def f():
    return sum(int(line) for line in sys.stdin)
---
import io, sys
sys.stdin = io.StringIO("1\n2\n")
assert f() == 3
### input_from_stdin
def f():
    return int(input()) + int(input())
---
import io, sys
sys.stdin = io.StringIO("4\n5\n")
assert f() == 9
### input_patched
def f():
    return input("name? ").upper()
---
from unittest.mock import patch
with patch("builtins.input", return_value="ann"):
    assert f() == "ANN"
with patch("builtins.input", side_effect=["x", "y"]):
    assert f() + f() == "XY"
### input_replaced
def f():
    name = input()
    print("hi", name)
---
import builtins
lines = iter(["bob"])
printed = []
saved = builtins.input, builtins.print
builtins.input, builtins.print = lambda *prompt: next(lines), lambda *words: printed.append(" ".join(words))
try:
    f()
finally:
    builtins.input, builtins.print = saved
assert printed == ["hi bob"]
### seed_set_by_the_test
import random
def f(n):
    return [random.random() for _ in range(n)]
---
import random
random.seed(5)
expected = [random.random() for _ in range(3)]
random.seed(5)
assert f(3) == expected
### seed_twice_the_same
import random
def f(items):
    items = list(items)
    random.shuffle(items)
    return items
---
import random
random.seed(1)
first = f(range(9))
random.seed(1)
assert f(range(9)) == first
assert sorted(first) == list(range(9))
### environment_set_by_the_test
import os
def f():
    return os.environ.get("GREETING", "none")
---
import os
os.environ["GREETING"] = "hi"
assert f() == "hi"
del os.environ["GREETING"]
assert f() == "none"
### time_patched
import time
def f():
    return time.time() + 1
---
from unittest.mock import patch
with patch("time.time", return_value=10.0):
    assert f() == 11.0
### mock_argument
def f(client):
    return client.get("/x").json()["a"]
---
from unittest.mock import Mock
client = Mock()
client.get.return_value.json.return_value = {"a": 1}
assert f(client) == 1
client.get.assert_called_once_with("/x")
### entry_point_lambda
f = lambda n: n * n
---
assert f(3) == 9
assert [f(n) for n in range(3)] == [0, 1, 4]
### entry_point_partial
from functools import partial
f = partial(pow, 2)
---
assert f(5) == 32
assert f.args == (2,)
### entry_point_instance
class Multiplier:
    def __init__(self, k):
        self.k = k
    def __call__(self, n):
        return self.k * n
f = Multiplier(3)
---
assert f(2) == 6
assert f.k == 3
### entry_point_import
from math import gcd as f
---
assert f(12, 18) == 6
assert f(0, 5) == 5
### entry_point_bound_method
class Solution:
    def solve(self, n):
        return n + 1
f = Solution().solve
---
assert f(1) == 2
### entry_point_conditional
import sys
if sys.version_info >= (3, 8):
    def f(n):
        return n
else:
    def f(n):
        return -n
---
assert f(1) == 1
### entry_point_decorated_overload
from functools import singledispatch
@singledispatch
def f(value):
    return "object"
@f.register
def _(value: int):
    return "int"
@f.register(list)
def _(value):
    return "list"
---
assert f(1) == "int"
assert f([]) == "list"
assert f("x") == "object"
### map_over_the_entry_point
def f(n):
    return -n
---
assert list(map(f, [1, 2])) == [-1, -2]
assert sorted([1, 3, 2], key=f) == [3, 2, 1]
from functools import reduce, partial
assert partial(f, 3)() == -3
assert max([1, 2], key=f) == 1
### entry_point_as_its_own_argument
def f(g=None, n=0):
    return n if g is None else g(None, n + 1)
---
assert f(f, 1) == 2
### star_arguments
def f(*args, **kwargs):
    return len(args), sorted(kwargs)
---
assert f(1, *[2, 3], **{"b": 1, "a": 2}) == (3, ["a", "b"])
### lone_surrogate
def f(text):
    return text + "\ud800"
---
assert f("a") == "a\ud800"
assert len(f("\udfff")) == 2
assert [ord(c) for c in f("")] == [0xD800]
### bool_is_not_lost
def f(n):
    return n > 0
---
assert f(1) is True
assert f(0) is False
assert type(f(1)) is bool
assert f(1) + f(1) == 2
assert isinstance(f(0), int)
### type_of_result_checked
from collections import OrderedDict
def f(kind):
    return {"l": [1], "t": (1,), "s": {1}, "o": OrderedDict(a=1), "f": 1.0}[kind]
---
assert isinstance(f("l"), list)
assert isinstance(f("t"), tuple) and not isinstance(f("t"), list)
assert type(f("s")) is set
assert type(f("o")).__name__ == "OrderedDict"
assert isinstance(f("f"), float)
### subclass_of_builtin
class Celsius(float):
    def fahrenheit(self):
        return self * 9 / 5 + 32
class Stack(list):
    def push(self, item):
        self.append(item)
def f(n):
    return Celsius(n), Stack([n])
---
c, s = f(100)
assert c == 100.0
assert c.fahrenheit() == 212
s.push(5)
assert s == [100, 5]
assert isinstance(s, list)
### string_subclass_and_enum
from enum import StrEnum
class Mood(StrEnum):
    GOOD = "good"
def f():
    return Mood.GOOD
---
assert f() == "good"
assert f().upper() == "GOOD"
assert f() in {"good", "bad"}
assert f().name == "GOOD"
### doctest_style_text
def f(rows):
    return "\n".join("|".join(f"{cell:>3}" for cell in row) for row in rows)
---
assert f([[1, 2], [30, 4]]) == "  1|  2\n 30|  4"
assert f([]) == ""
### assert_with_message_that_calls
def f(n):
    return n
---
assert f(1) == 1, f"got {f(1)}"
assert f(2) == 2, ("values", f(3), f(4))
### walrus_and_comprehension
def f(n):
    return n * n
---
assert (value := f(3)) == 9 and value > f(2)
assert all(f(n) >= n for n in range(5))
assert any(f(n) == 16 for n in range(5))
assert {n: f(n) for n in range(3)} == {0: 0, 1: 1, 2: 4}
### almost_equal
def f(values):
    return sum(values) / len(values)
---
import math
def close(a, b, eps=1e-6):
    return abs(a - b) < eps
assert close(f([1, 2, 4]), 7 / 3)
assert math.isclose(f([0.1, 0.2]), 0.15)
assert round(f([1, 1, 2]), 2) == 1.33
### exec_of_snippets
def f(a):
    return a + 1
---
for snippet in ("f(1) == 2", "f(2) == 3"):
    assert eval(snippet)
names = {"f": f}
exec("result = f(10)", names)
assert names["result"] == 11
### weakref_and_identity
class Thing:
    pass
def f(cache={}):
    return cache.setdefault("thing", Thing())
---
a = f()
assert f() is a
assert a == a
assert hash(a) == hash(f())
assert [a].index(f()) == 0
### dates_in_nested_structures
from datetime import date
def f(events):
    return sorted(events, key=lambda e: e["when"])
---
from datetime import date
events = [{"when": date(2024, 5, 1), "what": "b"}, {"when": date(2023, 5, 1), "what": "a"}]
assert f(events)[0] == {"when": date(2023, 5, 1), "what": "a"}
assert [e["what"] for e in f(events)] == ["a", "b"]
assert events[0]["what"] == "b"
### heap_in_place
import heapq
def f(heap, item):
    heapq.heappush(heap, item)
    return heapq.heappop(heap)
---
heap = [1, 5]
assert f(heap, 3) == 1
assert heap == [3, 5]
assert f(heap, 0) == 0
assert heap == [3, 5]
### iterator_argument
def f(items):
    return next(items), list(items)
---
assert f(iter([1, 2, 3])) == (1, [2, 3])
it = iter([1, 2, 3])
next(it)
assert f(it) == (2, [3])
### generator_argument_endless
def f(numbers, limit):
    found = []
    for n in numbers:
        if n > limit:
            return found
        found.append(n)
---
import itertools
assert f(itertools.count(), 3) == [0, 1, 2, 3]
assert f((n * n for n in itertools.count()), 5) == [0, 1, 4]
### argument_of_many_lists
def f(edges):
    edges[-1][0] = -1
    return [[b, a] for a, b in edges]
---
edges = [[i, i + 1] for i in range(30000)]
assert f(edges)[:2] == [[1, 0], [2, 1]]
assert edges[-1] == [-1, 30000]
### argument_and_result_of_many_items
def f(items):
    items.append(0)
    return items[::-1]
---
given = list(range(120000))
assert f(given)[:2] == [0, 119999]
assert len(given) == 120001
### result_changed_by_later_call
log = []
def f(n):
    log.append(n)
    return log
---
first = f(1)
f(2)
assert first == [1, 2]
assert f(3) is first
### frozen_dataclass_in_list
from dataclasses import dataclass, field
@dataclass
class Item:
    name: str
    tags: list = field(default_factory=list)
def f(names):
    return [Item(name) for name in names]
---
items = f(["a", "b"])
assert [item.name for item in items] == ["a", "b"]
items[0].tags.append("x")
assert items[0].tags == ["x"]
assert items[1].tags == []
assert len(items) == 2
### tree_with_recursion_in_the_test
class Tree:
    def __init__(self, value, left=None, right=None):
        self.value, self.left, self.right = value, left, right
def f(items):
    if not items:
        return None
    middle = len(items) // 2
    return Tree(items[middle], f(items[:middle]), f(items[middle + 1:]))
---
def walk(tree):
    return [] if tree is None else [*walk(tree.left), tree.value, *walk(tree.right)]
def depth(tree):
    return 0 if tree is None else 1 + max(depth(tree.left), depth(tree.right))
tree = f(list(range(15)))
assert walk(tree) == list(range(15))
assert depth(tree) == 4
### abstract_types_of_results
def f(kind):
    made = {"gen": (i for i in range(2)), "map": map(str, [1]), "keys": {1: 2}.keys()}
    return {"list": [1], "dict": {}, "str": "a", **made}[kind]
---
from collections.abc import Generator, Iterable, Iterator, KeysView, Mapping, Sequence
import types
assert isinstance(f("gen"), Iterator)
assert isinstance(f("gen"), Generator)
assert isinstance(f("gen"), types.GeneratorType)
assert isinstance(f("map"), Iterable)
assert isinstance(f("keys"), KeysView)
assert isinstance(f("list"), Sequence)
assert isinstance(f("dict"), Mapping)
assert not isinstance(f("gen"), list)
### unpacking_generators
def f(n):
    return (i * i for i in range(n))
---
a, b, *rest = f(5)
assert (a, b, rest) == (0, 1, [4, 9, 16])
assert [*f(2), 7] == [0, 1, 7]
assert max(f(4)) == 9
assert 4 in f(3)
assert list(zip(f(3), "ab")) == [(0, "a"), (1, "b")]
assert sorted(f(3), reverse=True) == [4, 1, 0]
assert print(*f(2)) is None
### long_generator
def f(n):
    for i in range(n):
        yield i
---
assert sum(f(50000)) == 1249975000
assert len(list(f(20000))) == 20000
### many_method_calls
class f:
    def __init__(self):
        self.items = {}
    def put(self, key, value):
        self.items[key] = value
    def get(self, key):
        return self.items.get(key, -1)
---
cache = f()
for i in range(1500):
    cache.put(i, i * i)
assert all(cache.get(i) == i * i for i in range(1500))
assert cache.get(-5) == -1
### many_trivial_calls
def f(n):
    return n + 1
---
for n in range(5000):
    assert f(n) == n + 1
### long_linked_list
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
def f(n):
    head = None
    for i in range(n):
        head = Node(i, head)
    return head
---
node, seen = f(1000), 0
while node:
    seen += node.value
    node = node.next
assert seen == 499500
### json_of_results
from collections import Counter, OrderedDict, namedtuple
P = namedtuple("P", "x y")
def f():
    return {"c": Counter("aab"), "o": OrderedDict(b=1, a=2), "p": P(1, 2), "f": 1.5, "n": None, "t": True}
---
import json
expected = {"c": {"a": 2, "b": 1}, "o": {"b": 1, "a": 2}, "p": [1, 2], "f": 1.5, "n": None, "t": True}
assert json.loads(json.dumps(f())) == expected
assert list(f()["o"]) == ["b", "a"]
### copies_of_results
import copy
class Box:
    def __init__(self, items):
        self.items = items
def f(items):
    return Box(items)
---
import copy
box = f([1, [2]])
shallow, deep = copy.copy(box), copy.deepcopy(box)
box.items[1].append(3)
assert shallow.items == [1, [2, 3]]
assert deep.items == [1, [2]]
### attributes_inspected
class Thing:
    kind = "thing"
    def __init__(self):
        self.a, self._b = 1, 2
def f():
    return Thing()
---
thing = f()
assert hasattr(thing, "a") and not hasattr(thing, "z")
assert getattr(thing, "z", 5) == 5
assert vars(thing) == {"a": 1, "_b": 2}
assert thing.__dict__["a"] == 1
assert type(thing).__name__ == "Thing"
assert thing.__class__.__name__ == "Thing"
assert thing.kind == "thing"
assert "a" in dir(thing)
setattr(thing, "a", 9)
assert thing.a == 9
del thing.a
assert not hasattr(thing, "a")
try:
    thing.a
    assert False
except AttributeError:
    assert True
### instances_sorted_and_compared
from functools import total_ordering
@total_ordering
class Version:
    def __init__(self, text):
        self.parts = tuple(map(int, text.split(".")))
    def __eq__(self, other):
        return self.parts == other.parts
    def __lt__(self, other):
        return self.parts < other.parts
    def __hash__(self):
        return hash(self.parts)
    def __repr__(self):
        return ".".join(map(str, self.parts))
def f(text):
    return Version(text)
---
versions = [f("1.10"), f("1.2"), f("1.9")]
assert [repr(v) for v in sorted(versions)] == ["1.2", "1.9", "1.10"]
assert min(versions) == f("1.2")
assert f("1.0") != f("2.0")
assert f("1.0") in [f("1.0")]
assert {f("1.0"): "a"}[f("1.0")] == "a"
assert f("2.0") >= f("1.9")
assert not f("2.0") is None
### instance_equals_values
class Money:
    def __init__(self, n):
        self.n = n
    def __eq__(self, other):
        return self.n == (other.n if isinstance(other, Money) else other)
    def __int__(self):
        return self.n
    def __float__(self):
        return float(self.n)
    def __round__(self, digits=None):
        return round(self.n, digits)
    def __format__(self, spec):
        return f"${self.n:{spec}}"
    def __index__(self):
        return self.n
def f(n):
    return Money(n)
---
assert f(3) == 3
assert 3 == f(3)
assert int(f(4)) == 4
assert float(f(4)) == 4.0
assert f"{f(5):>3}" == "$  5"
assert [10, 20, 30][f(1)] == 20
assert round(f(5)) == 5
assert list(range(f(2))) == [0, 1]
### instance_iterates_by_itself
class Countdown:
    def __init__(self, n):
        self.n = n
    def __iter__(self):
        return self
    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n + 1
def f(n):
    return Countdown(n)
---
assert list(f(3)) == [3, 2, 1]
c = f(2)
assert next(c) == 2
assert next(c) == 1
assert next(c, "end") == "end"
assert iter(c) is c
### instance_acts_as_mapping
class Config:
    def __init__(self):
        self.data = {"a": 1}
    def __getitem__(self, key):
        return self.data[key]
    def __setitem__(self, key, value):
        self.data[key] = value
    def __delitem__(self, key):
        del self.data[key]
    def keys(self):
        return self.data.keys()
    def __contains__(self, key):
        return key in self.data
    def __len__(self):
        return len(self.data)
    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None
def f():
    return Config()
---
c = f()
c["b"] = 2
assert c["b"] == 2 and c.b == 2
assert dict(c) == {"a": 1, "b": 2}
assert {**c} == {"a": 1, "b": 2}
del c["a"]
assert "a" not in c and len(c) == 1
try:
    c["z"]
    assert False
except KeyError as error:
    assert error.args == ("z",)
### entry_point_dataclass
from dataclasses import dataclass, field
@dataclass
class f:
    name: str
    tags: list = field(default_factory=list)
    def add(self, tag):
        self.tags.append(tag)
---
from dataclasses import asdict, fields, is_dataclass, replace
item = f("a")
item.add("x")
assert item == f("a", ["x"])
assert item.tags == ["x"]
assert repr(f("b")) == "f(name='b', tags=[])"
assert is_dataclass(f)
### entry_point_enum
from enum import Enum
class f(Enum):
    RED = 1
    GREEN = 2
---
assert f(1) is f.RED
assert f["GREEN"].value == 2
assert [color.name for color in f] == ["RED", "GREEN"]
assert len(f) == 2
try:
    f(3)
    assert False
except ValueError:
    assert True
### entry_point_named_tuple
from collections import namedtuple
f = namedtuple("f", "x y", defaults=[0])
---
assert f(1, 2).x == 1
assert f(1) == (1, 0)
assert f._fields == ("x", "y")
assert f._make([3, 4]).y == 4
### entry_point_exception_class
class f(ValueError):
    def __init__(self, code, text="bad"):
        super().__init__(text)
        self.code = code
---
error = f(3)
assert isinstance(error, ValueError)
assert error.code == 3 and str(error) == "bad"
assert issubclass(f, ValueError)
try:
    raise f(4, "worse")
except f as caught:
    assert caught.code == 4
### entry_point_abstract_class
from abc import ABC, abstractmethod
class f(ABC):
    @abstractmethod
    def area(self):
        ...
    def describe(self):
        return f"area {self.area()}"
---
try:
    f()
    assert False
except TypeError:
    assert True
class Square(f):
    def __init__(self, side):
        self.side = side
    def area(self):
        return self.side ** 2
assert Square(3).describe() == "area 9"
assert isinstance(Square(1), f)
### entry_point_with_nested_class
class f:
    class Node:
        def __init__(self, value):
            self.value, self.children = value, []
    LIMIT = 3
    def __init__(self):
        self.root = f.Node("root")
    def add(self, value):
        self.root.children.append(f.Node(value))
        return self.root.children[-1]
---
tree = f()
child = tree.add("a")
assert child.value == "a"
assert tree.root.children[0] is child
assert f.LIMIT == 3
assert f.Node("x").value == "x"
assert isinstance(child, f.Node)
### entry_point_with_slots_and_metaclass
class Meta(type):
    def __len__(cls):
        return 7
class f(metaclass=Meta):
    __slots__ = ("x",)
    def __init__(self, x):
        self.x = x
---
assert len(f) == 7
p = f(1)
assert p.x == 1
try:
    p.y = 2
    assert False
except AttributeError:
    assert True
### singleton
class f:
    _instance = None
    def __new__(cls):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance
---
assert f() is f()
a = f()
a.value = 3
assert f().value == 3
### instances_talk_to_each_other
class f:
    def __init__(self, balance):
        self.balance = balance
    def pay(self, other, amount):
        if amount > self.balance:
            raise ValueError("not enough")
        self.balance -= amount
        other.balance += amount
---
a, b = f(10), f(0)
a.pay(b, 4)
assert (a.balance, b.balance) == (6, 4)
try:
    b.pay(a, 100)
    assert False
except ValueError as error:
    assert str(error) == "not enough"
assert a.balance == 6
### observer_callbacks
class f:
    def __init__(self):
        self.listeners = []
    def listen(self, function):
        self.listeners.append(function)
        return function
    def fire(self, *words):
        return [listener(*words) for listener in self.listeners]
---
bus, seen = f(), []
bus.listen(seen.append)
@bus.listen
def double(x):
    return 2 * x
assert bus.fire(3) == [None, 6]
assert seen == [3]
### iterators_of_iterators
def f(items, size):
    return (iter(items[i:i + size]) for i in range(0, len(items), size))
---
assert [list(chunk) for chunk in f([1, 2, 3], 2)] == [[1, 2], [3]]
outer = f("abcd", 2)
first = next(outer)
assert next(first) == "a"
assert "".join(next(outer)) == "cd"
assert list(first) == ["b"]
### generator_cleans_up
log = []
def f():
    try:
        yield 1
        yield 2
    except ValueError:
        yield "caught"
    finally:
        log.append("closed")
---
g = f()
assert next(g) == 1
assert g.throw(ValueError) == "caught"
g.close()
h = f()
for item in h:
    break
assert item == 1
### generator_raises
def f():
    yield 1
    raise RuntimeError("in the middle")
---
g = f()
assert next(g) == 1
try:
    next(g)
    assert False
except RuntimeError as error:
    assert str(error) == "in the middle"
try:
    list(f())
    assert False
except RuntimeError:
    assert True
### generator_shared_state
def f():
    seen = []
    def add(x):
        seen.append(x)
    def items():
        yield from seen
    return add, items
---
add, items = f()
add(1)
it = items()
add(2)
assert list(it) == [1, 2]
assert list(items()) == [1, 2]
### compose
def f(*functions):
    def composed(x):
        for function in functions:
            x = function(x)
        return x
    return composed
---
assert f(str, len)(12345) == 5
assert f(lambda x: x + 1, lambda x: x * 2)(3) == 8
assert f()(7) == 7
assert f(sorted, tuple)([2, 1]) == (1, 2)
assert f(f(abs), str)(-3) == "3"
### memoize
def f(function):
    cache = {}
    def memo(*args):
        if args not in cache:
            cache[args] = function(*args)
        return cache[args]
    memo.cache = cache
    return memo
---
calls = []
@f
def slow(n):
    calls.append(n)
    return n * n
assert [slow(2), slow(2), slow(3)] == [4, 4, 9]
assert calls == [2, 3]
assert slow.cache == {(2,): 4, (3,): 9}
### retry_with_failures
def f(function, times):
    for i in range(times):
        try:
            return function()
        except OSError:
            if i == times - 1:
                raise
---
state = {"n": 0}
def flaky():
    state["n"] += 1
    if state["n"] < 3:
        raise OSError("again")
    return "done"
assert f(flaky, 5) == "done"
assert state["n"] == 3
def broken():
    raise OSError(5, "io")
try:
    f(broken, 2)
    assert False
except OSError as error:
    assert error.errno == 5
### own_exception_of_the_test
def f(function):
    try:
        return function()
    except KeyError as error:
        return f"key {error.args[0]}"
---
class Mine(KeyError):
    pass
class Other(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code
def raises(error):
    def function():
        raise error
    return function
assert f(raises(Mine("a"))) == "key a"
try:
    f(raises(Other(4)))
    assert False
except Other as error:
    assert error.code == 4
### test_object_returned
def f(items):
    return items[0]
---
class Mine:
    pass
a = Mine()
assert f([a, 1]) is a
assert f([Mine])() is not None
assert f([print]) is print
### library_functions_returned
def f(functions):
    return functions[-1]
---
import math
assert f([len, math.sqrt])(9) == 3
assert f([math.sqrt, len])("ab") == 2
assert f([str.upper])("a") == "A"
### test_object_with_methods
def f(shapes):
    return sum(shape.area() for shape in shapes), max(shapes, key=lambda s: s.area()).name, len(shapes[0])
---
class Square:
    def __init__(self, side):
        self.side, self.name = side, f"square{side}"
    def area(self):
        return self.side ** 2
    def __len__(self):
        return 4
assert f([Square(2), Square(3)]) == (13, "square3", 4)
### test_object_compared
def f(items):
    return sorted(items), items.index(min(items)), len(set(items))
---
from dataclasses import dataclass
@dataclass(order=True, frozen=True)
class Card:
    rank: int
cards = [Card(3), Card(1), Card(3)]
ordered, index, distinct = f(cards)
assert ordered == [Card(1), Card(3), Card(3)]
assert (index, distinct) == (1, 2)
### test_iterable_consumed_twice
def f(items):
    return [x for x in items], [x for x in items]
---
class Pages:
    def __iter__(self):
        return iter([1, 2])
assert f(Pages()) == ([1, 2], [1, 2])
assert f(x for x in (1, 2)) == ([1, 2], [])
### file_like_read_by_lines
def f(handle):
    header = handle.readline().strip()
    return header, [line.split(",") for line in handle.read().splitlines()]
---
import io
handle = io.StringIO("h\n1,2\n3,4\n")
assert f(handle) == ("h", [["1", "2"], ["3", "4"]])
assert handle.read() == ""
assert f(io.StringIO("x"))[1] == []
### bytes_io
import io, zipfile
def f(data):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("a.txt", data)
    out.seek(0)
    return out
---
import zipfile, io
out = f("hello")
assert out.read(2) == b"PK"
assert zipfile.ZipFile(io.BytesIO(out.getvalue())).read("a.txt") == b"hello"
### csv_and_datetime
import csv, io
from datetime import datetime
def f(text):
    rows = csv.DictReader(io.StringIO(text))
    return [{"when": datetime.strptime(row["d"], "%Y-%m-%d"), "n": int(row["n"])} for row in rows]
---
from datetime import datetime
rows = f("d,n\n2024-01-02,3\n")
assert rows == [{"when": datetime(2024, 1, 2), "n": 3}]
assert rows[0]["when"].strftime("%d.%m.%y") == "02.01.24"
assert rows[0]["when"].weekday() == 1
### regex_substitution_with_function
import re
def f(pattern, function, text):
    return re.sub(pattern, function, text)
---
import re
assert f(r"\d+", lambda m: str(int(m.group()) * 2), "a1b22") == "a2b44"
assert f(re.compile("a"), "b", "aa") == "bb"
### matches_iterated
import re
def f(text):
    return re.finditer(r"(\w)=(\d)", text)
---
assert [(m.group(1), int(m.group(2))) for m in f("a=1 b=2")] == [("a", 1), ("b", 2)]
assert [m.start() for m in f("a=1 b=2")] == [0, 4]
assert {m[1]: m[2] for m in f("x=9")} == {"x": "9"}
### thread_results
import threading, queue
def f(n):
    out = queue.Queue()
    threads = [threading.Thread(target=lambda i=i: out.put(i * i)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out
---
out = f(3)
assert sorted(out.get() for _ in range(3)) == [0, 1, 4]
assert out.empty()
### lock_and_future
from concurrent.futures import ThreadPoolExecutor
def f(function, items):
    with ThreadPoolExecutor(2) as pool:
        return [pool.submit(function, item) for item in items]
---
futures = f(str, [1, 2])
assert [future.result() for future in futures] == ["1", "2"]
assert all(future.done() for future in futures)
### callbacks_from_threads
from concurrent.futures import ThreadPoolExecutor
def f(function, items):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, items))
---
assert f(lambda x: x + 1, [1, 2, 3]) == [2, 3, 4]
### async_callbacks
import asyncio
async def f(fetch, names):
    return await asyncio.gather(*[fetch(name) for name in names])
---
import asyncio
async def fetch(name):
    await asyncio.sleep(0)
    return name.upper()
assert asyncio.run(f(fetch, ["a", "b"])) == ["A", "B"]
### async_class
import asyncio
class f:
    def __init__(self):
        self.log = []
    async def __aenter__(self):
        self.log.append("in")
        return self
    async def __aexit__(self, *details):
        self.log.append("out")
    async def work(self, n):
        await asyncio.sleep(0)
        return n * 2
---
import asyncio
async def main():
    async with f() as worker:
        value = await worker.work(4)
    return value, worker.log
assert asyncio.run(main()) == (8, ["in", "out"])
### async_errors_and_timeouts
import asyncio
async def f(n):
    if n < 0:
        raise ValueError("negative")
    await asyncio.sleep(n)
    return n
---
import asyncio
try:
    asyncio.run(f(-1))
    assert False
except ValueError as error:
    assert str(error) == "negative"
async def hurry():
    try:
        await asyncio.wait_for(f(10), 0.01)
    except asyncio.TimeoutError:
        return "late"
assert asyncio.run(hurry()) == "late"
### context_manager_function
from contextlib import contextmanager
@contextmanager
def f(log):
    log.append("in")
    try:
        yield len(log)
    except KeyError:
        log.append("key")
    finally:
        log.append("out")
---
log = []
with f(log) as size:
    assert size == 1
    assert log == ["in"]
assert log == ["in", "out"]
with f(log):
    raise KeyError("x")
assert log[-2:] == ["key", "out"]
### descriptors_of_strings
def f(template):
    return template.format
---
assert f("{}-{a}")(1, a=2) == "1-2"
assert [*map(f("<{}>"), "ab")] == ["<a>", "<b>"]
### string_methods_as_values
def f(name):
    return getattr(str, name)
---
assert f("upper")("a") == "A"
assert list(map(f("strip"), [" a "])) == ["a"]
assert sorted(["b", "A"], key=f("lower")) == ["A", "b"]
### operator_objects
import operator
def f(*fields):
    return operator.itemgetter(*fields)
---
assert f(0)([5, 6]) == 5
assert sorted([(1, "b"), (2, "a")], key=f(1)) == [(2, "a"), (1, "b")]
### big_numbers_both_ways
def f(a, b):
    return a ** b, a / 7, -a
---
assert f(10, 400)[0] == 10 ** 400
assert f(2 ** 70, 1) == (2 ** 70, 2 ** 70 / 7, -(2 ** 70))
assert isinstance(f(True, 1)[0], int)
### decimal_context
from decimal import Decimal, getcontext, localcontext
def f(digits):
    with localcontext() as context:
        context.prec = digits
        return Decimal(1) / Decimal(7)
---
from decimal import Decimal
assert str(f(5)) == "0.14286"
assert f(50) != f(5)
assert f(3).as_tuple().exponent == -3
assert Decimal("NaN").is_nan()
### statistics_and_fractions
import statistics
from fractions import Fraction
def f(values):
    return statistics.mean(values), statistics.stdev(values)
---
from fractions import Fraction
assert f([1, 2, 3])[0] == 2
assert f([Fraction(1, 2), Fraction(3, 2)])[0] == 1
assert abs(f([1.0, 2.0])[1] - 0.7071067) < 1e-6
### sets_of_tuples_and_frozensets
def f(edges):
    return {frozenset(edge) for edge in edges}, {tuple(sorted(edge)) for edge in edges}
---
assert f([(1, 2), (2, 1)]) == ({frozenset({1, 2})}, {(1, 2)})
assert len(f([(1, 2), (3, 4)])[0]) == 2
### nested_defaultdict
from collections import defaultdict
def f(pairs):
    tree = defaultdict(lambda: defaultdict(list))
    for a, b, c in pairs:
        tree[a][b].append(c)
    return tree
---
tree = f([(1, 2, 3), (1, 2, 4)])
assert tree[1][2] == [3, 4]
assert tree == {1: {2: [3, 4]}}
assert tree[9][9] == []
assert {k: dict(v) for k, v in tree.items()}[1] == {2: [3, 4]}
### chain_map_and_user_dict
from collections import ChainMap, UserDict
class Lower(UserDict):
    def __setitem__(self, key, value):
        super().__setitem__(key.lower(), value)
def f():
    d = Lower()
    d["A"] = 1
    return ChainMap({"x": 1}, {"x": 2, "y": 3}), d
---
chain, lower = f()
assert chain["x"] == 1 and chain["y"] == 3
assert sorted(chain) == ["x", "y"]
lower["B"] = 2
assert lower["b"] == 2
assert dict(lower) == {"a": 1, "b": 2}
### heap_of_instances
import heapq
class Task:
    def __init__(self, priority, name):
        self.priority, self.name = priority, name
    def __lt__(self, other):
        return self.priority < other.priority
def f(pairs):
    heap = [Task(*pair) for pair in pairs]
    heapq.heapify(heap)
    return heap
---
import heapq
heap = f([(3, "c"), (1, "a"), (2, "b")])
assert [heapq.heappop(heap).name for _ in range(3)] == ["a", "b", "c"]
### printed_and_returned
def f(n):
    print("working", n)
    return n * 2
---
import io
from contextlib import redirect_stdout
out = io.StringIO()
with redirect_stdout(out):
    value = f(2)
    assert f(3) == 6
assert value == 4
assert out.getvalue().split() == ["working", "2", "working", "3"]
### stderr_and_logging
import logging, sys
def f(n):
    logging.getLogger("app").warning("careful %d", n)
    print("oops", file=sys.stderr)
    return n
---
import io
from contextlib import redirect_stderr
err = io.StringIO()
with redirect_stderr(err):
    assert f(1) == 1
assert "oops" in err.getvalue()
### patched_function_of_the_library
import random
def f(items):
    return random.choice(items)
---
from unittest.mock import patch
with patch("random.choice", side_effect=lambda items: items[-1]):
    assert f([1, 2, 3]) == 3
assert f([4]) == 4
### argv_set_by_the_test
import sys
def f():
    return sys.argv[1:]
---
import sys
sys.argv = ["prog", "-v", "x"]
assert f() == ["-v", "x"]
### recursion_limit_set_by_the_test
def f(n):
    return 1 + f(n - 1) if n else 0
---
import sys
sys.setrecursionlimit(5000)
assert f(2000) == 2000
### typed_dict_and_protocol
from typing import NamedTuple, Optional, TypedDict
class Movie(TypedDict):
    name: str
    year: int
class Pair(NamedTuple):
    a: int
    b: Optional[int] = None
def f(name: str) -> Movie:
    return Movie(name=name, year=1)
---
import typing
assert f("x") == {"name": "x", "year": 1}
assert typing.get_type_hints(f)["name"] is str
### yields_in_nested_calls
def walk(tree):
    if isinstance(tree, list):
        for item in tree:
            yield from walk(item)
    else:
        yield tree
def f(tree):
    return walk(tree)
---
assert list(f([1, [2, [3, []]], 4])) == [1, 2, 3, 4]
assert next(f([[7]])) == 7
### positional_only_and_defaults
def f(a, /, b=[], *, c=None):
    b.append(a)
    return b, c
---
assert f(1) == ([1], None)
assert f(2) == ([1, 2], None)
assert f(3, [], c=4) == ([3], 4)
try:
    f(a=1)
    assert False
except TypeError:
    assert True
### global_counter_of_the_program
count = 0
def f():
    global count
    count += 1
    return count
---
assert [f() for _ in range(3)] == [1, 2, 3]
assert f() == 4
### complex_aliasing_through_calls
class f:
    def __init__(self, grid):
        self.grid = grid
    def set(self, r, c, value):
        self.grid[r][c] = value
    def row(self, r):
        return self.grid[r]
---
grid = [[0, 0], [0, 0]]
board = f(grid)
board.set(0, 1, 5)
assert board.row(0) == [0, 5]
board.row(1)[0] = 7
assert board.grid[1] == [7, 0]
### complex_aliasing_of_the_tests_argument
class f:
    def __init__(self, items):
        self.items = items
    def add(self, item):
        self.items.append(item)
---
items = []
holder = f(items)
holder.add(1)
assert items == [1]
items.append(2)
assert holder.items == [1, 2]
'''

_PARTS = re.split(r"^### (\w+)\n", _TEXT, flags=re.MULTILINE)
SEAMS: dict[str, tuple[str, str]] = {
    name: (program, test)
    for name, text in zip(_PARTS[1::2], _PARTS[2::2], strict=True)
    for program, test in [text.split("---\n")]
}
"""Source and test by name."""

_IMPOSSIBLE = """
error_warning
instance_equals_values
instance_acts_as_mapping
entry_point_exception_class
own_exception_of_the_test
async_callbacks
async_errors_and_timeouts
patched_function_of_the_library
"""
IMPOSSIBLE = frozenset(_IMPOSSIBLE.split())
"""Those that the sandbox does not pass in full; most would make an object of a program the judge of a test."""

_FORGEABLE = """
entry_point_abstract_class
regex_substitution_with_function
class_subclassed_by_the_test
"""
FORGEABLE = frozenset(_FORGEABLE.split())
"""Those whose verdict may be forgeable."""
