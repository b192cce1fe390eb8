"""A training run of seconds on real parts: tiny random models, the transformers engine, real updates.

Only what is written and how it is judged is scripted: a program passes when a digest of its text is even, so groups
differ and weights move. ``write_config`` makes the configuration of such a run.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from unittest.mock import patch

from magrpo.config.run import RunConfig
from magrpo.plugins import Plugin
from magrpo.process.environment import prepare_environment
from magrpo.progress.console import RunConsole
from magrpo.progress.state import RunState
from magrpo.reports.charts import Panel
from magrpo.run.steps import Step
from magrpo.run.store import Pointer, RunStore
from magrpo.training.loop import Outcome, run_steps
from magrpo.training.recorder import RunRecorder
from magrpo.training.stages import StageRunner
from tests.databases import write_database
from tests.fakes import ScriptedSandbox
from tests.memory_tracker import MemoryTracker
from tests.tiny import tiny_base, tiny_config

prepare_environment()  # as the command does: before the processes forked below load any library


class Sandbox(Plugin):
    """Judges by a digest of the text."""

    def open(self) -> ScriptedSandbox:
        return ScriptedSandbox(lambda e: "pass" if hashlib.sha256(e.source.encode()).digest()[0] % 2 else "wrong")


class FaultySandbox(Sandbox):
    """Cannot be opened as long as the file ``fault`` is there."""

    fault: Path

    def open(self) -> ScriptedSandbox:
        if self.fault.exists():
            raise RuntimeError(f"a fault is planted in {self.fault}")
        return super().open()


STAGES = [
    "prepare",
    "start",
    "00000/evaluate",
    "00001/rollout.0",
    "00001/score.0",
    "00001/credit",
    "00001/update",
    "00001/evaluate",
    "report",
]
"""The steps of a run of the configuration below, in their order."""

CONFIG = """
root = "{root}"

[[agents]]
name = "helper"
role = "helper"
model = "{base}"

[[agents]]
name = "main"
role = "main"
model = "{base}"

[problems]
kind = "tests.plugins:ListedProblems"
size = 6

[env]
kind = "tests.plugins:Env"

[reward]
kind = "tests.plugins:Reward"

[sandbox]
kind = "tests.pipelines.micro:Sandbox"

[engine]
kind = "transformers"

[lora]
rank = 2
alpha = 4.0

[rollout]
problems_per_iteration = 2
group_size = 4
max_new_tokens = 6

[optim]
lr = 1e-2

[train]
num_iterations = {iterations}

