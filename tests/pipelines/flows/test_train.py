"""Training as a Prefect flow, on a real server: retries, states, names, resuming, and how a run ends."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.cli.automation import automation_app
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter, FlowRunFilterName, LogFilter
from prefect.client.schemas.objects import Artifact, FlowRun, StateType, TaskRun
from prefect.client.schemas.sorting import LogSort
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Scheduled

from magrpo.engines import EngineError
from magrpo.errors import ConfigError
from magrpo.files.locks import lock_folder
from magrpo.process.children import list_family, send_signal
from magrpo.run.steps import Step
from pipelines.flows.local_server import LocalServer, ServerError
from pipelines.flows.schedule import FLOW, cancel_waiting_runs
from pipelines.flows.train import mark_killed
from tests.pipelines.micro import PREFECT_VARIABLES, STAGES, command, fail_stage, magrpo, prefect, start, write_config
from tests.pipelines.receiver import receiving
from tests.processes import assert_all_end, find_running, wait_until
from tests.training.test_resume import Runs, die_at_work, wait_at_work


def fail(stage: str, times: int, error: type[Exception]) -> None:
    """As ``fail_stage``; retries come at once."""
    fail_stage(stage, times, error)
    pytest.MonkeyPatch().setattr("pipelines.flows.train.exponential_backoff", lambda _: lambda retries: [0.0] * retries)


def await_the_page(before: Callable[[], None] | None) -> None:
    """Let the end of a run wait for Prefect's page, however slow its server is; then call ``before``."""
    pytest.MonkeyPatch().setattr("pipelines.flows.progress_page.PATIENCE_S", 300.0)
    if before is not None:
        before()


class Flows:
    """Runs of one configuration as flows on one server."""

    def __init__(self, folder: Path, url: str) -> None:
        self.config, self.root, self.url = write_config(folder, iterations=1), folder / "runs", url
        self.home = folder / "prefect"
        """Of the server."""

    def train(self, name: str, before: Callable[[], None] | None = None, *overrides: str) -> int:
        """Start a run with ``overrides``, or resume it as it was started."""
        return self.command(self.arguments(name, *overrides), self.log(name), before)

    def arguments(self, name: str, *overrides: str) -> list[str]:
        """Arguments that start a run with ``overrides``, or resume it."""
        if (self.root / name).exists():
            return ["resume", name, "--root", str(self.root)]
        return ["train", str(self.config), "--name", name, *overrides]

    def artifacts(self, run: FlowRun) -> dict[str, Artifact]:
        """The artifacts of a flow run by key."""
        only = FlowRunFilter.model_validate({"id": {"any_": [run.id]}})
        with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as client:
            found = client.read_artifacts(flow_run_filter=only)
        assert len({artifact.key for artifact in found}) == len(found)
        return {str(artifact.key): artifact for artifact in found}

    def lines(self, run: FlowRun) -> list[str]:
        """The log of a flow run, as its page shows it."""
        only = LogFilter.model_validate({"flow_run_id": {"any_": [run.id]}})
        with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as client:
            return [log.message for log in client.read_logs(only, sort=LogSort.TIMESTAMP_ASC)]

    def retry(self, name: str, before: Callable[[], None] | None = None) -> int:
        """``prefect flow-run retry`` for the newest flow run of a run."""
        arguments = ["flow-run", "retry", str(self.seen(name)[-1].id), "--entrypoint", "pipelines/flows/train.py:train"]
        return self.command(arguments, self.log(name), before, prefect)

    def log(self, name: str) -> Path:
        return self.root.parent / f"{name}.log"

    def command(
        self,
        arguments: Sequence[str],
        log: Path,
        before: Callable[[], None] | None = None,
        program: Callable[[list[str]], int] = magrpo,
    ) -> int:
        """A command that finds the server in its environment."""
        environment = {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(self.home)}
        return command(arguments, log, partial(await_the_page, before), program, environment)

    def page(self, run: FlowRun) -> str:
        return f"{self.url.removesuffix('/api')}/runs/flow-run/{run.id}"

    def seen(self, name: str) -> list[FlowRun]:
        """The flow runs of a run, oldest first."""
        named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
        with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as client:
            return sorted(client.read_flow_runs(flow_run_filter=named), key=attrgetter("created"))

    def tasks(self, run: FlowRun, last: str) -> dict[str, TaskRun]:
        """The task runs of an ended flow run by name, in the order in which they started; ``last`` is one of them.

        Prefect learns of them from events, one after another, which may arrive after the end of the flow run.
        """
        only = FlowRunFilter.model_validate({"id": {"any_": [run.id]}})
        found: list[TaskRun] = []

        def settled() -> bool:
            with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as client:
                found[:] = client.read_task_runs(flow_run_filter=only)
            ended = [task.name for task in found if task.start_time and task.state and task.state.is_final()]
            return last in ended and len(ended) == len(found)

        wait_until(settled)
        return {task.name: task for task in sorted(found, key=attrgetter("start_time"))}

    def tracked(self, name: str, root: Path | None = None) -> tuple[str, dict[str, str]]:
        """Status and tags of the one MLflow run of a run; ``root``: the folder of its runs, if it is another."""
        client = MlflowClient(f"sqlite:///{(root or self.root) / 'mlflow.db'}")
        [run] = client.search_runs(["1"], f"tags.`magrpo.run_id` = '{name}'")
        return run.info.status, run.data.tags


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flows]:
    folder = tmp_path_factory.mktemp("flows")
    with LocalServer(folder / "prefect") as server:
        flows = Flows(folder, os.environ["PREFECT_API_URL"])  # while the server starts
        server.wait_until_ready()
        yield flows


