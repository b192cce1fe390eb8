"""The rules of credit, on test code that runs in this process against a plain function."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from magrpo.sandboxes.instrument import instrument_test
from magrpo.sandboxes.jail.candidate import Local
from magrpo.sandboxes.jail.recorder import MAX_CASES, CandidateFailure, Unusable, run_test_code


def verdicts(test: str, function: Callable[..., Any], entry_point: str = "f") -> list[str]:
    """Statuses of the cases."""
    cases = run_test_code(base64.b64decode(instrument_test(test, entry_point).code), entry_point, Local(function), {})
    return [status for status, _ in cases]


def one_more(n: int) -> int:
    return n + 1


def always_raises(*_: Any) -> Any:
    raise ValueError("no")


def always_fails(*_: Any) -> Any:
    raise AssertionError("no")


def never_answers(*_: Any) -> Any:
    raise CandidateFailure("timeout", "no answer")


PASS, WRONG, RAISED = "pass", "wrong", "exception"

LOOP = """
def check(candidate):
    for n in range(3):
        assert candidate(n) == n + 1, "message"
    assert candidate(
        10
    ) == 11
"""
HELPER = """
def expect(got, wanted):
    assert got == wanted
    assert isinstance(got, int)
def check(candidate):
    expect(candidate(1), 2)
    expect(candidate(2), 3)
"""
BETWEEN = """
def check(candidate):
    total = 0
    for n in range(3):
        value = candidate(n)
        total = total + value
        assert value == n + 1
    assert total == 6
"""
BRANCH = """
def check(candidate):
    if candidate(1) == 2:
        assert candidate(2) == 3
        assert candidate(3) == 4
    else:
        assert False
    for n in range(candidate(1)):
        assert candidate(n) == n + 1
"""
EXPECTS_ERROR = """
def check(candidate):
    try:
        candidate(1)
        assert False
    except ValueError:
        assert True
"""
ASSERT_RAISES = """
def check(candidate):
    caught = None
    try:
        assert candidate(1) == 2
        assert candidate(2) == 3
    except ValueError as error:
        caught = error
    assert caught is not None
    assert str(caught) == "no"
"""
UNEXPECTED = """
def check(candidate):
    try:
        assert candidate(1) == 2
        assert candidate(2) == 3
        assert candidate(3) == 4
    except Exception as error:
        assert False, error
"""
HIDES = """
def check(candidate):
    try:
        assert candidate(1) == 2
        assert candidate(2) == 3
    except Exception:
        pass
"""
REPORTS = """
def check(candidate):
    ok = True
    try:
        value = candidate(1)
        assert value == 2
        assert candidate(2) == 3
        print("fine")
    except AssertionError:
        print("an assertion failed")
    except Exception:
        ok = False
"""
COUNTS = (
    REPORTS
    + """
    assert ok
"""
)
MUST_RAISE = """
def check(candidate):
    try:
        candidate(1)
        assert False
    except Exception:
        pass
"""
RAISES = """
from contextlib import suppress
with suppress(ValueError):
    assert f(1) == 2
    assert f(2) == 3
noted = []
try:
    f(1)
except ValueError:
    noted.append(1)
else:
    noted.append(2)
assert noted == [2]
"""
MATCH = """
match f(1):
    case 2:
        assert f(2) == 3
        assert f(3) == 4
    case _:
        assert False
assert f(4) == 5
"""
CAPTURE = """
match f(3):
    case [a, *b]:
        assert a == 3 and b == [9]
"""
SHADOW = """
n = 5
def check(candidate):
    squares = [n * n for n in range(4)]
    assert candidate(squares) == 14
    assert candidate([n]) == 5
"""
DECORATED = """
@f
def g():
    pass
class C:
    value = f(1)
assert C.value == 2
assert f(2) == 3
"""
SUPPRESSES = """
from contextlib import suppress
ended = False
with suppress(ValueError):
    f(-1)
    ended = True
assert not ended
with open("/dev/null"):
    two = f(1)
assert two == 2
assert f(2) == 3
"""
ASYNCHRONOUS = """
import asyncio
async def get(n):
    return f(n)
