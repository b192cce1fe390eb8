"""A training run as a Prefect flow: the loop of :mod:`pipelines.training.loop` with each step a task."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.runtime import deployment, flow_run
from prefect.states import Crashed
from prefect.utilities.urls import url_for

from pipelines.flows.progress_page import ProgressPage
from pipelines.flows.tasks import run_as_tasks, undo_in_transaction
from pipelines.progress.notify import Notices
from pipelines.progress.state import Observer
from pipelines.training.description import FLOW_RUN_URL
from pipelines.training.execute import Result, execute


@flow(name="magrpo-train", flow_run_name="{run_id}", validate_parameters=False)
def train(root: str, run_id: str) -> Result:
    """Resume the run ``run_id`` in ``root`` at its first uncommitted step and run it to its end."""
    return execute_in_flow(Path(root), run_id)


def execute_in_flow(root: Path, run_id: str) -> Result:
    """Execute a run from within a flow run: steps are tasks, MLflow links to the flow run, observers are notified."""
    page = url_for("flow-run", obj_id=flow_run.id)
    tags = {"prefect.flow_run_id": str(flow_run.id)}
    if page is not None:
        tags[FLOW_RUN_URL] = page
    observers: list[Observer] = [ProgressPage(deployment.name or run_id, UUID(flow_run.id)), Notices(page)]
    return execute(root, run_id, run_as_tasks, tags, undo_in_transaction, observers)


def mark_killed(run_id: str) -> int:
    """Mark earlier flow runs of this run, killed before they could report it, as crashed; returns their number."""
    running = FlowRunFilter(
        name=FlowRunFilterName(any_=[run_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
    )
    with get_client(sync_client=True) as client:
        stale = client.read_flow_runs(flow_run_filter=running)
        for run in stale:
            client.set_flow_run_state(run.id, Crashed(message="the process was killed"), force=True)
    return len(stale)
