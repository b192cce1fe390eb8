"""The stages bound to one run: a step finds its output committed, or computes and commits it.

Inputs and outputs are pointers to committed outputs. Policy, engine and sandbox open when a stage first needs them, so
a run whose steps are all committed opens nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from time import perf_counter

from magrpo.config.run import RunConfig
from magrpo.engines import EngineError
from magrpo.process.faults import name_full_disk
from magrpo.progress.console import RunConsole
from magrpo.run.files import OPTIMIZER, OPTIMIZER_SHARDS, WEIGHTS
from magrpo.run.rewind import check_kept
from magrpo.run.steps import StageSpec, Step, evaluates_after
from magrpo.run.store import Pointer, RunStore
from magrpo.sandboxes import LEVEL_TITLES, SandboxDied
from magrpo.stages.context import Metrics, RunMemory, StageContext, Writer
from magrpo.training.keys import make_key
from magrpo.training.resources import RunResources


class StepAborted(BaseException):
    """The run ended before this step of another thread did. Not an error of the step, so nothing retries it."""


class StageRunner(AbstractContextManager["StageRunner"]):
    """Runs the steps of one run directory. ``set_tags`` records tags of the run."""

    def __init__(
        self, config: RunConfig, store: RunStore, progress: RunConsole, set_tags: Callable[[Mapping[str, str]], None]
    ) -> None:
        self._config, self._store = config, store
        self._progress, self._set_tags = progress, set_tags
        self._resources = RunResources(config, store, self._announce_isolation, progress.show_loading)
        self.memory = RunMemory()
        self._aborted = False

    def __exit__(self, *_: object) -> None:
        self.abort_steps()

    def abort_steps(self) -> None:
        """Close engine and sandbox, and let no step begin; steps in progress in other threads end with StepAborted."""
        self._aborted = True
        self._resources.close()

    def run_step(self, step: Step, inputs: Sequence[Pointer]) -> Pointer:
        """Return the committed output of ``step``, computing it if need be; a :data:`magrpo.training.loop.RunStep`."""
        key = make_key(self._config, step, inputs)
        found = self._store.find(step.output, key)
        pointer = found or self._compute(step, inputs, key)
        if step.writes_checkpoint:
            if not found:
                self._resources.open_updates().adopt(self._store.folder(pointer))
            self._prune(step.iteration)
        self._progress.finish_step(step, self._store.metrics(pointer), reused=found is not None)
        return pointer

    def _compute(self, step: Step, inputs: Sequence[Pointer], key: str) -> Pointer:
        self._check_aborted()
        check_kept(self._store, step)
        for pointer in inputs:
            self._store.check_files(pointer)
        discarded_before = self._resources.num_discarded.copy()
        advance = self._progress.start_step(step)

        def advance_or_abort(finished: int) -> None:
            self._check_aborted()
            advance(finished)

        def write(folder: Path) -> Metrics:
            context = StageContext(
                config=self._config,
                store=self._store,
                step=step,
                inputs=inputs,
                folder=folder,
                resources=self._resources,
                console=self._progress,
                memory=self.memory,
                advance=advance_or_abort,
            )
            started = perf_counter()
            with name_full_disk(self._store.path):  # here, because a failure frees the disk: its folder is deleted
                metrics = load_writer(step.spec)(context)
            return {**metrics, f"time/{step.stage}_s": perf_counter() - started}

        try:
            return self._store.commit(step.output, key, write)
        except (EngineError, SandboxDied) as error:
            self._check_aborted()
            self._resources.discard_dead(error, discarded_before)
            raise

    def _prune(self, newest: int) -> None:
        """Delete files that nothing needs any more from earlier checkpoints that are not evaluated."""
        train = self._config.train
        old = {newest - 1: [OPTIMIZER, OPTIMIZER_SHARDS]}
        if train.keep_weights == "evaluated":  # the rollout of iteration k samples from checkpoint k - 1 - lag
            old.setdefault(newest - train.lag - 1, []).append(WEIGHTS)
        for iteration, names in old.items():
            if iteration > 0 and not evaluates_after(self._config, iteration):
                self._store.prune(Step("update", iteration).output, *names)

    def _check_aborted(self) -> None:
        if self._aborted:
            raise StepAborted("the run ends")

    def _announce_isolation(self, level: str) -> None:
        self._progress.say(f"sandbox: {LEVEL_TITLES.get(level, level)}")
        self._set_tags({"sandbox.level": level})


def load_writer(spec: StageSpec) -> Writer:
    """Load the writer of a stage; this imports its module, and with it torch or matplotlib."""
    module, _, function = spec.writer.partition(":")
    writer: Writer = getattr(import_module(module), function)
    return writer
