"""Observers of an attempt at a run: notices to people, Prefect's page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from pipelines.progress.state import Attempt


class Observer(Protocol):
    """Notified of an attempt's progress from within the loop: must be quick, and must not raise."""

    def attempt_started(self, attempt: Attempt) -> None:
        """This process holds the run and has computed nothing yet."""
        ...

    def step_finished(self) -> None:
        """A step was computed, or found committed."""
        ...

    def team_promoted(self, text: str) -> None:
        """The run's agents became the champion; ``text`` says why."""
        ...

    def attempt_ended(self, error: BaseException | None) -> None:
        """The attempt is over; ``error`` ended it early."""
        ...


@contextmanager
def observe_attempt(attempt: Attempt, observers: Sequence[Observer]) -> Iterator[None]:
    """Notify ``observers`` of the start and the end of the block."""
    for observer in observers:
        observer.attempt_started(attempt)
    try:
        yield
    except BaseException as error:
        for observer in observers:
            observer.attempt_ended(error)
        raise
    for observer in observers:
        observer.attempt_ended(None)