value = asyncio.run(get(1))
assert value == 2
assert f(2) == 3
"""
TRIVIAL = """
def check(candidate):
    assert True
    table = [1, 2]
    assert len(table) == 2
    assert candidate(1) == 2
"""


@pytest.mark.parametrize(
    ("test", "function", "expected"),
    [
        (LOOP, one_more, [PASS] * 4),
        (LOOP, lambda n: n + 1 if n != 1 else 0, [PASS, WRONG, PASS, PASS]),
        (LOOP, always_raises, [RAISED] * 4),
        (HELPER, one_more, [PASS] * 4),
        (HELPER, float, [WRONG] * 4),
        (HELPER, always_raises, [RAISED] * 2),
        (BETWEEN, one_more, [PASS] * 4),
        (BETWEEN, lambda n: always_raises() if n == 1 else n + 1, [PASS, RAISED, PASS, RAISED]),
        (BETWEEN, never_answers, ["timeout"] * 4),
        (BRANCH, one_more, [PASS] * 4),
        (BRANCH, lambda n: n, [WRONG, WRONG]),
        (BRANCH, always_raises, [RAISED, "not_run", RAISED]),
        (EXPECTS_ERROR, always_raises, [PASS]),
        (EXPECTS_ERROR, one_more, [WRONG]),
        (ASSERT_RAISES, always_raises, [PASS, PASS]),
        (ASSERT_RAISES, one_more, [PASS, PASS, WRONG, WRONG]),
        (ASSERT_RAISES, never_answers, ["timeout"] * 2 + [WRONG] * 2),
        (UNEXPECTED, one_more, [PASS] * 3),
        (UNEXPECTED, always_raises, [WRONG, "not_run", "not_run"]),
        (UNEXPECTED, lambda n: always_raises() if n == 2 else n + 1, [PASS, WRONG, "not_run"]),
        (UNEXPECTED, lambda n: {}[n], [WRONG, "not_run", "not_run"]),
        (HIDES, one_more, [PASS, PASS]),
        (HIDES, always_raises, [RAISED, RAISED]),
        (REPORTS, one_more, [PASS, PASS]),
        (REPORTS, always_raises, [RAISED, "not_run"]),
        (REPORTS, always_fails, [RAISED, "not_run"]),
        (REPORTS, lambda n: n, [WRONG, WRONG]),
        (COUNTS, one_more, [PASS] * 3),
        (COUNTS, always_raises, [WRONG]),
        (COUNTS, always_fails, [RAISED, "not_run", PASS]),
        (MUST_RAISE, one_more, [WRONG]),
        (MUST_RAISE, always_raises, [PASS]),
        (RAISES, one_more, [PASS, PASS, PASS]),
        (RAISES, always_raises, [WRONG]),
        (RAISES, lambda n: {}[n], [RAISED, "not_run", RAISED, WRONG]),
        (MATCH, one_more, [PASS, PASS, PASS]),
        (MATCH, always_raises, [RAISED, "not_run", RAISED]),
        (CAPTURE, lambda n: [n, n * n], [PASS]),
        (SHADOW, sum, [PASS, PASS]),
        (DECORATED, lambda n: 0 if callable(n) else n + 1, [PASS, PASS]),
        (DECORATED, always_raises, [RAISED, RAISED]),
        (TRIVIAL, one_more, [PASS]),
        (TRIVIAL, always_raises, [RAISED]),
        ("assert f(1) == 2\nassert f(2) == 0\nassert f(3) == 4", one_more, [PASS, WRONG, PASS]),
        ("assert [f(n) for n in range(3)] == [1, 2, 3]", one_more, [PASS]),
        ("import math\nassert math.isclose(f(1), 2)", one_more, [PASS]),
        ("f(1)", one_more, [PASS]),
        ("f(1)", always_raises, [RAISED]),
        ("x = f(1)", always_raises, [RAISED]),
        ("def check(candidate):\n    return candidate(1) == 3", one_more, [PASS]),
        ("if f(1) != 3:\n    raise ValueError", one_more, [WRONG]),
        ("x: int = f(1)\nx += 1\nassert x == 3", one_more, [PASS]),
        ("x: int = f(1)\nx += 1\nassert x == 3", always_raises, [RAISED]),
        ("'Doc.'\nfrom __future__ import annotations\nassert f(1) == 2", one_more, [PASS]),
        ("'Doc.'\nfrom __future__ import annotations\nassert f(1) == math.floor(2.5)", one_more, [PASS]),
        (SUPPRESSES, lambda n: n + 1 if n > 0 else always_raises(), [PASS] * 3),
        (ASYNCHRONOUS, one_more, [PASS, PASS]),
        ("assert f(1) < 'a'", one_more, [WRONG]),
        ("with open('/nonexistent') as x:\n    assert f(1) == 2\n    assert f(2) == 3", one_more, [WRONG, "not_run"]),
        ("import numpy as np\nnp.testing.assert_allclose(f(1), 2)\nassert f(1) == 2", one_more, [PASS, PASS]),
        ("import numpy as np\nnp.testing.assert_allclose(f(1), 2)\nassert f(1) == 2", lambda n: n, [WRONG, WRONG]),
    ],
)
def test_rules(test: str, function: Callable[..., Any], expected: list[str]) -> None:
    assert verdicts(test, function) == expected


@pytest.mark.parametrize("test", [LOOP, HELPER, BETWEEN, BRANCH, EXPECTS_ERROR, TRIVIAL])
@pytest.mark.parametrize("function", [always_raises, never_answers, lambda n: None, lambda n: [], lambda n: n + 2])
def test_failing_never_shrinks_what_is_to_be_earned(test: str, function: Callable[..., Any]) -> None:
    right = {EXPECTS_ERROR: always_raises}.get(test, one_more)
    good, bad = verdicts(test, right), verdicts(test, function)
    assert set(good) == {PASS}
    if function is always_raises and test == EXPECTS_ERROR:
        return
    assert bad.count(PASS) / len(bad) < 1
    assert bad.count(PASS) <= len(good)


def test_an_entry_point_called_check() -> None:
    assert verdicts("assert check(1) == 2", one_more, "check") == [PASS]


def test_a_test_that_cannot_run_is_nobodys_fault() -> None:
    with pytest.raises(Unusable, match="no_such_module"):
        verdicts("import no_such_module\nassert f(1) == 2", one_more)
    with pytest.raises(Unusable, match="neither"):
        verdicts("x = 1", one_more)
    with pytest.raises(SyntaxError):
        instrument_test("assert (", "f")


def test_a_test_has_so_many_cases_at_most() -> None:
    found = verdicts("while True:\n    assert f(1) == 2", one_more)
    assert (len(found), found[0], found[-1]) == (MAX_CASES, PASS, "output_limit")


def test_needs_are_names_that_only_the_program_can_define() -> None:
    body = "    x = [y for y in g(poly(1))]\n    assert math.e < c < len(x)"
    test = f"import math\nfrom a import b as c\ndef check(g):\n{body}"
    assert instrument_test(test, "f").needs == ("poly",)
    assert instrument_test(LOOP, "f").needs == ()
    assert instrument_test(CAPTURE, "f").needs == ()
    assert instrument_test("from helpers import *\nassert f(poly(1))", "f").needs == ()


def test_a_module_that_only_the_program_imports_is_imported() -> None:
    test = instrument_test("from __future__ import annotations\nassert f(1) == math.floor(2.5) + json", "f")
    assert test.needs == ("json",)
    assert verdicts("assert f(1) == math.floor(2.5)", one_more) == [PASS]


def test_messages_are_short_and_printable() -> None:
    def raises(_: Any) -> Any:
        raise ValueError("\x1b[2J\u202e\x00" + "x" * 10_000)

    test = instrument_test("assert f(1) == 2", "f")
    [case] = run_test_code(base64.b64decode(test.code), "f", Local(lambda n: [10**5000]), {})
    assert case == [WRONG, "assert f(1) == 2  # got [<integer of 16610 bits>]"]
    [[_, message]] = run_test_code(base64.b64decode(test.code), "f", Local(raises), {})
    assert len(message) <= 500
    assert message.isprintable()
    assert "\\x1b" in message
