"""``magrpo schedule``: runs that start by themselves, one at a time, and one for all that was missed."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.utilities.callables import parameter_schema

from magrpo.plugins import ConfigError
from magrpo.process.children import list_family
from pipelines.arguments import list_shipped
from pipelines.flows.schedule import TITLES, build_deployed_schedule, build_schedule, describe_form, scheduled
from pipelines.flows.sweep import swept
from pipelines.flows.timetable import Timetable
from pipelines.flows.train import train
from tests.pipelines.micro import start, write_config
from tests.processes import assert_all_end


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "schedule needs one of --cron, --interval and --rrule"),
        ({"cron": "0 2 * * *", "interval": "1d"}, "schedule needs one of --cron, --interval and --rrule"),
        ({"cron": "every night"}, "--cron 'every night': needs five fields"),
        ({"interval": "5"}, "--interval '5': an interval is a positive number and a unit"),
        ({"interval": "0m"}, "--interval '0m'"),
        ({"cron": "0 2 * * *", "timezone": "Mars/Base"}, "--timezone 'Mars/Base': no such time zone"),
    ],
)
def test_flags_that_are_no_schedule_are_refused_without_prefect(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Timetable(**flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cron": "99 2 * * *"}, "--cron '99 2 * * *': "),
        ({"rrule": "FREQ=NEVER"}, "--rrule 'FREQ=NEVER': Invalid RRule string"),
    ],
)
def test_rules_that_prefect_cannot_use_are_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_schedule(Timetable(**flags))


@pytest.mark.parametrize("when", [{"cron": "0 2 * * *"}, {"interval": "6h"}, {"rrule": "FREQ=DAILY;BYHOUR=2"}])
def test_the_deployment_keeps_the_time_zone_that_is_announced(when: dict[str, str]) -> None:
    timetable = Timetable(**when, timezone="Europe/Berlin")
    deployed = DeploymentScheduleCreate.from_schedule(build_deployed_schedule(timetable)).schedule
    assert deployed.timezone == build_schedule(timetable).timezone == "Europe/Berlin"


def test_the_form_of_a_deployment_has_titles_descriptions_and_choices() -> None:
    form = describe_form(scheduled, ["/etc/own.toml", *list_shipped()])
    assert {name: field["title"] for name, field in form["properties"].items()} == TITLES
    assert form["properties"]["config"]["enum"][:2] == ["/etc/own.toml", "arxiv"]
    for flow in (scheduled, swept, train):
        fields = parameter_schema(flow).model_dump()["properties"]
        assert [name for name, field in fields.items() if not field.get("description")] == []
    assert parameter_schema(swept).properties["seeds"]["minimum"] == 1


def completed(root: Path) -> list[tuple[str, str]]:
    """When each completed flow run started and ended; the oldest first."""
    with sqlite3.connect(f"file:{root}/prefect/prefect.db?mode=ro", uri=True) as database:
        return database.execute(
            "select start_time, end_time from flow_run where state_type = 'COMPLETED' order by start_time"
        ).fetchall()


def due(run: Path) -> datetime:
    """When a run was due, by its name."""
    return datetime.strptime(run.name, "often-%Y%m%d-%H%M%S").replace(tzinfo=UTC)


def wait_for(what: Callable[[], bool], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_runs_start_by_themselves_one_at_a_time_and_once_for_what_was_missed(tmp_path: Path) -> None:
    config, log, root = write_config(tmp_path, iterations=1), tmp_path / "log", tmp_path / "runs"

    def serve_until(done: Callable[[], bool], number: int) -> None:
        log.write_text("")
        process = start(["schedule", str(config), "--interval", "4s", "--name", "often"], log)
        assert process.pid is not None
        try:
            wait_for(lambda: "Ctrl-C" in log.read_text())
            wait_for(done)
            children = list_family(process.pid)
            os.kill(process.pid, number)
            process.join(120)  # Prefect waits for half a minute until a run has ended
        finally:
            process.kill()
            process.join()
        assert process.exitcode == 0
        assert_all_end(children)

    def finished() -> set[Path]:
        return {path.parents[3] for path in root.glob("often-*/stages/00001/report/_SUCCESS")}

    serve_until(lambda: len(finished()) >= 2, signal.SIGTERM)
    assert "Traceback" not in log.read_text()
    before = set(root.glob("often-*"))
    time.sleep(22)  # five ticks
    returned = datetime.now(UTC)
    serve_until(lambda: len(finished() - before) >= 2, signal.SIGINT)
    assert log.read_text().count("missed: ") == 1

    assert len([run for run in set(root.glob("often-*")) - before if due(run) < returned]) == 1
    times = completed(root)
    assert len(times) >= 2
    for (_, end), (begin, _) in pairwise(times):
        assert end <= begin, "two runs at the same time"
