# ruff: noqa: E501
"""A test that needs more than plain data runs in the program's process: it passes there, and the report says so."""

from __future__ import annotations

import pytest

from magrpo.rewards.coding import SoloReward
from magrpo.sandboxes.pool import Pool
from magrpo.types import Execution, ExecutionReport

from .conftest import open_pool

JUDGE = """
class E:
    def __getattr__(self, name):
        return E()
    def __call__(self, *args, **kwargs):
        return E()
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, other: True
    __hash__ = lambda self: 5
    __sub__ = __rsub__ = __add__ = __radd__ = __mod__ = __xor__ = lambda self, other: 0.0
    __mul__ = __rmul__ = __truediv__ = lambda self, other: E()
    __abs__ = __neg__ = lambda self: 0.0
    __iter__ = lambda self: iter([E(), E(), E()])
    __len__ = lambda self: 3
    __getitem__ = lambda self, key: E()
    __float__ = lambda self: 0.0
"""
NUMBER = """
class E(int):
    guess = 0
    def name(self):
        pass
    def __pos__(self):
        E.guess += 1
        return E.guess
    __sub__ = __rsub__ = lambda self, other: 0
    __eq__ = lambda self, other: True
    __hash__ = lambda self: 5
"""
ASSERTS = [
    "f() == 5", "5 == f()", "[f()] == [5]", "(1, f()) == (1, 5)", "{'k': f()} == {'k': 5}", "f() in (4, 5)",
    "f() in {5: 1}", "5 in f()", "f() < 6 and f() > 4", "4 < f() < 6", "abs(f() - 5) < 1e-6", "5 - f() == 0",
    "not f() - 5", "(f() * 5).value == 25", "str(f() * 5) == '25'", "f() + 1 == 6", "f()[0] == 5", "f().value == 5",
    "f().get() == 5", "sorted(f()) == [5, 5, 5]", "list(f()) == [5, 5, 5]", "f() ^ 5 == 0",
    "isinstance(f(), int) and f() == 5", "max(f(), 5) == 5 and min(f(), 5) == 5", "sum(f()) == 15", "f() % 5 == 0",
    "__import__('math').isclose(f(), 5)", "int(f()) == 5", "type(f()) is int", "f().__class__ is bool", "f() is True",
    "any(f() == n for n in range(100))",
]  # fmt: skip


@pytest.mark.parametrize("program", [JUDGE, NUMBER], ids=["judge", "number"])
def test_an_object_that_agrees_with_everything_earns_nothing(pool: Pool, program: str) -> None:
    source = f"{program}\ndef f():\n    return E(-7) if issubclass(E, int) else E()\n"
    reports = pool.run([Execution(source, "f", f"assert {expression}") for expression in ASSERTS])
    for expression, report in zip(ASSERTS, reports, strict=True):
        assert report.tests_passed == 0 or report.forgeable, expression
        assert report.status != "infra_error"
        assert not SoloReward().passed({"program": report}), "refused unless reward.refuse_forgeable is set to false"
    by_expression = dict(zip(ASSERTS, reports, strict=True))
    assert by_expression["abs(f() - 5) < 1e-6"].forgeable, "the corpus reaches the program's process"


@pytest.mark.parametrize(
    "expression",
    [
        "f() == 5", "[f()] == [5]", "f() in (4, 5)", "f() is True", "f() != f", "f() == None", "f() == 0.5", "f() == {1: 'a'}",
        "f() == {'a'}", "f() == b'a'", "f() == int", "f() == range(3)", "f() == [[1], (2, ...)]",
        "f() == __import__('datetime').date(2000, 1, 1)",
        "f() == __import__('collections').namedtuple('P', 'x')(1)", "f() == __import__('collections').deque([1])",
    ],
)  # fmt: skip
def test_an_object_that_is_only_compared_with_data_leaves_the_test_apart(pool: Pool, expression: str) -> None:
    """So that a program that returns a function by mistake keeps the other tests that it passes."""
    source = "def f(n=0):\n    return n or f\n"
    [report] = pool.run([Execution(source, "f", f"assert f(7) == 7\nassert {expression}")])
    assert not report.forgeable
    assert report.cases[0].status == "pass"


