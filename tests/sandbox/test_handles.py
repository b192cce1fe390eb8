# ruff: noqa: E501
"""A handle answers for itself only: it cannot judge a value of the test, and gives nothing of the test away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.sandboxes.jail import wire
from magrpo.sandboxes.jail.exports import check_operation, grant
from magrpo.sandboxes.jail.peer import Answered, Peer
from magrpo.sandboxes.pool import Pool
from magrpo.types import Execution

from .conftest import open_pool
from .world import TESTER_MEMORY

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
    "f() == 5", "5 == f()", "[f()] == [5]", "(1, f()) == (1, 5)", "{'k': f()} == {'k': 5}", "f() in (4, 5)", "f() in {5: 1}",
    "5 in f()", "f() < 6 and f() > 4", "4 < f() < 6", "abs(f() - 5) < 1e-6", "5 - f() == 0", "f() - 5 == 0", "not f() - 5",
    "(f() * 5).value == 25", "str(f() * 5) == '25'", "len(f() * 5) == 3 and list(f()) == [5, 5, 5]", "f() + 1 == 6",
    "f()[0] == 5", "f().value == 5", "f().get() == 5", "sorted(f()) == [5, 5, 5]", "list(f()) == [5, 5, 5]", "f() ^ 5 == 0",
    "isinstance(f(), int) and f() == 5", "max(f(), 5) == 5 and min(f(), 5) == 5", "sum(f()) == 15", "f() % 5 == 0",
    "__import__('math').isclose(f(), 5)", "int(f()) == 5", "type(f()) is int", "f().__class__ is bool", "f() is True",
    "any(f() == n for n in range(100))", "x(f()) in tuple(range(-3, 50)) and x(f()) == 7",
]  # fmt: skip


@pytest.mark.parametrize("expression", ASSERTS)
@pytest.mark.parametrize("program", [JUDGE, NUMBER], ids=["judge", "number"])
def test_an_object_that_agrees_with_everything_passes_nothing(pool: Pool, program: str, expression: str) -> None:
    source = f"{program}\ndef f():\n    return E(-7) if issubclass(E, int) else E()\n"
    test = f"kept = []\ndef x(value):\n    kept[:] = kept or [value]\n    return kept[0]\nassert {expression}"
    [report] = pool.run([Execution(source, "f", test)])
    assert (report.tests_passed, report.forgeable) == (0, False), report.cases
    assert report.status != "infra_error"


OBJECTS = """
import io
SECRET = 'expected-secret'
class Thing:
    shown = 3
    _hidden = SECRET
    def method(self):
        return 4
def generate():
    own = SECRET
    yield 1
def function(n=SECRET):
    return SECRET and 1
objects = [function, generate(), Thing(), Thing, io.StringIO("text"), lambda: (lambda: SECRET), Thing().method]
for thing in objects:
    assert f(thing) == SECRET
assert SECRET == 'expected-secret'
"""
SEARCH = """
NAMES = ['__globals__', '__code__', '__defaults__', '__closure__', '__self__', '__func__', '__dict__', '__class__', '_hidden',
         'gi_frame', 'gi_code', '__wrapped__', '__init__', '__reduce__', '__getattribute__', '__builtins__', '__subclasses__',
         '__call__', 'buffer', '__annotations__', '__kwdefaults__', '__mro__', '__bases__', '__doc__']
def search(thing, depth):
    if isinstance(thing, str):
        return thing if thing.startswith('expected-') else None
    if depth == 0:
        return None
    for name in NAMES:
        try:
            found = getattr(thing, name)
        except Exception:
            continue
        if found is not thing and (result := search(found, depth - 1)):
            return result
    for ask in (lambda: vars(thing), lambda: thing(), lambda: next(thing), lambda: dir(thing), lambda: thing.throw(ValueError)):
        try:
            found = ask()
        except Exception:
            continue
        if isinstance(found, dict):
            found = found.get('SECRET')
        if result := search(found, depth - 1):
            return result
def f(thing):
    return search(thing, 2)
