"""The flow of scheduled training runs, and ``magrpo schedule``, which serves it on one machine.

Prefect keeps the schedule and starts the runs. By itself it would queue the runs that become due during a longer run,
and lose those due while nothing served the schedule. Here one run makes up for all of them.
"""

import asyncio
import signal
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect import Flow, flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.runner import Runner
from prefect.runtime import deployment, flow_run
from prefect.schedules import Schedule
from prefect.server.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from prefect.states import Cancelled, Scheduled
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError
from rich.console import Console

from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.planning.fit import check_place
from magrpo.plugins import ConfigError
from magrpo.run.files import keep_place
from magrpo.run.store import RunStore
from magrpo.training.closing import print_closing
from pipelines.arguments import list_shipped, locate_config, parse_place
from pipelines.flows.timetable import Timetable, parse_interval
from pipelines.flows.train import execute_in_flow

ServerSchedule = CronSchedule | IntervalSchedule | RRuleSchedule
FLOW = "magrpo-scheduled"
TITLES = {
    "config": "Configuration",
    "overrides": "Configuration overrides",
    "root": "Run folder",
    "name": "Run name prefix",
    "place": "Cluster file (place)",
}
"""Titles of the parameters on Prefect's form."""
_CATCH_UP = timedelta(days=366)
"""Older missed runs are ignored."""


def build_schedule(timetable: Timetable) -> ServerSchedule:
    """The schedule as Prefect's server holds it, to compute dates. Raises ConfigError if Prefect cannot use it."""
    try:
        if timetable.cron is not None:
            return CronSchedule(cron=timetable.cron, timezone=timetable.timezone)
        if timetable.rrule is not None:
            return RRuleSchedule(rrule=timetable.rrule, timezone=timetable.timezone)
    except ValueError as error:
        flag, text = ("cron", timetable.cron) if timetable.cron is not None else ("rrule", timetable.rrule)
        message = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"--{flag} {text!r}: {message.removeprefix('Value error, ')}") from None
    assert timetable.interval is not None
    return IntervalSchedule(interval=parse_interval(timetable.interval), timezone=timetable.timezone)


def build_deployed_schedule(timetable: Timetable) -> Schedule:
    """The schedule as a deployment takes it."""
    interval = parse_interval(timetable.interval) if timetable.interval else None
    return Schedule(cron=timetable.cron, interval=interval, rrule=timetable.rrule, timezone=timetable.timezone)


@flow(name=FLOW, flow_run_name="{name}", validate_parameters=False)
def scheduled(config: str, overrides: list[str], root: str, name: str, place: str = "") -> None:
    """One scheduled training run, instead of all that are due. A retry resumes it at its first uncommitted stage.

    Args:
        config: TOML file on the training machine, or the name of a shipped configuration. Read for every run.
        overrides: Changes to the configuration, each written section.key=value, such as train.seed=1.
        root: Folder of run directories on the training machine.
        name: Prefix of the run's name; its due date and time are appended.
        place: Cluster file on the training machine that says where to run; empty: one process there.
    """
    due = flow_run.scheduled_start_time.astimezone(UTC)
    with get_client(sync_client=True) as client:
        for waiting in _read_due_runs(client, deployment.id, after=due - _CATCH_UP, waiting=True):
            message = f"skipped: the run of {name} due at {due} replaces it"
            client.set_flow_run_state(waiting.id, Cancelled(message=message), force=True)
    run_id = f"{name}-{due:%Y%m%d-%H%M%S}"
    store = RunStore(Path(root), run_id)
    given = parse_place(place) if place else None  # before a folder is created
    if not store.exists():
        resolved = load_config(locate_config(config), [*overrides, f"root={root}"])
        check_place(resolved, given or Place())
        RunStore.create(resolved, run_id)
    keep_place(store, given)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"run {run_id} in {Path(root) / run_id}")
    print_closing(execute_in_flow(Path(root), run_id), console)


