"""Honest programs at the seams between test and program pass in the sandbox as they do in plain execution."""

from __future__ import annotations

import pytest

from magrpo.sandboxes.pool import Pool
from magrpo.types import Execution, ExecutionReport

from .conftest import LEVELS, open_pool
from .corpora import select_passing
from .honest_seams import FORGEABLE, IMPOSSIBLE, SEAMS

PROGRAMS = {name: Execution(source, "f", test) for name, (source, test) in SEAMS.items()}


@pytest.fixture(scope="module")
def reports(pool: Pool) -> dict[str, ExecutionReport]:
    return dict(zip(PROGRAMS, pool.run(list(PROGRAMS.values())), strict=True))


def test_all_pass_in_plain_execution() -> None:
    assert set(PROGRAMS) == set(select_passing(PROGRAMS))
    assert set(PROGRAMS) >= IMPOSSIBLE | FORGEABLE


SHORT = pytest.mark.xfail(strict=True, reason="falls short: docs/sandbox.md")


@pytest.mark.parametrize("name", [pytest.param(name, marks=SHORT) if name in IMPOSSIBLE else name for name in PROGRAMS])
def test_passes_in_the_sandbox(reports: dict[str, ExecutionReport], name: str) -> None:
    report = reports[name]
    assert report.status == "pass", report.cases
    assert report.tests_total > 0


def test_verdicts_are_seldom_forgeable(reports: dict[str, ExecutionReport]) -> None:
    assert {name for name, report in reports.items() if report.forgeable} <= FORGEABLE


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_sample_passes_at_weaker_levels(level: str) -> None:
    sample = [name for name in PROGRAMS if name not in IMPOSSIBLE][::5]
    weaker = open_pool(level=level, workers=1)
    failed = [
        (name, report.cases)
        for name, report in zip(sample, weaker.run([PROGRAMS[name] for name in sample]), strict=True)
        if report.status != "pass"
    ]
    weaker.close()
    assert not failed


def test_raises_of_pytest() -> None:
    """Where the package is allowed, ``pytest.raises`` judges as it does elsewhere."""
    program = "def f(n):\n    if n < 0:\n        raise ValueError('a negative number')\n    return n\n"
    only = "import pytest\nwith pytest.raises(ValueError):\n    f(-1)\n"
    more = (
        only.replace(":\n", " as info:\n") + "assert 'negative' in str(info.value)\nassert f(2) == pytest.approx(2)\n"
    )
    silent = "def f(n):\n    return n\n"
    allowed = open_pool(workers=1, packages=["pytest"])
    reports = allowed.run([Execution(source, "f", test) for source in (program, silent) for test in (only, more)])
    allowed.close()
    assert [report.status for report in reports[:2]] == ["pass", "pass"]
    assert all(report.tests_passed < report.tests_total for report in reports[2:])
    assert all(case.status == "wrong" for report in reports[2:] for case in report.cases if case.status != "pass")
