"""Runs with a lag, killed and resumed: bit for bit where an uninterrupted run ends, and never where a lag of 0 does."""

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


def test_a_run_without_a_lag_differs_from_the_second_iteration_on(runs: Runs) -> None:
    metrics = runs.metrics("whole")
    assert [metrics[f"{iteration:05d}/rollout.0"]["rollout/lag"] for iteration in range(1, 4)] == [0.0, 1.0, 1.0]
    assert 0 < metrics["00003/update"]["update/importance_ess_frac"] <= 1
    whole = runs.config
    runs.config = [*whole, "train.lag=0", "train.num_iterations=2"]
    assert runs.train("on-policy") == 0
    runs.config = whole
    weights = "update/weights/main/adapter_model.safetensors"
    files, on_policy = (runs.outcome(name)["files"] for name in ("whole", "on-policy"))
    assert isinstance(files, dict)
    assert isinstance(on_policy, dict)
    assert files[f"00001/{weights}"] == on_policy[f"00001/{weights}"]
    assert files[f"00002/{weights}"] != on_policy[f"00002/{weights}"]
    assert not any("lag" in key or "importance" in key for m in runs.metrics("on-policy").values() for key in m)


def refuse_company() -> None:
    """Fail when two threads compute with torch at the same time."""
    import magrpo.model.side_by_side
    import magrpo.updates.updater

    run, alone = magrpo.model.side_by_side.run_side_by_side, Lock()

    def run_alone(*arguments: Any, **options: Any) -> Any:
        assert alone.acquire(blocking=False), "another thread computes"
        try:
            sleep(0.1)  # to be met
            return run(*arguments, **options)
        finally:
            alone.release()

    magrpo.model.side_by_side.run_side_by_side = run_alone
    magrpo.updates.updater.run_side_by_side = run_alone


@pytest.mark.parametrize(
    ("killer", "stage"),
    [(die_at_work, "update"), pytest.param(die_before_rename, "rollout.0", marks=pytest.mark.slow)],
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
@pytest.mark.timeout(1800)
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
