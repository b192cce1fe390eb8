"""One flow, two ways: embedded, and by a worker of a Prefect server beside an MLflow server, both on PostgreSQL.

On the way the run fails at its third stage, twice, and is retried as Prefect's page and command do it; another
run of the deployment is cancelled.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.infra.test_servers import INFRA, Server, make_box, started, unit_of
from tests.pipelines.flows.test_kills import EMBEDDED, family, reaping
from tests.pipelines.flows.test_outages import recorded
from tests.pipelines.micro import command, write_config
from tests.processes import stop_process

ROOT = INFRA.parent
PREFECT = str(Path(sys.executable).with_name("prefect"))


class Box:
    """What a client of both servers needs."""

    def __init__(self, home: Path, prefect: Server, mlflow: Server, env: dict[str, str]) -> None:
        self.home, self.prefect, self.mlflow = home, prefect, mlflow
        command, settings = unit_of("worker", int(prefect.url.rsplit(":", 1)[1]), home)
        secrets = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
        self.worker = command
        self.env = os.environ | settings | {name: env[name] for name in secrets}
        self.started: psutil.Popen | None = None
        self.env |= {"MLFLOW_TRACKING_URI": mlflow.url, "PREFECT_WORKER_QUERY_SECONDS": "2", "PYTHONPATH": str(ROOT)}

    def call(self, *arguments: str) -> str:
        """What a command prints, with the settings of the worker."""
        done = subprocess.run(
            arguments, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.prefect.url}/api{path}")
        request.add_header("Authorization", f"Basic {base64.b64encode(self.prefect.login.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def post(self, path: str, body: object) -> Any:
        status, answer = self.prefect.post(f"/api{path}", body, login=self.prefect.login)
        assert status in {200, 201}, (path, status)
        return answer

    def deploy(self, config: Path) -> None:
        """The deployments of infra/prefect.yaml, with the folders of this box."""
        text = (INFRA / "prefect.yaml").read_text()
        for there, here in {
            "/opt/magrpo/pipelines/configs/embedded.toml": str(config),
            "/opt/magrpo": str(ROOT),
            "/var/lib/magrpo/runs": str(self.home / "runs"),
            "pipelines/flows/schedule.py:": f"{ROOT}/pipelines/flows/schedule.py:",
        }.items():
            text = text.replace(there, here)
        file = self.home / "prefect.yaml"
        file.write_text(text)
        self.call(PREFECT, "--no-prompt", "deploy", "--prefect-file", str(file), "--name", "by-hand")

    def run(self, **parameters: object) -> str:
        """Id of a new flow run of the deployment."""
        deployment = self.get("/deployments/name/magrpo-scheduled/by-hand")["id"]
        return str(self.post(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"])

    def wait(self, flow_run: str, state: str, runs: int) -> dict[str, Any]:
        """The flow run, as soon as it is in ``state`` after so many tries."""
        deadline = time.monotonic() + 600
        while True:
            found: dict[str, Any] = self.get(f"/flow_runs/{flow_run}")
            assert time.monotonic() < deadline, (found["state_name"], found["run_count"], self.log())
            time.sleep(0.5)
            if (found["state_name"], found["run_count"]) == (state, runs):
                return found

    def let_go(self, runs: int) -> None:
        """Wait until the worker is done with so many ended processes.

        Until then each counts for ``--limit``, and Prefect may say that the flow run crashed after it was tried again.
        """
        assert self.started is not None
        deadline = time.monotonic() + 600
        executed = {"filter": {"event": {"name": ["prefect.worker.executed-flow-run"]}}}
        while self.post("/events/filter", executed)["total"] < runs:
            assert self.started.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.5)

    def log(self) -> str:
        return (self.home / "worker.log").read_text()[-5000:]


@contextmanager
def box(home: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """Both servers on PostgreSQL and a process worker, as their units start them."""
    env, _ = make_box(home, sockets, monkeypatch)
    mlflow_login = f"{env['MLFLOW_TRACKING_USERNAME']}:{env['MLFLOW_TRACKING_PASSWORD']}"
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, env[name])
    with (
        started("prefect", "/api/health", env["PREFECT_API_AUTH_STRING"], home, env) as prefect,
        started("mlflow", "/health", mlflow_login, home, env) as mlflow,
        ExitStack() as undo,
    ):
        box = Box(home, prefect, mlflow, env)
        box.call(*box.worker, "--run-once")  # makes the work pool
        log = undo.enter_context((home / "worker.log").open("wb"))
        worker = psutil.Popen(box.worker, env=box.env, cwd=home, stdout=log, stderr=log)
        undo.callback(stop_process, worker)
        box.started = worker
        yield box


def weights(run: Path) -> dict[str, Any]:
    """Digests of what the last update of a run of two iterations wrote."""
    files: dict[str, Any] = json.loads((run / "stages" / "00002" / "update" / "_SUCCESS").read_text())["files"]
    return {file: facts["sha256"] for file, facts in files.items()}


def inodes(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in (run / "stages").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_worker_and_servers_do_what_the_embedded_run_does(
    tmp_path: Path, postgres: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, home = tmp_path / "fault", tmp_path / "box"
    home.mkdir()
    config = write_config(tmp_path, iterations=2, fault=fault)
    assert command(["train", str(config), "--name", "embedded"], tmp_path / "embedded.log") == 0

    with reaping(), box(home, postgres, monkeypatch) as servers:
        servers.deploy(config)
        fault.touch()
        flow_run = servers.run()
        servers.wait(flow_run, "Failed", runs=1)
        [run] = (home / "runs").glob("by-hand-*")
        committed = inodes(run)
        assert {path.parent.name for path in committed} >= {"prepare", "update"}
        first = recorded(servers.mlflow.url, run.name)
        assert first[0] == "FAILED"

        servers.let_go(1)
        # What the button of Prefect's page sends.
        retry = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        servers.post(f"/flow_runs/{flow_run}/set_state", {"state": retry, "force": True})
        servers.wait(flow_run, "Failed", runs=2)
        assert inodes(run) == committed
        servers.let_go(2)

        fault.unlink()
        servers.call(PREFECT, "flow-run", "retry", flow_run)
        servers.wait(flow_run, "Completed", runs=3)
        assert inodes(run).items() >= committed.items(), "a committed stage was run again"
        assert list((home / "runs").glob("by-hand-*")) == [run]

        assert weights(run) == weights(tmp_path / "runs" / "embedded")
        local = recorded(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}", "embedded")
        assert recorded(servers.mlflow.url, run.name) == local
        assert local[0] == "FINISHED"

        nobody_survives_a_cancelled_run(servers)


def nobody_survives_a_cancelled_run(servers: Box) -> None:
    """Cancel a run that has started its jails, and assert that all of them end and that MLflow has it as killed."""
    before = family()
    cancelled = servers.run(config=EMBEDDED[0], overrides=["train.num_iterations=1000"], name="cancelled")
    servers.wait(cancelled, "Running", runs=1)
    deadline = time.monotonic() + 600  # it evaluates first
    while not (found := list((servers.home / "runs").glob("cancelled-*/stages/00001/score.0/_SUCCESS"))):
        assert time.monotonic() < deadline, servers.log()
        time.sleep(0.2)
    children = family() - before
    assert len(children) > 2, "the run and its jails"
    servers.call(PREFECT, "flow-run", "cancel", cancelled)
    servers.wait(cancelled, "Cancelled", runs=1)
    _, alive = psutil.wait_procs(children, timeout=300)
    assert not alive
    assert recorded(servers.mlflow.url, found[0].parents[3].name)[0] == "KILLED"
