"""The live state of a run, read by the console, notices and Prefect's page, and the observers of an attempt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from magrpo.config.run import RunConfig
from magrpo.config.services import NotifyConfig
from magrpo.errors import ConfigError
from magrpo.interfaces import Reward
from magrpo.process.faults import describe_fault
from magrpo.reports.budget import count_tokens
from magrpo.reports.series import first_and_last
from magrpo.run.files import has_samples
from magrpo.run.steps import Step, first_missing, steps
from magrpo.run.store import RunStore
from magrpo.text import format_count

_MAX_ERROR = 300
"""Longest description of an error, in characters."""


@dataclass(slots=True)
class RunState:
    """The progress of a run. Returns are fractions of the maximum."""

    num_iterations: int
    reward: Reward
    """Reward of the run, which knows the maxima of the joint reward and of its parts."""
    step: Step | None = None
    """Step that began or ended last; None before the first."""
    under_way: dict[Step, None] = field(default_factory=dict)
    """Steps under way, in the order in which they began; several with ``train.lag``."""
    trained_iterations: int = 0
    num_computed: int = 0
    """Number of steps that this process computed rather than found committed."""
    training_return: float | None = None
    """Training return of the newest iteration that has one."""
    credited_iterations: int = 0
    held_out_returns: dict[int, float] = field(default_factory=dict)
    """Held-out return by iteration."""
    max_tokens: int | None = None
    """Tokens at which training ends; ``num_iterations`` is then an estimate, from the tokens generated so far."""
    tokens: float = 0.0
    """Tokens generated in training."""
    num_rows: int = 0
    """Number of rows of a run of baselines; 0 for other runs."""
    finished_rows: int = 0
    finished_lines: dict[Step, str] = field(default_factory=dict)
    """One line of text for each step computed by this process: ``00007/update: 1.8 s``."""
    _most_iterations: int = field(init=False)

    def __post_init__(self) -> None:
        self._most_iterations = self.num_iterations

    @classmethod
    def begin(cls, config: RunConfig) -> RunState:
        """Return the state of a run that has done nothing yet."""
        train, num_rows = config.train, len(config.baselines.rows)
        return cls(train.num_iterations, config.reward, max_tokens=train.max_tokens, num_rows=num_rows)

    @classmethod
    def read(cls, store: RunStore) -> RunState:
        """Read the state from a run directory; its step is the first one left to compute."""
        config = store.config()
        state = cls.begin(config)
        every = steps(config)
        missing = first_missing(config, store)
        for step in every:
            if store.is_committed(step.output):
                state.finish_step(step, store.manifest_of(step.output)["metrics"], reused=True)
        if missing < len(every):
            state.step = every[missing]
        return state

    def start_step(self, step: Step) -> None:
        """Record that ``step`` is being computed."""
        self.step = step
        self.under_way[step] = None

    def finish_step(self, step: Step, metrics: Mapping[str, float], *, reused: bool) -> None:
        """Record that ``step`` is committed."""
        self.step = step
        self.under_way.pop(step, None)
        if not reused:
            self.num_computed += 1
        self.tokens += count_tokens(metrics)
        figures = [f"{metrics.get(f'time/{step.stage}_s', 0.0):.1f} s"]
        if step.stage == "credit" and "reward/joint" in metrics:
            fraction = self.reward.fraction(metrics["reward/joint"])
            if step.iteration > self.credited_iterations:
                self.training_return, self.credited_iterations = fraction, step.iteration
            figures.append(f"joint return {fraction:.1%}")
        elif step.stage == "update":
            self.trained_iterations = step.iteration
            if self.max_tokens is not None and self.tokens:
                missing = math.ceil(max(self.max_tokens - self.tokens, 0) * step.iteration / self.tokens)
                self.num_iterations = min(step.iteration + missing, self._most_iterations)
        elif step.stage == "baseline":
            self.finished_rows += 1
        elif step.stage == "evaluate":
            self.held_out_returns[step.iteration] = metrics["eval/return"]
            figures.append(f"held-out return {metrics['eval/return']:.1%}")
        name = step.label if step.happens_once or step.stage == "baseline" else step.output
        if not reused:
            self.finished_lines[step] = f"{name}: {', '.join(figures)}"

    def describe_done(self) -> str:
        """``7/160``: trained iterations; in a run of baselines ``row 4 of 13``: the row under way."""
        if self.num_rows:
            return f"row {min(self.finished_rows + 1, self.num_rows)} of {self.num_rows}"
        return f"{self.trained_iterations}/{self.num_iterations}"

    def describe_resumption(self, step: Step) -> str:
        """``resuming after iteration 3``: where a resumed run continues; ``step`` is the first one to compute."""
        if self.num_rows and self.finished_rows:
            return f"resuming after row {self.finished_rows} of {self.num_rows}"
        if self.trained_iterations:
            return f"resuming after iteration {self.trained_iterations}"
        return f"resuming with {self._describe(step)}"

    def describe_step(self) -> str:
        """``rollout.0, iteration 7 of 160``: the steps under way, joined by semicolons."""
        under_way = sorted(self.under_way, key=lambda step: step.iteration)
        if not under_way and self.step is None:
            return "starting"
        return "; ".join(map(self._describe, under_way or filter(None, [self.step])))

    def _describe(self, step: Step) -> str:
        return step.label if step.happens_once else f"{step.label}, iteration {step.iteration} of {self.num_iterations}"

    def describe_returns(self) -> str:
        """Describe the training and held-out returns; empty before the first measurement."""
        parts = [] if self.training_return is None else [f"training {self.training_return:.1%}"]
        for iteration, value in first_and_last(list(self.held_out_returns.items())):
            when = "before" if iteration == 0 else f"after {format_count(iteration, 'iterations')}"
            parts.append(f"held-out {value:.1%} {when}")
        return ", ".join(parts)


@dataclass(slots=True)
class Attempt:
    """A process at work on a run."""

    store: RunStore
    notify: NotifyConfig
    state: RunState
    mlflow_page: Callable[[], tuple[str, str]] = lambda: ("", "")
    """Returns the command that serves MLflow (empty for a server) and the run's address in MLflow, once known."""


class Observer(Protocol):
    """Notified of an attempt's progress from within the loop, one call at a time: must be quick, and must not raise."""

    def attempt_started(self, attempt: Attempt) -> None:
        """Called when this process holds the run and has computed nothing yet."""

    def step_finished(self, step: Step) -> None:
        """Called when ``step`` was computed or found committed; does nothing by default."""
        return

    def team_promoted(self, text: str) -> None:
        """Called when the run's agents became the champion; ``text`` says why."""

    def attempt_ended(self, error: BaseException | None) -> None:
        """Called when the attempt is over; ``error`` is None unless it ended the attempt early."""


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception, with the remedy if it is known, on one line."""
    said = describe_fault(error) if isinstance(error, OSError) else str(error)
    first = next((line.strip() for line in said.splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:_MAX_ERROR] if first else type(error).__name__


def was_refused(store: RunStore, error: BaseException) -> bool:
    """Whether ``error`` is a mistake in the configuration, found before the first samples were committed.

    False if the run directory cannot be read.
    """
    try:
        return isinstance(error, ConfigError) and not has_samples(store)
    except (ConfigError, OSError):
        return False


@contextmanager
def observe_attempt(attempt: Attempt, observers: Sequence[Observer]) -> Iterator[None]:
    """Notify ``observers`` of the start and the end of the block."""
    for observer in observers:
        observer.attempt_started(attempt)
    ended_by: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ended_by = error
        raise
    finally:
        for observer in observers:
            observer.attempt_ended(ended_by)