def serve_flow(
    config: Path, overrides: Sequence[str], timetable: Timetable, name: str, limit: int, place: Path | None = None
) -> None:
    """Start runs by ``timetable`` until interrupted. Prefect's API must be reachable. Raises ConfigError."""
    schedule = build_schedule(timetable)
    root = load_config(config, overrides).root.absolute()
    changes = [text for text in overrides if text.partition("=")[0].strip() != "root"]  # it is a parameter of its own
    parameters = {"config": str(config.absolute()), "overrides": changes, "root": str(root), "name": name}
    parameters["place"] = str(place.absolute()) if place is not None else ""
    with get_client(sync_client=True) as client:
        missed = _find_missed_run(client, name, schedule)
        runner = _Runner(name=name, pause_on_shutdown=False, limit=limit)
        deployed = build_deployed_schedule(timetable)
        deployment_id = runner.add_flow(scheduled, name=name, parameters=parameters, schedule=deployed)
        assert isinstance(deployment_id, UUID)
        form = describe_form(scheduled, [str(config.absolute()), *list_shipped()])
        client.update_deployment(deployment_id, DeploymentUpdate(parameter_openapi_schema=form))
        if missed is not None:
            client.create_flow_run_from_deployment(
                deployment_id, state=Scheduled(scheduled_time=missed), idempotency_key=f"missed-{missed.isoformat()}"
            )
    zone, api = ZoneInfo(schedule.timezone or "UTC"), str(client.api_url).rstrip("/")
    coming = asyncio.run(schedule.get_dates(n=3, start=datetime.now(UTC)))
    times = ", ".join(f"{date.astimezone(zone):%a %Y-%m-%d %H:%M:%S}" for date in coming)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"serving {name}: next runs at {times or 'no time'} ({zone})")
    if missed is not None:
        console.print(f"missed: {missed.astimezone(zone):%a %Y-%m-%d %H:%M:%S}; a run starts now to make up for it")
    console.print(f"runs:    {root}/{name}-*")
    console.print(f"page:    {api.removesuffix('/api')}")
    console.print(f"at once: PREFECT_API_URL={api} prefect deployment run '{FLOW}/{name}'\nPress Ctrl-C to stop")
    asyncio.run(_run_until_interrupted(runner))


def describe_form(of: Flow[..., Any], configs: Sequence[str]) -> dict[str, Any]:
    """The schema of a flow's parameters for Prefect's form, with titles and with ``configs`` as choices.

    Prefect takes descriptions from the docstring, and names for titles.
    """
    schema: dict[str, Any] = parameter_schema(of).model_dump()
    for name, described in schema["properties"].items():
        described["title"] = TITLES[name]
    schema["properties"]["config"]["enum"] = list(dict.fromkeys(configs))
    return schema


class _Runner(Runner):
    def handle_sigterm(self, *_: object) -> None:
        """Leave SIGTERM to the event loop: Prefect's handler ends the process at once."""


async def _run_until_interrupted(runner: Runner) -> None:
    """On a signal, stop the runner the way that reports the run in progress to Prefect."""
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


def _find_missed_run(client: SyncPrefectClient, name: str, schedule: ServerSchedule) -> datetime | None:
    """When the newest run was due of those missed since this deployment last ran or was created; None: none missed."""
    try:
        existing = client.read_deployment_by_name(f"{FLOW}/{name}")
    except ObjectNotFound:
        return None
    now = datetime.now(UTC)
    started = _read_due_runs(client, str(existing.id), after=now - _CATCH_UP, waiting=False)
    last_due = started[0].expected_start_time if started else existing.created
    assert last_due is not None
    missed = asyncio.run(schedule.get_dates(n=10_000, start=last_due + timedelta(seconds=1), end=now))
    return max(missed).astimezone(UTC) if missed else None


def _read_due_runs(client: SyncPrefectClient, deployment_id: str, *, after: datetime, waiting: bool) -> list[FlowRun]:
    """Runs of a deployment due between ``after`` and now, newest first: only waiting ones, or only started ones."""
    kinds = [StateType.SCHEDULED] if waiting else [kind for kind in StateType if kind != StateType.SCHEDULED]
    due = {"after_": after + timedelta(milliseconds=1), "before_": datetime.now(UTC)}
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment_id]}}),
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": kinds}}, "expected_start_time": due}),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
    )
