"""Hostile programs score nothing and harm nothing, and the next honest program on the same worker is unharmed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from magrpo.sandboxes.pool import MAX_BATCH, make_batches
from magrpo.sandboxes.traces import is_self_contained
from magrpo.types import Execution

from .conftest import LEVELS, open_pool, run_honest
from .hostile import CORPUS, Hostile
from .world import SECRET, World

TEST = "\n".join(f"assert f({n}) == 'expected-{n * 7919 % 1009}-value'" for n in (1, 2, 3))
HONEST = Execution(
    "import os\ndef f(n):\n    os.listdir('/usr/lib')\n    return sorted({n: 1, 0: 2})\n",
    "f",
    "def check(candidate):\n    for n in range(1, 6):\n        assert candidate(n) == [0, n]\n",
)

SELF_CONTAINED = replace(HONEST, source="def f(n):\n    return sorted({n: 1, 0: 2})\n")
"""Shares a process with hostile programs that the rules take for self-contained ones."""


@pytest.fixture(scope="module", params=LEVELS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Yield the targets of attacks on a one-worker pool of each isolation level, with a secret in the environment."""
    os.environ["MAGRPO_TEST_SECRET"] = SECRET
    pool = open_pool(level=request.param, workers=1, test_s=0.2, total_s=0.2, memory_mib=256)
    world = World(pool)
    yield world
    world.close()
    pool.close()
    del os.environ["MAGRPO_TEST_SECRET"]


@pytest.mark.parametrize("program", CORPUS, ids=lambda program: program.name)
def test_scores_nothing_and_harms_nothing(world: World, program: Hostile) -> None:
    worker = world.worker_pid()
    [report] = world.pool.run([Execution(world.aim(program.source), "f", TEST)])
    world.forged(report)
    assert report.status != "infra_error"
    assert report.tests_total == 3
    assert report.level == world.pool.level
    honest = run_honest(world.pool, HONEST)
    assert (honest.status, honest.tests_passed) == ("pass", 5)
    assert world.worker_pid() == worker, "the worker had to be replaced"
    for harm in ("secret_kept", "target_untouched", "not_contacted", "victim_alive", "nothing_left", "memory_bounded"):
        getattr(world, harm)(report)


NAMES = {SELF_CONTAINED: "self-contained", HONEST: "reads files"}


@pytest.mark.parametrize(
    ("world", "honest"),
    [
        ("namespaces", HONEST),
        pytest.param("namespaces", SELF_CONTAINED, marks=pytest.mark.slow),
        ("namespaces-flat", SELF_CONTAINED),
        pytest.param("namespaces-flat", HONEST, marks=pytest.mark.slow),
        ("landlock", HONEST),
        pytest.param("landlock", SELF_CONTAINED, marks=pytest.mark.slow),
    ],
    indirect=["world"],
    ids=lambda value: value if isinstance(value, str) else NAMES[value],
)
def test_programs_that_share_a_tester_with_hostile_ones_are_unharmed(world: World, honest: Execution) -> None:
    worker = world.worker_pid()
    sources = [world.aim(program.source) for program in CORPUS]
    assert len(list(filter(is_self_contained, sources))) > 20, "these share a process, too"
    batch = [execution for source in sources for execution in (Execution(source, "f", TEST), honest)]
    assert len(make_batches(batch[:MAX_BATCH], MAX_BATCH)) == 1, "their tests leave no trace"
    for start in range(0, len(batch), MAX_BATCH):
        reports = world.pool.run_batch(batch[start : start + MAX_BATCH])
        for report in reports[::2]:
            world.forged(report)
            assert report.status != "infra_error"
            assert report.tests_total == 3
            world.memory_bounded(report)
        for report in reports[1::2]:
            assert (report if report.status != "timeout" else run_honest(world.pool, honest)).status == "pass"
    assert world.worker_pid() == worker, "the worker had to be replaced"
    for harm in ("target_untouched", "not_contacted", "victim_alive", "nothing_left"):
        getattr(world, harm)(report)


def test_every_harm_of_the_corpus_is_looked_for() -> None:
    assert {program.harm for program in CORPUS} <= {name for name in dir(World) if not name.startswith("_")}
