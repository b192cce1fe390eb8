"""The loop of a run: every step in order, from the first uncommitted one on.

With ``train.lag`` a thread makes the samples of an iteration; it starts as soon as the checkpoint that they are drawn
from is committed. Updates, evaluations and records stay in the calling thread, in the order of the steps.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Event
from types import TracebackType

from magrpo.config.run import RunConfig
from magrpo.reports.budget import count_tokens
from magrpo.run.steps import SAMPLING_STAGES, Step, steps
from magrpo.run.store import Pointer, RunStore
from magrpo.training.recorder import RunRecorder

RunStep = Callable[[Step, Sequence[Pointer]], Pointer]
"""Computes a step from its committed inputs, or finds its output committed. Timing, observers and tasks wrap it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a finished run."""

    problems: Pointer
    checkpoint: Pointer
    evaluations: dict[int, Pointer]
    """Evaluations by iteration, ascending; empty for a run of baselines, whose rows are in the report."""


def run_steps(
    config: RunConfig,
    store: RunStore,
    run_step: RunStep,
    recorder: RunRecorder,
    abort: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run the steps of ``config`` in order and record each one.

    An error ends the run after the steps in progress. An interrupt calls ``abort``, which ends steps in other threads.
    """
    checkpoint, evaluations, tokens = "", {}, 0.0
    every = steps(config)
    waiting = deque(every)
    outputs = _Outputs(store, run_step)
    with _SamplingThreads(config, every, outputs, abort) as threads:
        while waiting:
            step = waiting.popleft()
            pointer = threads.wait_for(step) if threads.computes(step) else outputs.compute(step)
            if pointer is None:
                continue
            if step.writes_checkpoint:
                checkpoint = step.output
                threads.sample_from(checkpoint)
            elif step.stage == "evaluate":
                evaluations[step.iteration] = pointer
            if config.train.max_tokens is not None:
                tokens += count_tokens(store.metrics(pointer))
                if step.stage == "update" and tokens >= config.train.max_tokens:
                    # The stages keep the planned configuration: with a limit of tokens the learning rate is constant,
                    # so the number of iterations enters no key.
                    config = store.end_training(step.iteration)
                    recorder.end_training(config)
                    every = steps(config)
                    waiting = deque(every[every.index(step) + 1 :])
            recorder.record_step(step, pointer)
    pointers = outputs.pointers
    return Outcome(pointers[every[0].output], pointers[checkpoint], evaluations)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outputs of the steps so far. Safe while several threads compute steps of different iterations."""

    store: RunStore
    run_step: RunStep
    pointers: dict[str, Pointer] = field(default_factory=dict)
    """Output of each step, by its name."""
    ended: set[int] = field(default_factory=set)
    """Iterations in which every episode has ended early."""

    def compute(self, step: Step) -> Pointer | None:
        """Compute the output of ``step`` from its inputs; None for a turn after the end of all episodes."""
        if step.belongs_to_turn and step.iteration in self.ended:
            return None
        pointer = self.run_step(step, [self.pointers[name] for name in step.inputs if name in self.pointers])
        self.pointers[step.output] = pointer
        if step.stage == "rollout" and not self.store.metrics(pointer)["rollout/groups"]:
            self.ended.add(step.iteration)
        return pointer


class _SamplingThreads(AbstractContextManager["_SamplingThreads"]):
    """Threads that sample, score and credit up to ``lag + 1`` iterations at once; none without a lag."""

    def __init__(self, config: RunConfig, every: Sequence[Step], outputs: _Outputs, abort: Callable[[], None]) -> None:
        self._outputs, self._abort = outputs, abort
        self._waiting: dict[str, list[list[Step]]] = defaultdict(list)
        """Steps of each iteration that has not begun, by the checkpoint that it samples from."""
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
                _, checkpoint, *_ = iteration_steps[0].inputs  # the first step is a rollout: problems, checkpoint
                self._waiting[checkpoint].append(iteration_steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        if error is not None and not isinstance(error, Exception):
            self._abort()
        self._threads.shutdown(cancel_futures=True)

    def computes(self, step: Step) -> bool:
        """Whether a thread computes ``step``. Raises the error of a thread that failed."""
        if self._errors:
            raise self._errors[0]
        return step.stage in SAMPLING_STAGES and step.iteration in self._begun

    def sample_from(self, checkpoint: str) -> None:
        """Start the iterations that sample from ``checkpoint``, which is committed."""
        for iteration_steps in self._waiting.pop(checkpoint, []):
            # Prefect's tasks find their flow run in the context, which a new thread does not inherit.
            begun = self._threads.submit(copy_context().run, self._sample, iteration_steps)
            self._begun[iteration_steps[0].iteration] = begun

    def wait_for(self, step: Step) -> Pointer | None:
        """Wait for the iteration of ``step`` and return its output; None if the step was skipped."""
        self._begun[step.iteration].result()
        if self._errors:
            raise self._errors[0]
        return self._outputs.pointers.get(step.output)

    def _sample(self, iteration_steps: Sequence[Step]) -> None:
        for step in iteration_steps:
            if self._stopped.is_set():
                return
            try:
                self._outputs.compute(step)
            except BaseException as error:  # the run's own thread raises the first error of all threads again
                self._errors.append(error)
                self._stopped.set()
                raise