[eval]
every = 2
num_samples = 2
max_problems = 2
"""


def render_blank(panel: Panel, name: str) -> str:
    """Stands in for ``render_svg``."""
    return f'<svg viewBox="0 0 1 1" role="img" aria-label="{escape(panel.title)}"></svg>'


@contextmanager
def blank_pictures() -> Iterator[None]:
    """Put empty pictures on pages: drawing them would be four fifths of a micro run's time.

    The tests under ``tests/reports`` draw real ones, and so do the run of ``tests/test_notebook.py`` and the
    comparisons of ``tests/pipelines/commands/test_compare.py``.
    """
    with patch("magrpo.reports.page.render_svg", render_blank):
        yield


def run_locally(config: RunConfig, name: str | None = None) -> tuple[RunStore, MemoryTracker, Outcome]:
    """A new run of ``config`` in this process, recorded in memory."""
    store, tracker = RunStore.create(config, name), MemoryTracker()
    with open_stages(config, store, tracker) as stages:
        outcome = run_steps(config, store, stages.run_step, RunRecorder(config, store, tracker))
    return store, tracker, outcome


def resume_locally(store: RunStore) -> None:
    """Resume a run as a new process does, which trusts no file; recorded in memory."""
    store = RunStore.open(store.path.parent, store.run_id)
    config, tracker = store.config(), MemoryTracker()
    with open_stages(config, store, tracker) as stages:
        run_steps(config, store, stages.run_step, RunRecorder(config, store, tracker))


@contextmanager
def open_stages(config: RunConfig, store: RunStore, tracker: MemoryTracker) -> Iterator[StageRunner]:
    """The stages of a run, shown on the console."""
    with (
        RunConsole(RunState(config.train.num_iterations, config.reward)) as console,
        StageRunner(config, store, console, tracker.tags) as stages,
    ):
        yield stages


@cache
def make_base() -> Mapping[str, bytes]:
    """The files of the base model, by name."""
    with TemporaryDirectory() as folder:
        return {path.name: path.read_bytes() for path in tiny_base(Path(folder), tiny_config(max_length=64)).iterdir()}


def write_config(folder: Path, iterations: int = 3, fault: Path | None = None) -> Path:
    """Write the base model and ``run.toml`` into ``folder``; runs go to ``folder/runs``, where MLflow's database is.

    With ``fault`` the first stage that needs a sandbox, the evaluation before training, fails while that file exists.
    """
    base = folder / "base"
    if not base.exists():
        base.mkdir(parents=True)
        for name, data in make_base().items():
            (base / name).write_bytes(data)
    write_database(folder / "runs" / "mlflow.db")
    path = folder / "run.toml"
    text = CONFIG.format(root=folder / "runs", base=base, iterations=iterations)
    if fault is not None:
        text = text.replace('micro:Sandbox"', f'micro:FaultySandbox"\nfault = "{fault}"')
    path.write_text(text)
    return path


# ----------------------------------------------------------------------------------------------- commands in processes
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.pipelines.micro", "tests.pipelines.libraries"])

PREFECT_VARIABLES = ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_UI_URL")
"""A command has them only if a test gives them to it."""


def magrpo(arguments: list[str]) -> int:
    from pipelines.cli import main

    return main(arguments)


def prefect(arguments: list[str]) -> int:
    from prefect.cli import app

    sys.argv = ["prefect", *arguments]
    app()
    return 0


def fail_stage(stage: str, times: int, error: type[Exception]) -> None:
    """Let the first calls of a stage fail in this process."""
    run_step = StageRunner.run_step
    left = times

    @wraps(run_step)
    def fail_first(self: StageRunner, step: Step, inputs: Sequence[Pointer]) -> Pointer:
        nonlocal left
        if step.stage == stage:
            left -= 1
            if left >= 0:
                raise error(f"{stage} is made to fail")
        return run_step(self, step, inputs)

    StageRunner.run_step = fail_first  # type: ignore[method-assign]


def command(
    arguments: Sequence[str],
    log: Path,
    before: Callable[[], None] | None = None,
    program: Callable[[list[str]], int] = magrpo,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run ``magrpo ARGUMENTS``, or another program, in a process of its own; its exit code, negative for a signal.

    The process is forked from one that has the libraries loaded, which saves seconds a command. ``log`` gets what it
    says. ``before`` is called in it first: a function of a module. Its environment is this process's, not that of the
    process it is forked from, without the variables of Prefect, and with those of ``environment``.
    """
    process = start(arguments, log, before, program, environment)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def start(
    arguments: Sequence[str],
    log: Path,
    before: Callable[[], None] | None = None,
    program: Callable[[list[str]], int] = magrpo,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> multiprocessing.Process:
    """As :func:`command`, without waiting for it."""
    inherited = {name: value for name, value in os.environ.items() if name not in PREFECT_VARIABLES}
    # Pickled apart: what it needs may import Prefect, which reads its variables then.
    first = pickle.dumps(before)
    process = _FORKS.Process(target=_main, args=(list(arguments), log, first, program, inherited | dict(environment)))
    process.start()
    return process  # type: ignore[return-value]


def _main(
    arguments: list[str], log: Path, first: bytes, program: Callable[[list[str]], int], environment: dict[str, str]
) -> None:
    """Redirect output to ``log``, undo what the forked process inherited, and exit with the status of ``program``."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the fork server ignores
    os.environ.clear()
    os.environ.update(environment)
    before = pickle.loads(first)
    if before is not None:
        before()
    with blank_pictures():
        sys.exit(program(arguments))
