"""Step 7: two iterations of the embedded configuration, killed after the first update and resumed."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from magrpo.process.child import read_last_words, share_paths
from magrpo.process.children import list_family, wait_for_end
from magrpo.run.layout import Step
from magrpo.run.store import MANIFEST, RunStore
from pipelines.arguments import locate_config
from pipelines.gpu_check.results import Result, judge
from pipelines.gpu_check.setting import Setting

NAME = "gpu-check"
OVERRIDES = (
    *("train.num_iterations=2", "eval.max_problems=4", "eval.num_samples=1", "eval.every=2"),
    *("tracking.system_metrics=false", "tracking.traces=0"),
)
SMALL = ("rollout.problems_per_iteration=1", "rollout.group_size=2", "rollout.max_new_tokens=16", "eval.max_problems=1")
DEADLINE_S = 600.0
"""Of each half of the run."""
MAX_GAP = 0.1
"""Of log-probabilities between engine and trainer."""
_POLL_S = 0.1
_END_S = 60.0
"""Seconds that the processes of a killed run may take to end."""


def train_twice(setting: Setting) -> Iterator[Result]:
    """Train, kill, resume."""
    root, log = setting.folder / "runs", setting.folder / "train.log"
    words = [*OVERRIDES, f"model.device={setting.device.type}", f"root={root}", *(SMALL if setting.is_small else ())]
    began = time.perf_counter()
    run = _start_command(["train", str(locate_config("embedded")), *words, "--name", NAME, "--local", "--quiet"], log)
    update = RunStore(root, NAME).stage_folder(Step("update", 1).folder) / MANIFEST
    try:
        while not update.exists() and run.poll() is None and time.perf_counter() - began <= DEADLINE_S:
            time.sleep(_POLL_S)
        reached, family = update.exists(), list_family(run.pid)
    finally:
        run.kill()
        run.wait()
    seconds = time.perf_counter() - began
    remedy = f"read {log}: {read_last_words(log)}"
    yield judge("first iteration", f"{seconds:.0f} s" if reached else "not reached", "an update", reached, remedy)
    if not reached:
        return
    alive = wait_for_end(family, _END_S)
    found, kill = f"{len(alive)} of {len(family)} survive", f"kill {' '.join(str(process.pid) for process in alive)}"
    yield judge("processes of the killed run", found, "none survives", not alive, kill)
    yield from _resume_run(root, setting.folder / "resume.log")


def _resume_run(root: Path, log: Path) -> Iterator[Result]:
    began = time.perf_counter()
    run = _start_command(["train", "--resume", NAME, "--root", str(root), "--local", "--quiet"], log)
    try:
        status: int | None = run.wait(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        run.kill()
        run.wait()
    seconds = time.perf_counter() - began
    remedy = f"read {log}: {read_last_words(log)}"
    yield judge("resume to the end", f"{seconds:.0f} s, status {status}", "status 0", status == 0, remedy)
    metrics = {(iteration, stage): values for iteration, stage, values in RunStore(root, NAME).stage_metrics()}
    if status != 0:
        return
    gap = metrics[2, "update"]["update/sampling_gap"]
    remedy = "set model.dtype=float32 with engine.kind=transformers, or algo.importance_cap=2"
    good = gap <= MAX_GAP
    yield judge("update/sampling_gap", f"{gap:.3g}", f"at most {MAX_GAP:g}", good, remedy)
    folders = {"rollout": "rollout.0", "score": "score.0", "update": "update"}
    times = {stage: metrics[2, folder][f"time/{stage}_s"] for stage, folder in folders.items()}
    found = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in times.items())
    yield Result("second iteration", found, verdict="note", value=sum(times.values()))


def _start_command(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    program = "import sys; from pipelines.cli import main; sys.exit(main())"
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=share_paths() | {"MLFLOW_TRACKING_URI": ""},
        )
