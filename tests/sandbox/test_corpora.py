"""Honest programs of public corpora pass in the sandbox wherever they pass in plain execution."""

from __future__ import annotations

import pytest

from magrpo.sandboxes.pool import Pool
from magrpo.types import Execution

from . import corpora
from .conftest import LEVELS, open_pool
from .corpora import CORPORA, Missing, passes_plainly, select_passing, write_doctests

RATES = {"TheAlgorithms": 0.995}
"""Smallest share of a corpus that passes; 1 where none is named."""
SAMPLE = 40
"""One program in so many runs at the weaker levels too."""


def read_passing(corpus: str) -> dict[str, Execution]:
    try:
        return select_passing(CORPORA[corpus]())
    except Missing as error:
        pytest.skip(str(error))


def list_shortfalls(pool: Pool, programs: dict[str, Execution]) -> tuple[list[str], int]:
    """A line for each program that does not pass, and how many verdicts were forgeable."""
    reports = pool.run(list(programs.values()))
    short = [
        f"{name}: {report.status}, {report.tests_passed} of {report.tests_total}: "
        + next((case.message for case in report.cases if case.status != "pass"), "no case")
        for name, report in zip(programs, reports, strict=True)
        if report.status != "pass"
    ]
    return short, sum(report.forgeable for report in reports)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize("corpus", CORPORA)
def test_passes_as_in_plain_execution(corpus: str, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    programs = read_passing(corpus)
    short, forgeable = list_shortfalls(pool, programs)
    with capsys.disabled():
        print(f"\n{corpus} at {pool.level}: {len(short)} of {len(programs)} fall short, {forgeable} forgeable")
        print(*short, sep="\n")
    assert len(short) <= (1 - RATES.get(corpus, 1)) * len(programs)
    for level in LEVELS[1:]:
        weaker = open_pool(level=level)
        few = dict(list(programs.items())[::SAMPLE])
        failed, _ = list_shortfalls(weaker, few)
        weaker.close()
        assert {line.partition(": ")[0] for line in failed} <= {line.partition(": ")[0] for line in short}, level


def test_doctests_become_asserts() -> None:
    source = '''
import math
from decimal import Decimal
def half(n):
    """
    >>> half(Decimal(3))  # exactly
    Decimal('1.5')
    >>> items = [2]
    >>> half(items[0])
    1.0
    >>> print(half(2))
    a line that is no expression
    >>> half("x")
    Traceback (most recent call last):
        ...
    ValueError: not a number: x
    """
    if isinstance(n, str):
        raise ValueError(f"not a number: {n}")
    return n / 2
def no_example():
    """Nothing."""
'''
    [(name, test)] = write_doctests(source)
    assert (name, test) == (
        "half",
        "from decimal import Decimal\nassert (half(Decimal(3))) == (Decimal('1.5'))\nitems = [2]\n"
        "assert (half(items[0])) == (1.0)\n"
        'try:\n    half("x")\n    assert False\nexcept ValueError as error:\n'
        "    assert str(error) == 'not a number: x'\n",
    )
    assert passes_plainly(Execution(source, name, test))
    assert not list(write_doctests("import numpy\n" + source))


def test_plain_execution_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "CPU_S", 1)
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    assert passes_plainly(Execution("def f(n):\n    return n * n\n", "f", check))
    assert not passes_plainly(Execution("def f(n):\n    return n\n", "f", check))
    assert not passes_plainly(Execution("def f(n):\n    while True:\n        pass\n", "f", check))
