"""``magrpo serve``: training runs that start by themselves, on one machine.

Prefect has the schedule and starts the runs. It has no word for what was missed: ticks that fall into a run that takes
longer pile up, those of a time when nothing was there to serve them are lost. Here one run makes up for all of them.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.runner import Runner
from prefect.runtime import deployment, flow_run
from prefect.server.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from prefect.states import Cancelled, Scheduled
from pydantic import ValidationError
from rich.console import Console

from magrpo.config import load_config
from magrpo.plugins import ConfigError
from magrpo.store import RunStore
from pipelines.flows.train import execute_in_flow
from pipelines.training.closing import print_closing

FLOW = "magrpo-scheduled"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_CAUGHT_UP = timedelta(days=366)
"""Ticks older than this are not looked for."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """When runs start."""

    cron: str | None = None
    interval: str | None = None
    """A number and a unit: 90s, 30m, 6h, 1d."""
    rrule: str | None = None
    timezone: str = "UTC"

    def schedule(self) -> CronSchedule | IntervalSchedule | RRuleSchedule:
        """The same as Prefect's object.

        Raises:
            ConfigError: not exactly one of the three, or one that cannot be read.
        """
        given = {flag: value for flag in ("cron", "interval", "rrule") if (value := getattr(self, flag)) is not None}
        if len(given) != 1:
            raise ConfigError("serve needs one of --cron, --interval and --rrule")
        try:
            ZoneInfo(self.timezone)
        except (KeyError, ValueError, OSError):
            raise ConfigError(
                f"--timezone {self.timezone!r}: no such time zone; use a name like Europe/Berlin"
            ) from None
        (flag, value) = next(iter(given.items()))
        try:
            if flag == "cron":
                return CronSchedule(cron=value, timezone=self.timezone)
            if flag == "rrule":
                return RRuleSchedule(rrule=value, timezone=self.timezone)
            return IntervalSchedule(interval=_interval(value), timezone=self.timezone)
        except ValidationError as error:
            raise ConfigError(f"--{flag} {value!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        except ValueError as error:
            raise ConfigError(f"--{flag} {value!r}: {error}") from None


def _interval(text: str) -> timedelta:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError("an interval is a number above 0 and a unit: 90s, 30m, 6h or 1d")
    return timedelta(**{_UNITS[found[2]]: float(found[1])})


@flow(name=FLOW, flow_run_name="{name}", validate_parameters=False)
def scheduled(config: str, overrides: list[str], root: str, name: str) -> None:
    """One scheduled training run, in place of all that are due; retried, it goes on at its first uncommitted stage."""
    due = flow_run.scheduled_start_time.astimezone(UTC)
    with get_client(sync_client=True) as client:
        for other in _runs(client, deployment.id, after=due - _CAUGHT_UP, waiting=True):
            client.set_flow_run_state(
                other.id, Cancelled(message=f"left out: {name} of {due} serves for it"), force=True
            )
    run_id = f"{name}-{due:%Y%m%d-%H%M%S}"
    if not RunStore(Path(root), run_id).exists():
        RunStore.create(load_config(Path(config), [*overrides, f"root={root}"]), run_id)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"run {run_id} in {Path(root) / run_id}")
    print_closing(execute_in_flow(Path(root), run_id), console)


def serve(config: Path, overrides: Sequence[str], timetable: Timetable, name: str, limit: int) -> None:
    """Start a run whenever ``timetable`` says so, until interrupted; Prefect's API must be reachable.

    Raises:
        ConfigError: the configuration or the timetable cannot be used.
    """
    schedule = timetable.schedule()
    root = load_config(config, overrides).root.absolute()
    parameters = {"config": str(config.absolute()), "overrides": [*overrides], "root": str(root), "name": name}
    with get_client(sync_client=True) as client:
        missed = _missed(client, name, schedule)
        runner = Runner(name=name, pause_on_shutdown=False, limit=limit)
        identity = runner.add_flow(
            scheduled,
            name=name,
            parameters=parameters,
            cron=timetable.cron,
            rrule=timetable.rrule,
            interval=_interval(timetable.interval) if timetable.interval else None,
        )
        assert isinstance(identity, UUID)
        if missed is not None:
            client.create_flow_run_from_deployment(
                identity, state=Scheduled(scheduled_time=missed), idempotency_key=f"missed-{missed.isoformat()}"
            )
    _announce(schedule, missed, name, root, str(client.api_url))
    asyncio.run(_until_interrupted(runner))


async def _until_interrupted(runner: Runner) -> None:
    """Ctrl-C stops the runner in its own way, which tells Prefect about the run in progress."""
    task = asyncio.current_task()
    assert task is not None
    stopping = set[asyncio.Task[None]]()

    def stop() -> None:
        if runner.started:
            stopping.add(asyncio.ensure_future(runner.astop()))
        else:
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
    await runner.start()


def _missed(
    client: SyncPrefectClient, name: str, schedule: CronSchedule | IntervalSchedule | RRuleSchedule
) -> datetime | None:
    """The newest tick since the last run of this deployment, or since it was made, that nothing started for."""
    try:
        known = client.read_deployment_by_name(f"{FLOW}/{name}")
    except ObjectNotFound:
        return None
    now = datetime.now(UTC)
    started = _runs(client, str(known.id), after=now - _CAUGHT_UP, waiting=False)
    last = started[0].expected_start_time if started else known.created
    assert last is not None
    ticks = asyncio.run(schedule.get_dates(n=10_000, start=last + timedelta(seconds=1), end=now))
    return max(ticks).astimezone(UTC) if ticks else None


def _runs(client: SyncPrefectClient, identity: str, *, after: datetime, waiting: bool) -> list[Any]:
    """Runs of a deployment due between ``after`` and now, newest first: those that wait, or those that have begun."""
    kinds = [StateType.SCHEDULED] if waiting else [kind for kind in StateType if kind != StateType.SCHEDULED]
    return client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[identity])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=kinds)),
            expected_start_time=FlowRunFilterExpectedStartTime(
                after_=after + timedelta(milliseconds=1), before_=datetime.now(UTC)
            ),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
    )


def _announce(
    schedule: CronSchedule | IntervalSchedule | RRuleSchedule,
    missed: datetime | None,
    name: str,
    root: Path,
    api: str,
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    zone = ZoneInfo(schedule.timezone or "UTC")
    coming = asyncio.run(schedule.get_dates(n=3, start=datetime.now(UTC)))
    times = ", ".join(f"{tick.astimezone(zone):%a %Y-%m-%d %H:%M:%S}" for tick in coming)
    console.print(f"serving {name}: next runs at {times or 'no time'} ({zone})")
    if missed is not None:
        console.print(f"missed: {missed.astimezone(zone):%a %Y-%m-%d %H:%M:%S}; a run for it starts now")
    console.print(f"runs:    {root}/{name}-*")
    console.print(f"page:    {api.rstrip('/').removesuffix('/api')}")
    console.print(f"at once: PREFECT_API_URL={api.rstrip('/')} prefect deployment run '{FLOW}/{name}'\nCtrl-C ends it")