def test_a_stage_that_fails_once_is_retried(flows: Flows) -> None:
    assert flows.train("once", partial(fail, "score", 1, OSError)) == 0
    assert "00001/score.0 failed, retrying: score is made to fail" in flows.log("once").read_text()
    [run] = flows.seen("once")
    assert run.state_name == "Completed"
    assert run.parameters == {"root": str(flows.root), "run_id": "once"}
    tasks = flows.tasks(run, "report")
    assert list(tasks) == STAGES
    assert {name: task.run_count for name, task in tasks.items()} == dict.fromkeys(STAGES, 1) | {"00001/score.0": 2}
    assert {task.state_name for task in tasks.values()} == {"Completed"}
    status, tags = flows.tracked("once")
    assert (status, tags["prefect.flow_run_id"]) == ("FINISHED", str(run.id))
    assert tags["prefect.flow_run_url"] == flows.page(run)
    artifacts = flows.artifacts(run)
    [progress] = artifacts.values()
    assert (progress.type, progress.data) == ("progress", 100.0)
    assert str(progress.description).startswith("finished\n\ntraining ")
    assert "/#/experiments/1/runs/" in str(progress.description)
    lines = flows.lines(run)
    assert [line.partition(": ")[0] for line in lines] == [*STAGES, "finished"]
    assert "held-out" in lines[-1]


