"""The steps of a run as Prefect tasks: names, and retries on transient errors.

Prefect's result cache is off on purpose. The run directory is the one memory of a run: a step that runs again finds its
output committed, checks it for damage and returns within milliseconds. A second memory could only disagree with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff
from prefect.transactions import Transaction, transaction

from magrpo.engines import EngineError
from magrpo.layout import Step
from magrpo.sandboxes import SandboxDied
from magrpo.store import Pointer
from pipelines.training.loop import RunStep

log = logging.getLogger(__name__)

TRANSIENT = (EngineError, SandboxDied, OSError)
"""Worker death, timeouts, connections, disks: a retry may help. A bad configuration stays bad."""


def is_transient(_task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    """Whether to retry a failed step; logs that it will. Prefect asks only while retries are left."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, TRANSIENT):
        log.warning("%s failed and is tried again: %s", task_run.name, error)
    return isinstance(error, TRANSIENT)


def run_as_tasks(run_step: RunStep) -> RunStep:
    """``run_step``, each call a Prefect task run named like its folder in the run directory."""

    def run_task(step: Step, inputs: Sequence[Pointer]) -> Pointer:
        as_task: Task[[Step, Sequence[Pointer]], Pointer] = task(
            name=step.stage if step.stage != "tables" else "report",
            task_run_name=step.title if step.happens_once or step.stage == "baseline" else step.folder,
            cache_policy=NO_CACHE,
            retries=2,
            retry_delay_seconds=exponential_backoff(2),
            retry_condition_fn=is_transient,
        )(run_step)
        return as_task(step, inputs)

    return run_task


@contextmanager
def undo_in_transaction(undo: Callable[[], None]) -> Iterator[None]:
    """A Prefect transaction with ``undo`` as its rollback hook; an ``Undo`` of :mod:`pipelines.training.promotion`."""

    def roll_back(_: Transaction) -> None:
        undo()

    with transaction() as open_transaction:
        open_transaction.stage(None, on_rollback_hooks=[roll_back])
        yield