"""


def test_what_a_test_passes_to_a_program_gives_nothing_away(pool: Pool) -> None:
    [report] = pool.run([Execution(SEARCH, "f", OBJECTS)])
    statuses = [case.status for case in report.cases]
    assert len(statuses) == 7
    assert not report.forgeable
    assert statuses.count("pass") == 1, report.cases  # the function that returns the secret when it is called twice


FRAMES = [
    '["ask", "getattr", ["t", ["H", 0], "__globals__"]]', '["ask", "call", ["t", ["H", 99], ["t"], ["t"]]]', '["ask"]',
    '["ask", [], []]', '["ask", "call", null]', '["ask", "data", ["t", ["H", 0]]]', '["ask", "getattr", ["t", ["H", -1], "x"]]',
    '["ask", "getattr", ["t", ["g", "builtins", "exec"], "x"]]', '["ask", "call", ["t", ["g", "builtins", "open"], ["t", "/x"]]]',
    '[3, "ok", ["h", 9, "E", "builtins.object", ["eq"], true], [[0, ["l"]]], 0]', '[3, "ok", 1, [[-1, ["l"]]], 0]',
    '[3, "exception", ["Abort", "Abort", "", null], [], 0]', '[3, "exception", ["int", "", "", null], [], 0]',
    '[3, "exception", ["ValueError", "V", "x", [["os", "system"], 1, 2, 3]], [], 0]', '[3, "ok", ["h", 9], [], 0]',
    '[3, "ok", ["h", 0, "E", "builtins.nothing", [], 1], [], 0]', '[3, "ok", ["h", 7, 8, [], {}, 1], [], 0]',
    '[3, "exception", ["ValueError", "V", "x", [null, ["l"], 5, null]], [], 0]', '[0, ["x"], null, null, 0]',
]  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("at_load", [False, True], ids=["call", "load"])
def test_forged_frames_are_the_verdict_of_their_program(pool: Pool, frame: str, at_load: bool) -> None:
    send = (
        f"import os, struct\ndef send():\n    b = {frame.encode()!r}\n    os.write(3, struct.pack('>I', len(b)) + b)\n"
    )
    source = send + ("send()\n" * at_load) + "def f(g):\n    send()\n    return 5\n"
    test = "try:\n    assert f(lambda: 1) == 7\nexcept Exception:\n    assert True\nassert f(lambda: 1) == 6"
    [report] = pool.run([Execution(source, "f", test)])
    assert report.tests_passed == 0, report.cases
    assert report.status in ("protocol", "wrong", "exception"), report.cases


ENDLESS = {
    "iterator": ("def f():\n    while True:\n        yield 1\n", "assert list(f()) == [1]"),
    "large items": ("def f():\n    while True:\n        yield 'x' * 100000\n", "assert list(f()) == [1]"),
    "chain": (
        "class N:\n    @property\n    def next(self):\n        return N()\ndef f():\n    return N()\n",
        "node = f()\nwhile node:\n    node = node.next\nassert node is None",
    ),
    "calls back": (
        "def f(g=None):\n    while True:\n        g(1)\n",
        "assert f(lambda n: n) == 1",
    ),
    "calls to and fro": (
        "def f(g=None):\n    return g(lambda h: g(h))\n",
        "def back(h):\n    return h(back)\nassert f(back) == 1",
    ),
    "length": (
        "class N:\n    def __len__(self):\n        return 10 ** 15\ndef f():\n    return N()\n",
        "assert 'x' * len(f()) == 'y'",
    ),
    "hash": (
        "class N:\n    __hash__ = lambda self: 1\n    __eq__ = lambda self, other: False\ndef f():\n    return [N() for _ in range(3000)]\n",
        "assert len(set(f())) == 1",
    ),
    "range": ("def f():\n    return range(10 ** 8)\n", "assert list(f()) == [1]"),
    "large values": ("def f():\n    return ['x'] * 60000\n", "x = [f() for k in range(40)]\nassert x == 1"),
    "power": ("def f():\n    return 10 ** 6\n", "assert 7 ** (f() * f()) == 1"),
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Pool]:
    pool = open_pool(workers=1, test_s=0.2, total_s=0.4)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_charged_to_its_program(impatient: Pool, name: str) -> None:
    source, test = ENDLESS[name]
    reports = impatient.run(
        [
            Execution(source, "f", f"{test}\nassert f() == 5"),
            Execution("def f():\n    return 5", "f", "assert f() == 5"),
        ]
    )
    assert reports[0].tests_passed == 0
    assert reports[0].tests_total >= 2
    assert reports[0].status in ("timeout", "output_limit", "wrong", "exception", "protocol", "memory"), reports[
        0
    ].cases
    assert reports[1].status == "pass"
    [worker] = impatient.alive
    assert worker.tester_memory <= TESTER_MEMORY


ANSWERS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from(["x", "ValueError", "json.decoder", "eq", "builtins.int"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(st.sampled_from(["h", "H", "&", "l", "t", "x", "g", "n"]), st.lists(inner, max_size=6)).map(
            lambda pair: [pair[0], *pair[1]]
        )
    ),
    max_leaves=25,
)


@given(st.sampled_from(["ok", "exception"]), ANSWERS, ANSWERS, ANSWERS)
def test_any_answer_is_a_value_an_exception_or_refused(
    status: str, value: object, changes: object, question: object
) -> None:
    """So is any question about an object of the test."""

    def ask(*_: object) -> object:
        raise AssertionError("decoding asks nothing")

    peer = Peer(ask, grant, check_operation)
    peer.export(lambda: 0)
    peer.write_question(([1], {2: 3}))
    with suppress(wire.WireError, Answered):
        peer.read_answer(status, value, changes)
    for operation in ("call", "getattr", "take", "data", "setattr", "instancecheck", "patched"):
        with suppress(wire.WireError):
            answer = peer.serve(operation, question, changes, status == "ok")
            assert answer[0] in ("ok", "exception", "output_limit", "memory")