def test_a_run_that_is_killed_and_then_fails_is_marked_told_and_resumed(flows: Flows) -> None:
    """The kill is told by the attempt after it, which fails in a world that stays broken."""
    with receiving() as receiver:
        urls = f'notify.urls=["{receiver.url}"]'
        assert flows.train("broken", partial(die_at_work, "rollout.0"), urls) == -signal.SIGKILL
        with temporary_settings({PREFECT_API_URL: flows.url}):
            mark_killed("broken", {"root": "/of/somebody/else", "run_id": "broken"})
        assert [run.state_name for run in flows.seen("broken")] == ["Running"]
        assert receiver.posted == []

        assert flows.train("broken", partial(fail, "update", 3, OSError)) not in (0, -signal.SIGKILL)
        crashed, failed = flows.seen("broken")
        assert [run.state_name for run in (crashed, failed)] == ["Crashed", "Failed"]
        task = flows.tasks(failed, "00001/update")["00001/update"]
        assert (task.state_name, task.run_count) == ("Failed", 3)
        assert flows.tracked("broken")[0] == "FAILED"
        said = flows.log("broken").read_text()
        assert "resume broken" in said
        assert said.count("update is made to fail") == 3, "each failure is told once"
        *_, ended, resume = flows.lines(failed)
        assert ended.startswith("ended by OSError: update is made to fail")
        assert resume == f"to resume: magrpo resume broken --root {flows.root}"

        assert flows.train("broken") == 0
    assert flows.seen("broken")[-1].state_name == "Completed"
    assert flows.tracked("broken")[0] == "FINISHED"
    assert "resuming with update, iteration 1 of " in flows.log("broken").read_text()

    killed, recovery, notice, last = receiver.notices("broken")
    assert (killed["title"], killed["type"]) == ("magrpo: run broken failed", "failure")
    assert killed["stage"] == recovery["stage"] == "rollout.0, iteration 1 of 1"
    assert killed["reason"] == "its process was killed, or its machine went down"
    assert (recovery["title"], recovery["type"]) == ("magrpo: run broken continues after a failure", "success")
    assert recovery["prefect"] == flows.page(failed)
    assert (notice["title"], notice["type"]) == (killed["title"], "failure")
    assert notice["reason"] == "OSError: update is made to fail"
    assert notice["stage"] == "update, iteration 1 of 1"
    assert notice["returns"].startswith("training ")
    assert notice["resume"] == f"magrpo resume broken --root {flows.root}"
    assert notice["prefect"] == flows.page(failed)
    assert "/#/experiments/1/runs/" in notice["mlflow"]
    assert last["title"] == recovery["title"]


def test_a_refused_run_is_no_failure(flows: Flows) -> None:
    assert flows.train("refused", None, "rollout.max_new_tokens=64") == 2  # found once prompts are counted
    assert not (flows.root / "refused").exists()
    [run] = flows.seen("refused")
    assert run.state_name == "Cancelled"
    assert run.state is not None
    assert str(run.state.message).startswith("ConfigError: problems: ")
    [line] = flows.lines(run)
    assert line.startswith("ended by ConfigError: problems: ")


def test_runs_of_another_flow_whose_deployment_has_the_same_name_stay(flows: Flows) -> None:
    same_name = DeploymentFilter.model_validate({"name": {"any_": ["nightly"]}})
    runs = []
    with temporary_settings({PREFECT_API_URL: flows.url}), get_client(sync_client=True) as client:
        for name in (FLOW, "of-somebody-else"):
            deployed = client.create_deployment(client.create_flow_from_name(name), "nightly")
            run = client.create_flow_run_from_deployment(
                deployed, state=Scheduled(scheduled_time=datetime.now(UTC) - timedelta(hours=1))
            )
            runs.append(run.id)
        cancel_waiting_runs(same_name, "skipped")
        assert [client.read_flow_run(run).state_type for run in runs] == [StateType.CANCELLED, StateType.SCHEDULED]


@pytest.mark.slow
def test_an_exception_of_a_plugin_is_one_block(flows: Flows) -> None:
    kind = "tests.checks.plugins:LateMistake"
    assert flows.train("late", None, f"reward.kind={kind}") == 1
    said = flows.log("late").read_text()
    assert "Traceback" not in said
    block = [line for line in said.splitlines() if line.startswith("magrpo: ")]
    assert block[0].startswith(f"magrpo: reward {kind}: price() failed for problem '")
    assert len(block) < 10
    [run] = flows.seen("late")
    assert run.state_name == "Failed"
    *_, ended, resume = flows.lines(run)
    assert ended.startswith(f"ended by PluginFailed: reward {kind}: price() failed for problem '")
    assert resume == f"to resume: magrpo resume late --root {flows.root}"


