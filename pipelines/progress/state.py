"""How far a run has come, and those who are told: the notices, Prefect's page. Imports no prefect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from magrpo.config import NotifyConfig
from magrpo.layout import ONCE, steps
from magrpo.store import RunStore


@dataclass(slots=True)
class Standing:
    """How far a run has come."""

    num_iterations: int
    fraction: Callable[[float], float]
    """The share of the maximum that a joint reward is."""
    stage: str = "starting"
    """The stage under way, or the last one: ``rollout.0``."""
    iteration: int = 0
    done: int = 0
    """Iterations that are trained."""
    fresh: int = 0
    """Stages done, not just found done."""
    training: float | None = None
    """Mean joint reward of the newest iteration, a fraction of the maximum."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Held-out return by iteration, fractions of the maximum."""

    @classmethod
    def of(cls, store: RunStore) -> Standing:
        """Read from the run directory; the stage is the one after the last that is committed."""
        config = store.config()
        standing = cls(config.train.num_iterations, config.reward.fraction)
        every = steps(config)
        last = max((i for i, step in enumerate(every) if store.committed(step.folder)), default=-1)
        for step in every[: last + 1]:
            if store.committed(step.folder):
                metrics = store.metrics({"dir": f"stages/{step.folder}", "sha": ""})
                standing.end(step.folder.partition("/")[2], step.iteration, metrics, reused=True)
        if last + 1 < len(every):
            standing.begin(every[last + 1].stage, every[last + 1].iteration)
        return standing

    def begin(self, stage: str, iteration: int) -> None:
        """A stage is to be done."""
        self.stage, self.iteration = stage, iteration

    def end(self, stage: str, iteration: int, metrics: Mapping[str, float], *, reused: bool) -> None:
        """A stage is committed."""
        self.stage, self.iteration = stage, iteration
        self.fresh += not reused
        if "reward/joint" in metrics and stage != "evaluate":
            self.training = self.fraction(metrics["reward/joint"])
        if stage == "update":
            self.done = iteration
        elif stage == "evaluate":
            self.held_out[iteration] = metrics["eval/return"]

    @property
    def where(self) -> str:
        """In words."""
        once = self.stage in (*ONCE, "starting") or (self.stage, self.iteration) == ("update", 0)
        return self.stage if once else f"{self.stage}, iteration {self.iteration} of {self.num_iterations}"

    @property
    def returns(self) -> str:
        """In words; empty before anything is measured."""
        parts = [] if self.training is None else [f"training {self.training:.1%}"]
        for iteration, value in [*self.held_out.items()][:1] + [*self.held_out.items()][1:][-1:]:
            when = "before" if iteration == 0 else f"after {iteration} iterations"
            parts.append(f"held-out {value:.1%} {when}")
        return ", ".join(parts)


@dataclass(slots=True)
class Attempt:
    """A process at work on a run."""

    store: RunStore
    notify: NotifyConfig
    standing: Standing
    look: Callable[[], tuple[str, str]] = lambda: ("", "")
    """The command that shows the MLflow run (empty for a server), and the address of its page; what is known by now."""


class Observer(Protocol):
    """Told how an attempt goes, from within the loop: must be quick, and must not raise."""

    def begun(self, attempt: Attempt) -> None:
        """The run is held by this process, and nothing is done yet."""
        ...

    def passed(self) -> None:
        """A stage has been done, or found done."""
        ...

    def promoted(self, text: str) -> None:
        """The run's agents are the champion now; ``text`` says why."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """The attempt is over; ``error`` is what ended it early."""
        ...


@contextmanager
def observed(attempt: Attempt, observers: Sequence[Observer]) -> Iterator[None]:
    """Tell ``observers`` of the beginning and the end of what happens inside."""
    for observer in observers:
        observer.begun(attempt)
    try:
        yield
    except BaseException as error:
        for observer in observers:
            observer.ended(error)
        raise
    for observer in observers:
        observer.ended(None)
