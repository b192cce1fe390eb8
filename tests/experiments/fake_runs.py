"""Fake runs of a study, for processes of their own: this module imports neither torch nor MLflow."""

import os
import signal
import time
from pathlib import Path

from rich.console import Console

from magrpo.experiments.study import load_study
from magrpo.experiments.study_runs import run_study
from magrpo.process.signals import raise_on_signals
from magrpo.run.steps import steps
from magrpo.run.store import RunStore
from pipelines.arguments import locate_config
from tests.processes import wait_until


def fake_outcome(store: RunStore) -> float:
    """0.01 is better with the seeds of the pilots, 0.02 with the reported ones; ``loo`` is better throughout."""
    config = store.config()
    best = 0.01 if config.train.seed >= 7 else 0.02
    is_better = config.algo.estimator == "marloo"
    return 0.5 + 0.2 * (config.optim.lr == best) + 0.1 * is_better + 0.01 * config.train.seed * (1 + is_better)


def make_run(store: RunStore, *, is_judged: bool = True) -> None:
    """Commit an evaluation before training, an iteration of 120 tokens, an evaluation after it and the report.

    ``is_judged``: whether the evaluations have pass@1.
    """
    config = store.config()
    store.write_config(config.model_copy(update={"train": config.train.model_copy(update={"num_iterations": 1})}))
    metrics = {"rollout": {"rollout/tokens": 120.0}, "evaluate": {"eval/return": 0.4, "eval/pass_at_1": 0.3}}
    for step in steps(store.config()):
        values = metrics.get(step.stage, {})
        if step.stage == "evaluate" and step.iteration:
            values = {"eval/return": fake_outcome(store), "eval/pass_at_1": 0.5}
        if not is_judged:
            values = {key: value for key, value in values.items() if key != "eval/pass_at_1"}
        store.commit(step.output, "key", lambda _, values=values: values)  # type: ignore[misc]


def run_with_a_partner(store: RunStore) -> None:
    """Make a fake run: those of seed 0 wait for each other, one of seed 1 is killed, and the other fails."""
    folder = store.path.parent / "markers"
    folder.mkdir(exist_ok=True)
    folder.joinpath(store.run_id).write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
    if store.run_id.endswith("s0"):
        wait_until(lambda: len(list(folder.glob("*-s0"))) == 2)
    if store.run_id == "s-plain-s1":
        os.kill(os.getpid(), signal.SIGKILL)
    if store.run_id == "s-loo-s1":
        raise RuntimeError("no luck")
    make_run(store)


def hang(store: RunStore) -> None:
    """Note that the run has begun, and never end."""
    (store.path / "begun").touch()
    time.sleep(3600)


def run_hanging_study(path: Path) -> None:
    """Execute the study in the file ``path`` with runs that hang, as a command that signals can end."""
    with raise_on_signals():
        run_study(load_study(path, None, None, locate_config), hang, Console(quiet=True), workers=2)
