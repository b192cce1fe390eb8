"""The flow of scheduled training runs, and ``magrpo schedule``, which serves it on one machine."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import State, StateType
from prefect.runner import Runner
from prefect.runtime import deployment, flow_run
from prefect.schedules import Schedule
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled
from rich.console import Console

from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.config.services import hide_password
from magrpo.config.validate import write_override
from magrpo.errors import ConfigError
from magrpo.planning.place_check import check_place
from magrpo.progress.state import describe_error, was_refused
from magrpo.run.files import keep_place
from magrpo.run.store import RunStore
from magrpo.training.closing import print_closing
from magrpo.training.execute import Result
from magrpo.training.removal import remove_run
from pipelines.arguments import locate_config, parse_place
from pipelines.flows.timetable import Timetable
from pipelines.flows.train import execute_in_flow, name_server

FLOW = "magrpo-scheduled"


def build_schedule(timetable: Timetable) -> Schedule:
    """Convert the timetable to Prefect's schedule. Raises ConfigError if Prefect cannot use its cron expression."""
    # Around a change of the clocks, Prefect's intervals in a zone would start some runs twice, an hour apart.
    zone = timetable.timezone if timetable.interval is None else "UTC"
    try:
        return Schedule(cron=timetable.cron, interval=timetable.interval, timezone=zone)
    except ValueError as error:
        raise ConfigError(f"--cron {timetable.cron!r}: {error}") from None


@flow(name=FLOW, flow_run_name="{name}", validate_parameters=False)
def scheduled(config: str, overrides: list[str], root: str, name: str, place: str = "") -> State[None] | None:
    """One scheduled training run. A retry resumes it at its first uncommitted stage.

    A run that is refused before it has sampled anything is removed, and its flow run cancelled.

    Args:
        config: TOML file on the training machine, or the name of a shipped configuration. Read for every run.
        overrides: Changes to the configuration, each written section.key=value, such as train.seed=1.
        root: Folder of run directories on the training machine.
        name: Prefix of the run's name; its due date and time are appended.
        place: Cluster file on the training machine that says where to run; empty: one process there.
    """
    due = flow_run.scheduled_start_time.astimezone(UTC)
    this_deployment = DeploymentFilter.model_validate({"id": {"any_": [deployment.id]}})
    # They came due during an earlier, longer run; Prefect would start all of them, one after another.
    cancel_waiting_runs(this_deployment, f"skipped: the run of {name} due at {due} replaces it")
    return execute_scheduled_run(config, overrides, root, name_run(name, due), place, execute_in_flow)


def name_run(name: str, due: datetime) -> str:
    """Name the run of a schedule that is due at this time, in UTC."""
    return f"{name}-{due:%Y%m%d-%H%M%S}"


def execute_scheduled_run(
    config: str,
    overrides: Sequence[str],
    root: str,
    run_id: str,
    place: str,
    execute: Callable[[Path, str], Result],
) -> State[None] | None:
    """Create the run unless it exists, and call ``execute``, which resumes it. A new run that is refused is removed.

    Returns the state of a flow run to cancel; None if the run ended well. Raises ConfigError if a run that has begun is
    refused, or a new one cannot be created.
    """
    store = RunStore(Path(root), run_id)
    given = parse_place(place) if place else None  # checked before a folder is created
    is_new = not store.exists()
    if is_new:
        resolved = load_config(locate_config(config), [*overrides, write_override("root", root)])
        check_place(resolved, given or Place())
        RunStore.create(resolved, run_id)
    keep_place(store, given)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"run {run_id} in {Path(root) / run_id}")
    try:
        result = execute(Path(root), run_id)
    except ConfigError as error:
        if not (is_new and was_refused(store, error)):
            raise
        remove_run(store)
        console.print(f"run {run_id} is refused and removed: {error}")
        return Cancelled(message=describe_error(error))
    print_closing(result, console)
    return None


def cancel_waiting_runs(deployments: DeploymentFilter, message: str) -> None:
    """Cancel the runs of these deployments of :func:`scheduled` that are due and have not started."""
    waiting = {
        "state": {"type": {"any_": [StateType.SCHEDULED]}},
        "expected_start_time": {"before_": datetime.now(UTC)},
    }
    with get_client(sync_client=True) as client:
        read_waiting = partial(
            client.read_flow_runs,
            flow_filter=FlowFilter.model_validate({"name": {"any_": [FLOW]}}),
            deployment_filter=deployments,
            flow_run_filter=FlowRunFilter.model_validate(waiting),
        )
        while runs := read_waiting():  # the server returns 200 at once
            for run in runs:
                client.set_flow_run_state(run.id, Cancelled(message=message), force=True)


def serve_flow(
    config: Path, overrides: Sequence[str], timetable: Timetable, name: str, limit: int, place: Path | None
) -> None:
    """Start runs by ``timetable`` until interrupted. Prefect's API must be reachable.

    Raises ConfigError; HTTPError if the server refuses the schedule; ServerError if it stays away later.
    """
    schedule = build_schedule(timetable)
    root = load_config(config, overrides).root.absolute()
    parameters = {
        "config": str(config.absolute()),
        "overrides": [text for text in overrides if text.partition("=")[0].strip() != "root"],
        "root": str(root),
        "name": name,
        "place": str(place.absolute()) if place is not None else "",
    }
    # A run may have come due while the last process that served the deployment was stopping.
    same_name = DeploymentFilter.model_validate({"name": {"any_": [name]}})
    cancel_waiting_runs(same_name, f"skipped: {name} was not served when the run was due")
    runner = _Runner(name=name, limit=limit)
    # The last process that served the deployment paused it at its end.
    runner.add_flow(scheduled, name=name, parameters=parameters, schedule=schedule, paused=False)
    api = hide_password(str(PREFECT_API_URL.value())).rstrip("/")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"serving {name}: {timetable}")
    console.print(f"runs:    {root}/{name}-*")
    console.print(f"page:    {api.removesuffix('/api')}")
    console.print(f"at once: PREFECT_API_URL={api} prefect deployment run '{FLOW}/{name}'\nPress Ctrl-C to stop")
    with name_server((RuntimeError, ExceptionGroup)):  # the loops of Prefect's runner are groups of tasks
        asyncio.run(_run_until_interrupted(runner))


class _Runner(Runner):
    def handle_sigterm(self, *_: object) -> None:
        """Leave SIGTERM to the event loop; Prefect's handler would exit and leave the run in progress running."""


async def _run_until_interrupted(runner: Runner) -> None:
    """Run ``runner`` like ``Flow.serve``, but stop it on a signal in the way that cancels the run in progress."""
    task = asyncio.current_task()
    assert task is not None
    stopping = set[asyncio.Task[None]]()

    def stop() -> None:
        if runner.started:
            stopping.add(asyncio.ensure_future(runner.astop()))
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop)
    await runner.start()