def test_a_mistake_is_not_tried_again_but_by_prefects_own_retry(flows: Flows) -> None:
    """The same flow run, the same MLflow run; stages before the one that failed are not run again."""
    assert flows.train("retried", partial(fail, "rollout", 1, ConfigError)) == 2
    assert flows.log("retried").read_text().splitlines()[-1] == "magrpo: rollout is made to fail"
    assert "Traceback" not in flows.log("retried").read_text()
    files = [path for path in (flows.root / "retried" / "stages").rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} >= {"prepare", "evaluate"}
    written = {path: path.stat().st_ino for path in files}
    [failed] = flows.seen("retried")
    assert (failed.state_name, flows.tracked("retried")[0]) == ("Failed", "FAILED")
    task = flows.tasks(failed, "00001/rollout.0")["00001/rollout.0"]
    assert (task.state_name, task.run_count) == ("Failed", 1)

    assert flows.retry("retried") == 0
    said = flows.log("retried").read_text()
    assert "rollout is made to fail" in said
    assert "resuming with rollout.0, iteration 1 of " in said
    assert {path: path.stat().st_ino for path in files} == written, "a committed stage was run again"
    [run] = flows.seen("retried")
    assert (run.state_name, run.id, run.run_count) == ("Completed", failed.id, 2)
    status, tags = flows.tracked("retried")
    assert (status, tags["prefect.flow_run_id"]) == ("FINISHED", str(run.id))


def copy_database(home: Path, other: Path) -> None:
    """Spare a server in the folder ``other`` the making of its tables, half of the time that it takes to start."""
    other.mkdir(exist_ok=True)
    with closing(sqlite3.connect(home / "prefect.db")) as made, closing(sqlite3.connect(other / "prefect.db")) as copy:
        made.backup(copy)


def forget_servers(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Let the environment name no server of Prefect."""
    for name in PREFECT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


@pytest.mark.slow
def test_the_server_accepts_the_automations(
    flows: Flows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command of docs/orchestration.md, on a server of its own.

    Prefect 3.7.7 has once not answered the second automation for ten minutes on a server to which runs had just sent
    events.
    """
    forget_servers(monkeypatch, tmp_path)
    copy_database(flows.home, tmp_path / "prefect")
    block = CustomWebhookNotificationBlock.model_validate({"name": "ops", "url": "http://127.0.0.1:9/hook"})
    text, file = (Path(__file__).parents[3] / "infra" / "automations.yaml").read_text(), tmp_path / "automations.yaml"
    with LocalServer(tmp_path / "prefect") as server:
        server.wait_until_ready()
        with temporary_settings({PREFECT_API_URL: os.environ["PREFECT_API_URL"]}):
            file.write_text(text.replace("BLOCK_ID", str(block.save("ops", overwrite=True))))
            with pytest.raises(SystemExit) as end:
                automation_app(["create", "--from-file", str(file)])
    said = capsys.readouterr().out
    assert end.value.code == 0, said
    assert "Created 2 automation(s)" in said


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, "interrupted"), pytest.param(signal.SIGTERM, "ended by SIGTERM", marks=pytest.mark.slow)],
)
def test_a_run_is_not_started_twice_and_ends_cleanly_when_interrupted(
    flows: Flows, tmp_path: Path, number: int, words: str
) -> None:
    """With a server of its own, which ends with it."""
    copy_database(flows.home, flows.root / "prefect")
    log = tmp_path / "log"
    process = start(flows.arguments("twice"), log, partial(wait_at_work, "rollout.0"))
    try:
        wait_until(lambda: not process.is_alive() or (log.exists() and "waits" in log.read_text()))
        assert process.pid is not None
        children = list_family(process.pid)
        server = find_running(children, "pipelines.flows.local_server")
        assert server

        assert command([*flows.arguments("twice"), "--local"], tmp_path / "second") == 2
        assert flows.train("twice") == 2
        for said in ((tmp_path / "second").read_text(), flows.log("twice").read_text()):
            assert f"magrpo: run twice: process {process.pid} is working on it already" in said
            assert "Traceback" not in said
            assert "the run stopped" not in said

        send_signal(server, signal.SIGTERM)  # as systemd and Slurm do
        os.kill(process.pid, number)
        process.join(600)
        assert process.exitcode == 128 + number
    finally:
        process.kill()
    said = log.read_text()
    assert said.count(f"{words}; finished work is kept. Resume with:") == 1
    assert "resume twice" in said
    assert "Traceback" not in said
    assert_all_end(children)
    assert flows.tracked("twice")[0] == "KILLED"
    with closing(sqlite3.connect(flows.root / "prefect" / "prefect.db")) as database:
        assert database.execute("SELECT state_name FROM flow_run WHERE name = 'twice'").fetchall()[-1] == ("Crashed",)


