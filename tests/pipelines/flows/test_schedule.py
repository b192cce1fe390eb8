"""``magrpo schedule``: runs that start by themselves, one at a time."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import State, StateType
from prefect.utilities.callables import parameter_schema

from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.process.children import list_family
from magrpo.run.lock import hold_file
from magrpo.run.store import RunStore
from magrpo.training.execute import Result, execute
from pipelines.cli import main
from pipelines.flows.schedule import build_schedule, execute_scheduled_run, name_run, scheduled
from pipelines.flows.study import study
from pipelines.flows.timetable import Timetable
from pipelines.flows.train import train
from tests.pipelines.micro import start, write_config
from tests.processes import assert_all_end, wait_until


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cron": "0 2 * * *", "interval": timedelta(days=1)}, "schedule needs either --cron or --interval"),
        ({"interval": timedelta(0)}, "--interval must be longer than 0"),
        ({"cron": "0 2 * * *", "timezone": "Mars/Base"}, "--timezone 'Mars/Base': no such time zone"),
        ({"cron": "99 2 * * *"}, "--cron '99 2 * * *': Invalid cron string"),
        ({"cron": "R 2 * * *"}, "--cron 'R 2 * * *': Random and Hashed expressions are unsupported"),
    ],
)
def test_flags_that_are_no_schedule_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_schedule(Timetable(**flags))


@pytest.mark.parametrize(
    ("flags", "zone"), [({"cron": "0 2 * * *"}, "Europe/Berlin"), ({"interval": timedelta(days=1)}, "UTC")]
)
def test_the_deployment_has_the_time_zone_of_its_cron_expression(flags: dict[str, Any], zone: str) -> None:
    schedule = build_schedule(Timetable(**flags, timezone="Europe/Berlin"))
    assert DeploymentScheduleCreate.from_schedule(schedule).schedule.timezone == zone


def test_every_field_of_a_deployments_form_is_described() -> None:
    for flow in (scheduled, study, train):
        fields = parameter_schema(flow).model_dump()["properties"]
        assert [name for name, field in fields.items() if not field.get("description")] == []


def test_a_scheduled_run_is_named_after_the_time_at_which_it_was_due() -> None:
    assert name_run("nightly", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "nightly-20260102-030405"


def test_a_second_schedule_of_the_same_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would replace the deployment of the first."""
    config, home = write_config(tmp_path, iterations=1), tmp_path / "runs" / "prefect"
    home.mkdir(parents=True)
    capsys.readouterr()
    with hold_file(home / "serve-run.lock", ""):
        assert main(["schedule", str(config), "--cron", "0 0 29 2 *"]) == 2
    refusal = f"schedule run is served by process {os.getpid()} already; stop it, or give another --name"
    assert capsys.readouterr().err == f"magrpo: {refusal}\n"


def test_a_scheduled_run_that_is_refused_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, root, run_id = str(write_config(tmp_path, iterations=1)), tmp_path / "runs", "nightly"

    def attempt(overrides: list[str]) -> State[None] | None:
        def execute_here(root: Path, run_id: str) -> Result:
            return execute(root, run_id, lambda run_step: run_step, {})

        return execute_scheduled_run(config, overrides, str(root), run_id, "", execute_here)

    state = attempt(["rollout.max_new_tokens=64"])
    assert state is not None
    assert state.type == StateType.CANCELLED
    assert str(state.message).startswith("ConfigError: problems: ")
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"run {run_id} is refused and removed: problems: ")
    assert list(root.glob("nightly*")) == []
    RunStore.create(load_config(Path(config), ["rollout.max_new_tokens=64"]), run_id)
    with pytest.raises(ConfigError, match="problems: "):
        attempt([])
    assert len(list(root.glob("nightly*"))) == 1, "another call made it"


def completed(root: Path) -> list[tuple[str, str]]:
    """When each completed flow run started and ended; the oldest first."""
    with sqlite3.connect(f"file:{root}/prefect/prefect.db?mode=ro", uri=True) as database:
        return database.execute(
            "select start_time, end_time from flow_run where state_type = 'COMPLETED' order by start_time"
        ).fetchall()


def due(run: Path) -> datetime:
    """When a run was due, by its name."""
    return datetime.strptime(run.name, "often-%Y%m%d-%H%M%S").replace(tzinfo=UTC)


@pytest.mark.slow
def test_runs_start_by_themselves_one_at_a_time_until_a_signal(tmp_path: Path) -> None:
    config, log, root = write_config(tmp_path, iterations=1), tmp_path / "log", tmp_path / "runs"

    def finished() -> set[Path]:
        return {path.parents[3] for path in root.glob("often-*/stages/00001/report/_SUCCESS")}

    def serve_until_two_runs_finished(number: int) -> None:
        log.write_text("")
        before = finished()
        process = start(["schedule", str(config), "--interval", "4s", "--name", "often"], log)
        assert process.pid is not None
        try:
            wait_until(lambda: len(finished() - before) >= 2)
            # The last stage of a run is not its end.
            wait_until(lambda: len(completed(root)) >= len(before) + 2)
            children = list_family(process.pid)
            os.kill(process.pid, number)
            process.join(600)  # Prefect waits for half a minute until a run has ended
        finally:
            process.kill()
            process.join()
        assert process.exitcode == 0
        assert_all_end(children)
        assert "Traceback" not in log.read_text()

    serve_until_two_runs_finished(signal.SIGTERM)
    time.sleep(10)  # two runs would have been due
    returned = datetime.now(UTC).replace(microsecond=0)
    before = set(root.glob("often-*"))
    serve_until_two_runs_finished(signal.SIGINT)
    assert all(due(run) >= returned for run in set(root.glob("often-*")) - before), "missed runs are left out"
    times = completed(root)
    assert len(times) >= 2, "the last run of each schedule may count as cancelled, if its process was still ending"
    for (_, end), (begin, _) in pairwise(times):
        assert end <= begin, "two runs at the same time"
