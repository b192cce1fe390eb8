"""Pools at the isolation levels that the machine offers, shared by the tests of a module, and a program to run."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from magrpo.sandboxes import SandboxError
from magrpo.sandboxes.pool import Pool, PoolSandbox
from magrpo.sandboxes.worker import Worker
from magrpo.types import Execution, ExecutionReport

LEVELS = ["namespaces", "namespaces-flat", "landlock"]
MAIN_LEVELS = ["namespaces", pytest.param("namespaces-flat", marks=pytest.mark.slow), "landlock"]
"""For tests of well-behaved programs: without a namespace for each candidate, they fare as with one."""
CHECK = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n + 1\n"
RIGHT = "def f(n):\n    return n + 1\n"
"""A program that passes the test ``CHECK`` in full."""


def open_pool(**options: object) -> Pool:
    """A pool of the level that is asked for, or a skipped test where it cannot be had."""
    try:
        pool = PoolSandbox.model_validate({"kind": "pool", **options}).open()
    except SandboxError as error:
        pytest.skip(str(error))
    assert options.get("level", "auto") in ("auto", pool.level)
    return pool


def the_worker(pool: Pool) -> Worker:
    """The only worker of a pool of one."""
    [worker] = pool.alive
    return worker


def wait_until_gone(worker: Worker) -> None:
    """A kill is carried out when the scheduler gets to it: on a busy machine the jail may still do a job or two."""
    if worker.inside is not None:
        select.select([worker.inside], [], [])
    worker.process.wait()


def run_honest(pool: Pool, program: Execution) -> ExecutionReport:
    """The report of an honest program; run again where a busy machine keeps it waiting beyond the short limits."""
    for _ in range(5):
        [report] = pool.run([program])
        if report.status != "timeout":
            break
    return report


@pytest.fixture(scope="module", params=LEVELS)
def pool_of_level(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Each level, one worker, default limits."""
    pool = open_pool(level=request.param, workers=1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """The strongest level, two workers, default limits."""
    pool = open_pool(workers=2)
    yield pool
    pool.close()
