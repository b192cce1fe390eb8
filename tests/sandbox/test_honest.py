"""Honest programs pass in full, at the strongest level and, without scratch files and children, at the weaker ones."""

from __future__ import annotations

import pytest

from magrpo.sandboxes.pool import Pool
from magrpo.types import Execution

from .honest import NEEDS_NAMESPACES, NUMPY, PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_passes_in_full(pool_of_level: Pool, name: str) -> None:
    source, test = PROGRAMS[name]
    [report] = pool_of_level.run([Execution(source, "f", test)])
    assert report.status == "pass", report.cases
    assert not report.forgeable


@pytest.mark.parametrize("name", NEEDS_NAMESPACES)
def test_passes_with_namespaces(pool: Pool, name: str) -> None:
    source, test = NEEDS_NAMESPACES[name]
    [report] = pool.run([Execution(source, "f", test)])
    assert report.status == "pass", report.cases


def test_numpy_when_not_allowed(pool: Pool) -> None:
    program, both = Execution(NUMPY.source, "f", "assert f(2) == 2.0"), NUMPY
    for_program, for_test = pool.run([program, both])
    assert [case.status for case in for_program.cases] == ["load_error"]
    assert for_test.status == "test_error"
    assert "sandbox.packages" in for_test.cases[0].message
