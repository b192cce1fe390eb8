"""A training run as a Prefect flow: the loop of :mod:`magrpo.training.loop` with each step a task.

Prefect's result cache is off on purpose. The run directory is the only memory of a run: a step that runs again finds
its output committed and returns within milliseconds. A second memory could only disagree with it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from httpx import HTTPError
from prefect import Flow, Task, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Crashed
from prefect.tasks import exponential_backoff
from prefect.utilities.urls import url_for

from magrpo.config.services import hide_password, hide_passwords
from magrpo.engines import EngineError, NonFiniteLogits
from magrpo.errors import first_line
from magrpo.progress.notify import Notices
from magrpo.progress.state import Observer, describe_error, was_refused
from magrpo.run.steps import Step
from magrpo.run.store import Pointer, RunStore
from magrpo.sandboxes import SandboxDied
from magrpo.training.execute import Result, execute
from magrpo.training.loop import RunStep
from magrpo.training.recorder import FLOW_RUN_URL
from magrpo.updates import UpdatesDied
from pipelines.flows.local_server import ServerError
from pipelines.flows.progress_page import ProgressPage

log = logging.getLogger(__name__)

TRANSIENT = (EngineError, SandboxDied, UpdatesDied, OSError)
"""Worker death, timeouts, connections, disks: a retry may help. A bad configuration stays bad."""


def cancel_refused(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Mark a failed flow run as cancelled if its configuration was refused before the run sampled anything.

    Such a run is not a failure to look into, and the command that started it removes its folder.
    """
    error = state.result(raise_on_failure=False)
    store = RunStore(Path(flow_run.parameters["root"]), flow_run.parameters["run_id"])
    if isinstance(error, Exception) and was_refused(store, error):
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Cancelled(message=describe_error(error)), force=True)


@flow(name="magrpo-train", flow_run_name="{run_id}", validate_parameters=False, on_failure=[cancel_refused])
def train(root: str, run_id: str) -> Result:
    """Resume the run ``run_id`` in ``root`` at its first uncommitted step and run it to its end.

    Args:
        root: Folder of run directories.
        run_id: Name of the run's directory.
    """
    return execute_in_flow(Path(root), run_id)


def execute_in_flow(root: Path, run_id: str) -> Result:
    """Execute a run from within a flow run: steps are tasks, MLflow links to the flow run, observers are notified."""
    page = url_for("flow-run", obj_id=flow_run.id)
    tags = {"prefect.flow_run_id": str(flow_run.id), **({FLOW_RUN_URL: page} if page else {})}
    observers: list[Observer] = [ProgressPage(deployment.name or run_id, UUID(flow_run.id)), Notices(page)]
    return execute(root, run_id, run_as_tasks, tags, observers)


def mark_killed(name: str, parameters: Mapping[str, str]) -> None:
    """Mark earlier flow runs as crashed if they were killed before they could report it.

    They are those of this name that were called with these parameters: others on the server may share the name.
    """
    running = {"name": {"any_": [name]}, "state": {"type": {"any_": [StateType.RUNNING]}}}
    hurried = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1})
    with hurried, get_client(sync_client=True, httpx_settings={"timeout": 10.0}) as client:
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(running)):
            if not parameters.items() <= run.parameters.items():
                continue
            client.set_flow_run_state(run.id, Crashed(message="the process was killed"), force=True)


@contextmanager
def name_server(kinds: tuple[type[Exception], ...] = (HTTPError,)) -> Iterator[None]:
    """Raise ServerError, which names the server, for errors of these kinds, by default those of Prefect's client."""
    try:
        yield
    except kinds as error:
        cause: Exception = error
        while isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        reason = hide_passwords(first_line(cause))
        where = hide_password(PREFECT_API_URL.value() or "")
        raise ServerError(f"the Prefect server at {where} (PREFECT_API_URL) failed: {reason}") from error


def is_transient(_task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    """Decide whether to retry a failed step, and log a retry. Prefect asks only while retries are left."""
    error = state.result(raise_on_failure=False)
    again = isinstance(error, TRANSIENT) and not isinstance(error, NonFiniteLogits)
    if again:
        log.warning("%s failed, retrying: %s", task_run.name, error)
    return again


def run_as_tasks(run_step: RunStep) -> RunStep:
    """Wrap ``run_step`` so that each call is a Prefect task, named like its folder in the run directory."""

    def run_task(step: Step, inputs: Sequence[Pointer]) -> Pointer:
        as_task: Task[[Step, Sequence[Pointer]], Pointer] = task(
            name=step.stage,
            task_run_name=step.label if step.happens_once or step.stage == "baseline" else step.output,
            cache_policy=NO_CACHE,
            retries=2,
            retry_delay_seconds=exponential_backoff(2),
            retry_condition_fn=is_transient,
        )(run_step)
        return as_task(step, inputs)

    return run_task
