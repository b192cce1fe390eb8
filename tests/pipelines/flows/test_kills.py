"""Kill -9 at random moments: from the first line of a process to its last, a run ends where it would have ended.

Moments are drawn from a seed, over the time that a process takes. This process is the reaper of orphans while they are
killed, so that whatever survives one, however far removed, is seen as a child of this process.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.pipelines.micro import command, start
from tests.training.test_resume import TIMED, Runs, assert_same

_PR_SET_CHILD_SUBREAPER = 36
_EMBEDDED = Path(__file__).parents[3] / "pipelines" / "configs" / "embedded.toml"
EMBEDDED = [
    str(_EMBEDDED),
    "train.num_iterations=2",
    "rollout.problems_per_iteration=2",
    "rollout.group_size=4",
    "rollout.max_new_tokens=24",
    "eval.num_samples=1",
    "eval.max_problems=4",
    "eval.every=1",
]
"""The embedded run, small: its own model, problems, rewards and jails."""


@contextmanager
def reaping() -> Iterator[None]:
    """Orphans of this process's descendants become its children, instead of init's."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def family() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def temporary_files_in(folder: Path) -> None:
    """Let this process and its children put their temporary files there."""
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None


class Killer:
    """Starts commands and kills them at moments drawn from ``seed``."""

    def __init__(self, runs: Runs, name: str, seed: int) -> None:
        self.runs, self.name, self.random = runs, name, random.Random(seed)
        self.temporary = runs.root.parent / "tmp"
        self.temporary.mkdir(exist_ok=True)

    def go(self, moment: float = 600.0) -> tuple[int, float]:
        """Exit code and wall time of the next process, killed ``moment`` seconds after its start; nothing survives."""
        before = family()
        begun = time.monotonic()
        before_it = partial(temporary_files_in, self.temporary)
        process = start(self.runs.arguments(self.name), self.runs.log(self.name), before_it)
        process.join(moment)
        process.kill()
        process.join()
        took = time.monotonic() - begun
        _, alive = psutil.wait_procs(family() - before, timeout=300)
        assert not alive, f"survived a kill after {moment:.2f} s: {[(p.pid, p.cmdline()) for p in alive]}"
        assert process.exitcode in (0, -signal.SIGKILL), self.runs.log(self.name).read_text()[-3000:]
        return process.exitcode, took

    def kill(self, times: int, life: float) -> None:
        """Kill so many processes, each in the first ``life`` seconds; less when one ends by itself sooner."""
        while times:
            code, took = self.go(self.random.uniform(0.0, life))
            if code:
                times -= 1
            else:
                life = took


def leftovers(runs: Runs, name: str) -> list[str]:
    """Temporary files and folders of a run, in its directory and in that for temporary files."""
    folder = runs.root / name
    hidden = [path for path in folder.rglob("*") if path.name.startswith(".") or path.suffix == ".draft"]
    return sorted(map(str, [*hidden, *(runs.root.parent / "tmp").iterdir()]))


def essence(runs: Runs, name: str) -> dict[str, object]:
    """All that must not depend on kills where programs run in jails.

    Files of scored turns tell how long programs took; a process that knows all programs of a stage runs none, and then
    has nothing to say of the sandbox.
    """
    exact = {
        (stage, path): facts
        for stage, manifest in runs.manifests(name).items()
        if stage.partition("/")[2] in {"prepare", "rollout.0", "credit", "update"}
        for path, facts in manifest["files"].items()
    }
    metrics = {
        (stage, key): value
        for stage, values in runs.metrics(name).items()
        for key, value in values.items()
        if not key.startswith(TIMED)
    }
    tracked = runs.tracked(name)
    tracked["metrics"] = {key: points for key, points in tracked["metrics"].items() if "sandbox/" not in key}
    return {"files": exact, "metrics": metrics, "tracked": tracked}


def assert_same_essence(runs: Runs, name: str) -> None:
    assert essence(runs, name) == essence(runs, "whole")


def killed_and_resumed(runs: Runs, kills: Sequence[int], compare: Callable[[Runs, str], None]) -> None:
    """Kill the run number i ``kills[i]`` times, all under the root of ``runs``, and compare with one never killed."""
    with reaping():
        assert command(["--version"], runs.log("version")) == 0  # from here on the server of forks is there, and stays
        life = 8.0  # the first finds no databases, and makes them
        for number, times in enumerate(kills):
            killer = Killer(runs, f"killed-{number}", seed=number)
            killer.kill(times, life)
            assert killer.go()[0] == 0
            if number == 0:
                code, life = Killer(runs, "whole", seed=0).go()
                assert code == 0
            compare(runs, killer.name)
            assert leftovers(runs, killer.name) == []
            print(f"killed {times} times: as the run that was not")


@pytest.mark.slow
def test_without_prefect(tmp_path: Path) -> None:
    """Every file is compared."""
    killed_and_resumed(Runs(tmp_path), [5, 5, 5, 5], assert_same)


@pytest.mark.slow
def test_as_a_flow(tmp_path: Path) -> None:
    """With a Prefect server of its own each time, from an empty database on.

    Weights, optimizer, samples and metrics of the embedded run are compared.
    """
    killed_and_resumed(Runs(tmp_path, EMBEDDED, flags=()), [5, 5, 5], assert_same_essence)