def test_a_server_that_does_not_start_is_told_from_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it stays in the environment."""
    forget_servers(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    before = dict(os.environ)
    with LocalServer(tmp_path) as server, pytest.raises(ServerError, match=r"server[.]log, or run with --local"):
        server.wait_until_ready()
    assert dict(os.environ) == before


@pytest.mark.slow
def test_servers_of_one_home_start_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that make the tables of an empty database at once may both fail."""
    forget_servers(monkeypatch, tmp_path)
    with LocalServer(tmp_path) as server:
        assert server.process is not None
        with lock_folder(tmp_path):
            wait_until(lambda: has_open(server.process.pid, tmp_path))  # to lock it
            assert not (tmp_path / "prefect.db").exists()
        server.wait_until_ready()
        assert (tmp_path / "prefect.db").exists()


def has_open(process: int, path: Path) -> bool:
    return any(os.path.realpath(link) == str(path) for link in Path(f"/proc/{process}/fd").iterdir())


def meet_in_the_middle() -> None:
    """Let an update and a rollout of the next iteration wait for each other; the rollout then fails once."""
    from magrpo.progress.console import RunConsole

    start_step, both, met = RunConsole.start_step, threading.Barrier(2, timeout=300), threading.Event()

    def fail_rollout(_: int) -> None:
        raise EngineError("the rollout is made to fail")

    def start_together(self: RunConsole, step: Step) -> Callable[[int], None]:
        advance = start_step(self, step)
        if step.output in ("00002/update", "00003/rollout.0") and not met.is_set():
            both.wait()
            met.set()
            return advance if step.stage == "update" else fail_rollout
        return advance

    RunConsole.start_step = start_together  # type: ignore[method-assign]


@pytest.mark.slow
def test_with_a_lag_tasks_of_one_flow_run_overlap_and_a_failed_one_is_retried(flows: Flows) -> None:
    overrides = "train.num_iterations=3", "train.lag=1", "algo.importance_cap=2"
    assert flows.command([*flows.arguments("lag-local", *overrides), "--local"], flows.log("lag-local")) == 0
    assert flows.train("lag", meet_in_the_middle, *overrides) == 0, flows.log("lag").read_text()
    assert "00003/rollout.0 failed, retrying: the rollout is made to fail" in flows.log("lag").read_text()
    [run] = flows.seen("lag")
    tasks = flows.tasks(run, "report")
    assert {name: task.run_count for name, task in tasks.items() if task.run_count > 1} == {"00003/rollout.0": 2}
    update: Any = tasks["00002/update"]
    rollout: Any = tasks["00003/rollout.0"]
    assert update.start_time < rollout.end_time
    assert rollout.start_time < update.end_time
    runs = Runs(flows.root.parent, [str(flows.config)])
    assert runs.outcome("lag") == runs.outcome("lag-local")


STUDY = """
config = "run.toml"
outcome = "final_return"
tokens = 10
seeds = [0]

[[arms]]
name = "only"
"""


@pytest.mark.slow
def test_the_runs_of_a_study_are_flows_below_its_own(flows: Flows) -> None:
    log, file = flows.log("study"), flows.config.with_name("study.toml")
    root = flows.root.with_name("studies")
    file.write_text(STUDY)
    assert flows.command(["study", str(file), "--root", str(root)], log) == 0, log.read_text()
    [run], [parent] = flows.seen("study-only-s0"), flows.seen("study")
    assert (run.state_name, parent.state_name) == ("Completed", "Completed")
    assert run.parent_task_run_id is not None
    assert flows.tracked("study-only-s0", root)[1]["prefect.flow_run_id"] == str(run.id)
    assert not (root / "prefect").exists(), "a server of its own"