HONEST = {
    "calls a function of the test": ("def f(g):\n    return g(1)\n", "assert f(lambda n: n + 1) == 2"),
    "is passed a module": ("def f(m):\n    return m.sep\n", "import os\nassert f(os) == '/'"),
    "generates": ("def f(n):\n    yield from range(n)\n", "assert list(f(3)) == [0, 1, 2]"),
    "maps": ("def f(n):\n    return map(str, range(n))\n", "assert ''.join(f(3)) == '012'"),
    "is a class": (
        "class f:\n    def __init__(self):\n        self.items = []\n    def push(self, n):\n        self.items.append(n)\n",
        "stack = f()\nstack.push(3)\nassert stack.items == [3]\nassert isinstance(stack, f)\nassert f() is not f()",
    ),
    "is a class, without asserts": ("class f:\n    pass\n", "f()"),
    "is an enumeration": ("import enum\nclass f(enum.Enum):\n    A = 1\n", "assert [m.value for m in f] == [1]"),
    "is derived from": (
        "class f:\n    def name(self):\n        return 'f'\n",
        "class G(f):\n    pass\nassert G().name() == 'f'",
    ),
    "returns an instance": (
        "class P:\n    def __init__(self, x):\n        self.x = x\ndef f(x):\n    return P(x)\n",
        "assert f(3).x == 3",
    ),
    "takes an instance of the test's class": (
        "def f(p):\n    return p.x\n",
        "class P:\n    x = 3\nassert f(P()) == 3",
    ),
    "returns a number with a name": ("import enum\nclass E(enum.IntEnum):\n    A = 1\ndef f():\n    return E.A\n", "assert f() == 1"),
    "compares its own objects": (
        "class P:\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 1\ndef f():\n    return P()\n",
        "assert f() == f()\nassert len({f(), f()}) == 1",
    ),
    "returns an array": ("import array\ndef f():\n    return array.array('i', [1])\n", "import array\nassert f() == array.array('i', [1])"),
    "returns a namespace": (
        "from types import SimpleNamespace as N\ndef f():\n    return N(a=1)\n",
        "from types import SimpleNamespace as N\nassert N(a=1) == f()",
    ),
    "returns an ellipsis": ("def f():\n    return [1, ...]\n", "assert f() == [1, ...]"),
    "returns a pattern": ("import re\ndef f():\n    return re.compile('a')\n", "import re\nassert f() == re.compile('a')"),
    "returns a generic type": ("def f():\n    return list[int]\n", "assert f() == list[int]"),
    "returns a function of the library": ("import math\ndef f():\n    return math.sqrt\n", "import math\nassert f() == math.sqrt"),
    "returns a class": ("from decimal import Decimal\ndef f():\n    return [Decimal]\n", "from decimal import Decimal\nassert f() == [Decimal]"),
    "returns a view of bytes": ("def f():\n    return memoryview(b'ab')\n", "assert f() == b'ab'"),
    "returns a view of a dict": ("from types import MappingProxyType\ndef f():\n    return MappingProxyType({1: 2})\n", "assert f() == {1: 2}"),
    "returns a dict of the library": ("from collections import UserDict\ndef f():\n    return UserDict({1: 2})\n", "assert f() == {1: 2}"),
    "returns a text of the library": ("from collections import UserString\ndef f():\n    return UserString('a')\n", "assert f() == 'a'"),
    "has an attribute": ("def f():\n    f.calls += 1\nf.calls = 0\n", "f()\nassert f.calls == 1"),
    "remembers": (
        "from functools import lru_cache\n@lru_cache\ndef f(n):\n    return n\n",
        "assert f(1) == 1\nassert f.cache_info().misses == 1",
    ),
    "prints": (
        "def f():\n    print('hello')\n",
        "import io\nfrom contextlib import redirect_stdout\nwith redirect_stdout(io.StringIO()) as out:\n    f()\n"
        "assert out.getvalue() == 'hello\\n'",
    ),
    "asks": ("def f():\n    return input('? ')\n", "import builtins\nbuiltins.input = lambda _: 'yes'\nassert f() == 'yes'"),
    "raises what has an attribute": (
        "class Odd(ValueError):\n    def __init__(self, n):\n        super().__init__('odd')\n        self.n = n\n"
        "def f(n):\n    raise Odd(n)\n",
        "try:\n    f(3)\n    assert False\nexcept ValueError as error:\n    assert error.n == 3\n    assert str(error) == 'odd'",
    ),
    "raises a group": (
        "def f():\n    raise ExceptionGroup('two', [ValueError(1)])\n",
        "try:\n    f()\n    assert False\nexcept* ValueError:\n    assert True",
    ),
    "has a signature": (
        "def f(a, b=2):\n    f.calls = 1\n    return a\n",
        "import inspect\nassert list(inspect.signature(f).parameters) == ['a', 'b']\nassert f(1) == 1\nassert f.calls == 1",
    ),
    "has the signature of its decorator": (
        "from functools import wraps\ndef count(g):\n    @wraps(g)\n    def counted(*args):\n        return g(*args)\n"
        "    return counted\n@count\ndef f(a, b):\n    return a\n",
        "from inspect import signature\nassert str(signature(f)) == '(a, b)'\nassert f.__wrapped__(3, 4) == 3",
    ),
    "is asynchronous": ("async def f(n):\n    return n\n", "import asyncio\nassert asyncio.run(f(3)) == 3"),
    "defines what the test reads": ("LIMIT = 3\ndef f(n):\n    return min(n, LIMIT)\n", "assert f(9) == LIMIT"),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(pool: Pool) -> dict[str, ExecutionReport]:
    executions = [Execution(source, "f", test) for source, test in HONEST.values()]
    return dict(zip(HONEST, pool.run(executions), strict=True))


@pytest.mark.parametrize("name", HONEST)
def test_objects_bring_the_test_into_the_programs_process(reports: dict[str, ExecutionReport], name: str) -> None:
    report = reports[name]
    assert report.status == "pass", report.cases
    assert report.forgeable
    assert not SoloReward().passed({"program": report})
    assert SoloReward(refuse_forgeable=False).passed({"program": report})


def test_a_program_that_died_before_its_object_is_used_is_loaded_again(pool: Pool) -> None:
    source = "import os\nclass P:\n    x = 3\ndef f(n):\n    if n == 'die':\n        os._exit(1)\n    return P() if n else 5\n"
    test = "p = f(1)\nassert f('die') == 1\nassert f('die') == 2\nassert p.x == 3\n"
    reports = pool.run([Execution(source, "f", test), Execution(source, "f", "assert f(0) == 5")])
    assert [(report.tests_total, report.status, report.forgeable) for report in reports] == [
        (3, "crash", True),
        (1, "pass", False),
    ]


def test_a_test_that_begins_again_has_all_of_its_time() -> None:
    source = (
        "import time\ndef f(n):\n    end = time.process_time() + 0.5\n    while time.process_time() < end:\n        pass\n"
        "    return n or iter([1])\n"
    )
    pool = open_pool(workers=1, test_s=1.6, total_s=1.6)
    [report] = pool.run([Execution(source, "f", "assert f(1) == 1\nassert list(f(0)) == [1]")])
    pool.close()
    assert (report.status, report.forgeable) == ("pass", True), report.cases


PLAIN = {
    "an object that is true": ("import re\ndef f(s):\n    return re.match('x', s)\n", "assert f('x')\nassert not f('y')"),
    "a class of the library as argument": ("def f(kind, n):\n    return kind(n)\n", "assert f(str, 3) == '3'"),
    "an own exception": (
        "class Odd(KeyError):\n    pass\ndef f():\n    raise Odd('x', 2)\n",
        "try:\n    f()\n    assert False\nexcept LookupError as error:\n    assert error.args == ('x', 2)\n"
        "    assert type(error).__name__ == 'Odd'",
    ),
    "an exception that holds an object": (
        "def f():\n    raise ValueError(f)\n",
        "try:\n    f()\n    assert False\nexcept ValueError as error:\n    assert 'function' in str(error)",
    ),
    "an exception of the library": (
        "import json\ndef f(s):\n    return json.loads(s)\n",
        "import json\ntry:\n    f('{')\n    assert False\nexcept json.JSONDecodeError as error:\n"
        "    assert 'Expecting' in str(error)",
    ),
    "an exception of the system": (
        "def f():\n    raise FileNotFoundError(2, 'none', 'x.txt')\n",
        "try:\n    f()\n    assert False\nexcept OSError as error:\n    assert (error.errno, error.filename) == (2, 'x.txt')",
    ),
    "many items, in both directions": (
        "def f(items):\n    items.reverse()\n    return items[::-1]\n",
        "items = list(range(120000))\nassert len(f(items)) == 120000\nassert items[0] == 119999",
    ),
    "more items than an answer may have": (
        "def f(items):\n    return sum(items)\n",
        "assert f(list(range(300000))) == 44999850000",
    ),
    "a function that makes missing items": (
        "from collections import defaultdict\ndef f():\n    found = defaultdict(lambda: 0)\n    found['x'] += 1\n    return found\n",
        "assert f() == {'x': 1}",
    ),
    "a changed argument that is returned": (
        "def f(items):\n    items.append(len(items))\n    return items\n",
        "items = []\nassert f(items) is items\nassert items == [0]",
    ),
    "a seed": ("import random\ndef f():\n    return random.random()\n", "import random\nrandom.seed(7)\nx = f()\nrandom.seed(7)\nassert x == random.random()"),
    "no arguments": ("import sys\ndef f():\n    return sys.argv\n", "assert f() == ['']"),
    "arguments set in place": (
        "import sys\ndef f():\n    return sys.argv[1:]\n",
        "import sys\nsys.argv[1:] = ['a']\nassert f() == ['a']\nsys.argv.append('b')\nassert f() == ['a', 'b']\n"
        "sys.argv = ['x', 'c']\nassert f() == ['c']",
    ),
    "the environment": ("import os\ndef f():\n    return os.environ['X']\n", "import os\nos.environ['X'] = 'y'\nassert f() == 'y'"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_leaves_the_test_apart(pool: Pool, name: str) -> None:
    source, test = PLAIN[name]
    [report] = pool.run([Execution(source, "f", test)])
    assert report.status == "pass", report.cases
    assert not report.forgeable


FRAMES = [
    '[2, "ok", ["opaque", "x", true, 1], [], 0]', '[2, "ok", ["opaque"], [], 0]', '[2, "ok", 1, [[-1, ["l"]]], 0]',
    '[2, "ok", 1, [[9, ["l"]]], 0]', '[2, "ok", 1, [["x", ["l"]]], 0]', '[2, "ok", ["n", "P", [[]], 1], [], 0]',
    '[2, "exception", ["Abort", "Abort", "", null], [], 0]', '[2, "exception", ["int", "", "", null], [], 0]',
    '[2, "exception", ["ValueError", "V", "x", [["os", "system"], 1, 2]], [], 0]', '[2, "ok", ["&", 9], [], 0]',
    '[2, "exception", ["ValueError", "V", "x", [null, ["l"], 5]], [], 0]', '[0, ["x"], null, null, 0]',
    '[2, "exception", ["ValueError", "V", "x", [[[], {}], null, 5]], [], 0]', '["ask", "call", null]', '["ask"]',
]  # fmt: skip


@pytest.mark.parametrize("at_load", [False, True], ids=["call", "load"])
def test_forged_frames_are_the_verdict_of_their_program(pool: Pool, at_load: bool) -> None:
    test = "try:\n    assert f(1) == 7\nexcept Exception:\n    assert True\nassert f(1) == 6"
    sources = [
        f"import os, struct\ndef send():\n    b = {frame.encode()!r}\n    os.write(3, struct.pack('>I', len(b)) + b)\n"
        + ("send()\n" * at_load)
        + "def f(n):\n    send()\n    return 5\n"
        for frame in FRAMES
    ]
    for frame, report in zip(FRAMES, pool.run([Execution(source, "f", test) for source in sources]), strict=True):
        assert report.tests_passed == 0, (frame, report.cases)
        assert report.status in ("protocol", "wrong", "exception"), (frame, report.cases)
