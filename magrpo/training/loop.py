"""The loop of a run: every step in its order, from the first one that is not committed.

With ``train.lag`` the samples of an iteration are made in a thread, which begins as soon as the checkpoint that they
are drawn from is committed. Updates, evaluations and records stay in the calling thread, in the order of the steps.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Event
from types import TracebackType

from magrpo.config.run import RunConfig
from magrpo.run.steps import SAMPLING_STAGES, Step, steps
from magrpo.run.store import Pointer, RunStore
from magrpo.training.recorder import RunRecorder

RunStep = Callable[[Step, Sequence[Pointer]], Pointer]
"""Computes a step from its committed inputs, or finds its output committed. Clock, observers and tasks wrap it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run leaves."""

    problems: Pointer
    checkpoint: Pointer
    evaluations: dict[int, Pointer]
    """By iteration, ascending; a run of baselines has none: its rows are in the report."""
    report: Pointer


def run_steps(
    config: RunConfig,
    store: RunStore,
    run_step: RunStep,
    recorder: RunRecorder,
    abort: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run the steps of ``config`` in their order and record each.

    An error ends the run after the steps in progress. On an interrupt ``abort`` is called, to end those in threads.
    """
    checkpoint, evaluations = "", {}
    every, outputs = steps(config), _Outputs(store, run_step)
    with _SamplingThreads(config, every, outputs, abort) as threads:
        for step in every:
            pointer = threads.wait_for(step) if threads.computes(step) else outputs.compute(step)
            if pointer is None:
                continue
            if step.writes_checkpoint:
                checkpoint = step.folder
                threads.sample_from(checkpoint)
            elif step.stage == "evaluate":
                evaluations[step.iteration] = pointer
            recorder.record_step(step, pointer)
    pointers = outputs.pointers
    return Outcome(pointers[every[0].folder], pointers[checkpoint], evaluations, pointers[every[-1].folder])


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outputs of the steps so far. Several threads may compute steps of different iterations."""

    store: RunStore
    run_step: RunStep
    pointers: dict[str, Pointer] = field(default_factory=dict)
    """By folder."""
    ended: set[int] = field(default_factory=set)
    """The iterations in which every episode has ended early."""

    def compute(self, step: Step) -> Pointer | None:
        """The output of ``step``, computed from those of its inputs; None for a turn after the end of all episodes."""
        if step.belongs_to_turn and step.iteration in self.ended:
            return None
        pointer = self.run_step(step, [self.pointers[name] for name in step.inputs if name in self.pointers])
        self.pointers[step.folder] = pointer
        if step.stage == "rollout" and not self.store.metrics(pointer)["rollout/groups"]:
            self.ended.add(step.iteration)
        return pointer


class _SamplingThreads(AbstractContextManager["_SamplingThreads"]):
    """Threads that sample, score and credit up to ``lag + 1`` iterations at once; none without a lag."""

    def __init__(self, config: RunConfig, every: Sequence[Step], outputs: _Outputs, abort: Callable[[], None]) -> None:
        self._outputs, self._abort = outputs, abort
        self._waiting: dict[str, list[list[Step]]] = defaultdict(list)
        """The steps of each iteration that has not begun, by the checkpoint that it samples from."""
        self._begun: dict[int, Future[None]] = {}
        self._stopped = Event()
        self._errors: list[BaseException] = []
        self._threads = ThreadPoolExecutor(config.train.lag + 1, "magrpo-iteration")
        if config.train.lag:
            by_iteration: dict[int, list[Step]] = defaultdict(list)
            for step in every:
                if step.stage in SAMPLING_STAGES:
                    by_iteration[step.iteration].append(step)
            for iteration_steps in by_iteration.values():
                self._waiting[iteration_steps[0].inputs[1]].append(iteration_steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        if error is not None and not isinstance(error, Exception):
            self._abort()
        self._threads.shutdown(cancel_futures=True)

    def computes(self, step: Step) -> bool:
        """Whether ``step`` is computed in a thread. Raises the error of a thread, if there is one."""
        if self._errors:
            raise self._errors[0]
        return step.stage in SAMPLING_STAGES and step.iteration in self._begun

    def sample_from(self, checkpoint: str) -> None:
        """Begin the iterations that sample from ``checkpoint``, which is committed."""
        for iteration_steps in self._waiting.pop(checkpoint, []):
            # The context holds the flow run, for Prefect's tasks.
            begun = self._threads.submit(copy_context().run, self._sample, iteration_steps)
            self._begun[iteration_steps[0].iteration] = begun

    def wait_for(self, step: Step) -> Pointer | None:
        """The output of ``step``, once its iteration is sampled; None if it was left out."""
        self._begun[step.iteration].result()
        if self._errors:
            raise self._errors[0]
        return self._outputs.pointers.get(step.folder)

    def _sample(self, iteration_steps: Sequence[Step]) -> None:
        for step in iteration_steps:
            if self._stopped.is_set():
                return
            try:
                self._outputs.compute(step)
            except BaseException as error:  # raised again in the thread of the run, the first one of all threads
                self._errors.append(error)
                self._stopped.set()
                raise
