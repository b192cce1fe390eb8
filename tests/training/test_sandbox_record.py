"""What a run records about its sandbox: level and statistics."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from magrpo.sandboxes import SandboxDied, SandboxError
from pipelines.cli import main
from pipelines.flows.train import is_transient
from tests.pipelines.micro import write_config


def test_level_and_statistics_reach_mlflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_config(tmp_path, iterations=1)), "--local", "--name", "mine"]) == 0
    assert capsys.readouterr().out.count("sandbox: none, programs run unprotected") == 1
    client = MlflowClient(f"sqlite:///{(tmp_path / 'runs' / 'mlflow.db').absolute()}")
    [experiment] = [found for found in client.search_experiments() if found.name != "Default"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.tags["sandbox.level"] == "none"
    names = ("executions", "candidates_per_s", "timeout_frac", "crash_frac", "memory_frac", "infra_error_frac", "level")
    assert {f"sandbox/{name}" for name in names} | {"eval/sandbox/infra_error_frac"} <= set(run.data.metrics)
    assert run.data.metrics["sandbox/level"] == 0.0
    top = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert top == {"checkpoints", "problems", "report", "report.html", "stages"}
    assert {item.path for item in client.list_artifacts(run.info.run_id, "report")} == {"report/report.json"}


@pytest.mark.parametrize(("error", "again"), [(SandboxDied("no jail"), True), (SandboxError("no level works"), False)])
def test_a_sandbox_that_died_is_tried_again_and_one_that_was_refused_is_not(
    error: SandboxError, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = TaskRun(name="00001/score.0", task_key="score", dynamic_key="0")
    assert is_transient(None, run, Failed(data=error)) is again
    assert ("00001/score.0 failed, retrying: no jail" in caplog.text) is again
