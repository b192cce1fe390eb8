"""The stages as Prefect tasks: names, retries where the world may be at fault, and no logic.

Prefect's result cache is off on purpose. The run directory is the one memory of a run: a stage that is run again finds
its output committed, checks it for damage and returns within milliseconds. A second memory could only disagree with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff
from prefect.transactions import Transaction, transaction

from magrpo.engines import EngineError
from magrpo.sandboxes import SandboxDied
from pipelines.training.loop import Stages

log = logging.getLogger(__name__)

NAMES = {
    "prepare": "prepare",
    "start": "start",
    "rollout": "{iteration:05d}/rollout.{turn}",
    "score": "{iteration:05d}/score.{turn}",
    "credit": "{iteration:05d}/credit",
    "update": "{iteration:05d}/update",
    "evaluate": "{iteration:05d}/evaluate",
    "baseline": "baseline.{row}",
    "report": "report",
}
"""The name of a task run, which is that of its folder in the run directory."""

WORLD = (EngineError, SandboxDied, OSError)
"""Worker death, timeouts, connections, disks: trying again may help. A bad configuration stays bad."""


def world_at_fault(_task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed stage deserves another try; says so. Prefect asks only while tries are left."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, WORLD):
        log.warning("%s failed and is tried again: %s", task_run.name, error)
    return isinstance(error, WORLD)


def as_tasks(stages: Stages) -> Stages:
    """The same stages, each call a Prefect task run."""
    wrapped = {
        name: task(
            name=name,
            task_run_name=run_name,
            cache_policy=NO_CACHE,
            retries=2,
            retry_delay_seconds=exponential_backoff(2),
            retry_condition_fn=world_at_fault,
        )(getattr(stages, name))
        for name, run_name in NAMES.items()
    }
    return cast(Stages, SimpleNamespace(**wrapped))


@contextmanager
def in_transaction(undo: Callable[[], None]) -> Iterator[None]:
    """A Prefect transaction with ``undo`` as its rollback hook; an ``Undo`` of :mod:`pipelines.training.promotion`."""

    def put_back(_: Transaction) -> None:
        undo()

    with transaction() as open_transaction:
        open_transaction.stage(None, on_rollback_hooks=[put_back])
        yield
