"""A training run as a Prefect flow: the loop of :mod:`pipelines.chain` over the stages as tasks."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.states import Crashed
from prefect.utilities.urls import url_for

from pipelines.describe import FLOW_RUN_URL
from pipelines.runner import Result, execute
from pipelines.settings import prefect_target
from pipelines.tasks import as_tasks, in_transaction


@flow(name="magrpo-train", flow_run_name="{run_id}", validate_parameters=False)
def train(root: str, run_id: str) -> Result:
    """Go on with the run ``run_id`` in ``root`` from its first uncommitted stage to its end."""
    tags = {"prefect.flow_run_id": str(flow_run.id)}
    page = url_for("flow-run", obj_id=flow_run.id) if prefect_target() else None  # the run's own server ends with it
    if page:
        tags[FLOW_RUN_URL] = page
    return execute(Path(root), run_id, as_tasks, tags, in_transaction)


def mark_killed(run_id: str) -> int:
    """Tell Prefect that earlier flow runs of this run, killed before they could say so, have crashed; how many."""
    running = FlowRunFilter(
        name=FlowRunFilterName(any_=[run_id]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING])),
    )
    with get_client(sync_client=True) as client:
        stale = client.read_flow_runs(flow_run_filter=running)
        for run in stale:
            client.set_flow_run_state(run.id, Crashed(message="the process was killed"), force=True)
    return len(stale)
