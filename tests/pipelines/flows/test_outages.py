"""Prefect's and MLflow's servers are gone for a minute, in the middle of one run and at the end of another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path

import pytest
from mlflow import MlflowClient

from magrpo.process.ports import find_free_ports
from magrpo.run.steps import Step
from magrpo.run.store import Pointer
from magrpo.tracking.mlflow_runs import SYSTEM_PREFIX
from tests.pipelines.micro import command, start, write_config
from tests.processes import wait_until
from tests.servers import answers
from tests.training.test_resume import TIMED

OUTAGE_S = 60.0


class Servers:
    """A Prefect and an MLflow server, that can be stopped and started again on the same ports with the same data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefect, self.mlflow = (f"http://127.0.0.1:{port}" for port in find_free_ports(2))
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        python, port = sys.executable, self.mlflow.rpartition(":")[2]
        prefect = [python, "-m", "pipelines.flows.local_server", self.prefect.rpartition(":")[2], str(os.getpid())]
        mlflow = [
            *[python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1"],
            *["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}"],
            *["--artifacts-destination", str(self.folder / "artifacts")],
        ]
        environment = os.environ | {
            "PREFECT_HOME": str(self.folder / "prefect"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        with (self.folder / "servers.log").open("ab") as log:
            self._running = [
                subprocess.Popen(arguments, env=environment, stdout=log, stderr=log) for arguments in (prefect, mlflow)
            ]
        wait_until(lambda: answers(f"{self.prefect}/api/health") and answers(f"{self.mlflow}/health"))

    def stop(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGINT)  # Prefect's ignores SIGTERM
        for process in self._running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def use(servers: tuple[str, str], gates: Mapping[int, Path]) -> None:
    """Report to these servers; iteration i does not end before the file ``gates[i]`` is there."""
    from magrpo.training.stages import StageRunner

    os.environ["PREFECT_API_URL"], os.environ["MLFLOW_TRACKING_URI"] = f"{servers[0]}/api", servers[1]
    run_step = StageRunner.run_step

    @wraps(run_step)
    def wait_first(self: StageRunner, step: Step, inputs: Sequence[Pointer]) -> Pointer:
        if step.stage == "credit" and step.iteration in gates:
            wait_until(gates[step.iteration].exists)
        return run_step(self, step, inputs)

    StageRunner.run_step = wait_first  # type: ignore[method-assign]


def recorded(uri: str, name: str) -> tuple[str, dict[str, list[tuple[int, float]]], int]:
    """Status, metrics and number of artifact folders of the one MLflow run of a run."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("magrpo")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id], f"tags.`magrpo.run_id` = '{name}'")
    metrics = {}
    for key in (key for key in run.data.metrics if not key.startswith(SYSTEM_PREFIX)):
        points = client.get_metric_history(run.info.run_id, key)
        metrics[key] = sorted((p.step, 0.0 if key.startswith(TIMED) else p.value) for p in points)
    return run.info.status, metrics, len(client.list_artifacts(run.info.run_id, "stages"))


@pytest.mark.slow
def test_servers_that_are_gone_for_a_minute_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``middle`` goes on through the outage and beyond it, ``end`` comes to its end while the servers are away."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # of this process, which asks the server afterwards
    config, root = write_config(tmp_path, iterations=4), tmp_path / "runs"
    away, back = tmp_path / "away", tmp_path / "back"
    gates: dict[str, dict[int, Path]] = {"whole": {}, "middle": {2: away, 4: back}, "end": {2: away}}
    servers = Servers(tmp_path)
    addresses = (servers.prefect, servers.mlflow)

    def begin(name: str, *arguments: str) -> multiprocessing.Process:
        return start(arguments, log(name), partial(use, addresses, gates[name]))

    def log(name: str) -> Path:
        return tmp_path / f"{name}.log"

    def reached(name: str, stage: str) -> Callable[[], bool]:
        return (root / name / "stages" / stage / "_SUCCESS").exists

    with ExitStack() as undo:
        undo.callback(servers.stop)
        servers.start()
        processes = {name: begin(name, "train", str(config), "--name", name) for name in gates}
        for process in processes.values():
            undo.callback(process.kill)
        processes["whole"].join()
        wait_until(lambda: reached("middle", "00002/score.0")() and reached("end", "00002/score.0")())
        servers.stop()
        stopped = time.monotonic()
        away.touch()
        wait_until(lambda: reached("middle", "00003/update")() and reached("end", "00004/report")())
        wait_until(lambda: time.monotonic() > stopped + OUTAGE_S)
        wait_until(lambda: "could not be delivered" in log("end").read_text())
        servers.start()
        back.touch()
        for name, process in processes.items():
            process.join()
            assert process.exitcode == 0, log(name).read_text()[-3000:]

        assert "records for MLflow" not in log("middle").read_text()
        assert "magrpo sync end" in log("end").read_text()
        assert command(["sync", "end", "--root", str(root)], log("end"), partial(use, addresses, {})) == 0
        assert recorded(servers.mlflow, "whole")[0] == "FINISHED"
        for name in ("middle", "end"):
            assert recorded(servers.mlflow, name) == recorded(servers.mlflow, "whole")
            assert flow_states(f"{servers.prefect}/api", name) == ["Completed"]
            said = log(name).read_text()
            assert "Traceback" not in said
            assert said.count("the run continues, and its records wait in the outbox") == 1


def flow_states(api: str, name: str) -> list[str | None]:
    """States of the flow runs of a run."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
    from prefect.settings import PREFECT_API_URL, temporary_settings

    named = FlowRunFilter(name=FlowRunFilterName(any_=[name]))
    with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
        return [run.state_name for run in client.read_flow_runs(flow_run_filter=named)]
