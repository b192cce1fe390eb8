"""Runs with a lag, killed and resumed: bit for bit where an uninterrupted run ends.

The quick tests of ``test_keep_weights.py`` resume a run with a lag in one process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from time import sleep
from typing import Any

import pytest

from tests.pipelines.flows.test_kills import Killer
from tests.pipelines.micro import write_config
from tests.training.test_resume import (
    Runs,
    assert_same,
    die_after_commit,
    die_at_work,
    die_before_rename,
)


def lagged(folder: Path, lag: int) -> Runs:
    """With an uninterrupted run, ``whole``, whose last two iterations are sampled ``lag`` updates behind.

    Its sampling and updates take turns: torch's number of threads is MKL's for all threads, and the last bits of a
    product depend on it.
    """
    config = [str(write_config(folder, iterations=2 + lag)), f"train.lag={lag}", "algo.importance_cap=2"]
    runs = Runs(folder, config)
    assert runs.train("whole", refuse_company) == 0, runs.log("whole").read_text()
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return lagged(tmp_path_factory.mktemp("lag"), 1)


def test_from_the_second_iteration_on_samples_are_of_earlier_weights(runs: Runs) -> None:
    """Where engine and trainer hold the same weights, their log-probabilities are the same."""
    metrics = runs.metrics("whole")
    assert [metrics[f"{iteration:05d}/rollout.0"]["rollout/lag"] for iteration in range(1, 4)] == [0.0, 1.0, 1.0]
    gaps = [metrics[f"{iteration:05d}/update"]["update/sampling_gap"] for iteration in range(1, 4)]
    assert gaps[0] < 1e-5
    assert min(gaps[1:]) > 1e-3
    assert 0 < metrics["00003/update"]["update/importance_ess_frac"] <= 1


def refuse_company() -> None:
    """Fail when two threads compute with torch at the same time."""
    import magrpo.model.side_by_side
    import magrpo.updates.gradients

    run, alone = magrpo.model.side_by_side.run_side_by_side, Lock()

    def run_alone(*arguments: Any, **options: Any) -> Any:
        assert alone.acquire(blocking=False), "another thread computes"
        try:
            sleep(0.1)  # to be met
            return run(*arguments, **options)
        finally:
            alone.release()

    patches = pytest.MonkeyPatch()
    patches.setattr(magrpo.model.side_by_side, "run_side_by_side", run_alone)
    patches.setattr(magrpo.updates.gradients, "run_side_by_side", run_alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killer", "stage"),
    [(die_at_work, "update"), (die_before_rename, "rollout.0")],
)
def test_killed_inside_a_stage(runs: Runs, killer: Callable[[str], None], stage: str) -> None:
    name = f"{killer.__name__}-{stage}"
    assert runs.train(name, partial(killer, stage)) == -signal.SIGKILL
    kept = runs.metrics(name)
    assert runs.train(name) == 0
    assert runs.metrics(name).items() >= kept.items(), "a committed stage was done again"
    assert_same(runs, name)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
def test_killed_after_every_stage(tmp_path: Path, lag: int) -> None:
    """Each process gets one stage further at least."""
    runs = lagged(tmp_path, lag)
    kept: dict[str, dict[str, float]] = {}
    while runs.train("every", die_after_commit) == -signal.SIGKILL:
        now = runs.metrics("every")
        assert now.items() > kept.items()
        kept = now
    assert_same(runs, "every")


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
def test_thirty_kills_at_random_moments(tmp_path: Path, lag: int) -> None:
    runs, life = lagged(tmp_path, lag), 12.0
    for number in range(30):
        killer = Killer(runs, f"killed-{number}", seed=number)
        code, seconds = killer.go(killer.random.uniform(0.1, life))
        if code:
            code, _ = killer.go()
        else:
            life = seconds  # it ended before it was killed
        assert code == 0
        assert_same(runs, killer.name)
