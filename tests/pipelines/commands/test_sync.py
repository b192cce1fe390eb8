"""A tracking server that is away during a run: the run ends well, and ``magrpo sync`` delivers later."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

import pytest
from mlflow import MlflowClient

from magrpo.config.run import load_config
from magrpo.run.store import RunStore
from magrpo.tracking.mlflow_runs import MlflowTracker
from pipelines.cli import main
from tests.pipelines.micro import command, empty_database, write_config


def track_at(uri: str) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = uri


def test_a_run_without_its_server_is_delivered_later(tmp_path: Path) -> None:
    config, log = write_config(tmp_path, iterations=1), tmp_path / "log"
    with socket.socket() as taken:  # and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        away = partial(track_at, f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert command(["train", str(config), "--local", "--name", "late"], log, away) == 0
        said = log.read_text()
        assert "sync late" in said
        assert "Traceback" not in said
        sync = ["sync", "late", "--root", str(tmp_path / "runs")]
        assert command(sync, log, away) == 1
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    assert command(sync, log, partial(track_at, uri)) == 0
    assert "all records of late are delivered" in log.read_text()

    [run] = MlflowClient(uri).search_runs(["1"], "tags.`magrpo.run_id` = 'late'")
    assert run.info.status == "FINISHED"
    assert {"reward/joint", "eval/return", "update/lr"} <= set(run.data.metrics)
    contexts = {item.dataset.name.split()[-1]: item.tags[0].value for item in run.inputs.dataset_inputs}
    assert contexts == {"train": "training", "test": "evaluation", "ood": "evaluation"}
    assert (tmp_path / "runs" / "mlflow.db").read_bytes() == empty_database(), "untouched"
    artifacts = tmp_path / "runs" / "mlartifacts" / "magrpo" / run.info.run_id / "artifacts"
    assert {"problems", "stages", "checkpoints", "report"} <= {path.name for path in artifacts.iterdir()}


def test_records_of_a_deleted_experiment_wait_until_it_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    uri = f"sqlite:///{root}/mlflow.db"
    store = RunStore.create(load_config(write_config(tmp_path), [f"tracking.uri={uri}"]), "one")
    tracker = MlflowTracker(store.config().tracking, root, "one", store.path)
    tracker.metrics({"reward/joint": 1.0}, 1)
    tracker.close("FINISHED")
    client = MlflowClient(uri)
    client.delete_experiment("1")
    remedy = (
        f"the experiment 'magrpo' of MLflow at {uri} is deleted; to restore it: "
        f"MLFLOW_TRACKING_URI={uri} mlflow experiments restore --experiment-id 1"
    )
    tracker = MlflowTracker(store.config().tracking, root, "one", store.path)
    tracker.metrics({"reward/joint": 2.0}, 2)
    tracker.close("FINISHED")
    assert tracker.num_undelivered
    assert remedy in caplog.text
    caplog.clear()
    assert main(["sync", "one", "--root", str(root)]) == 1
    assert remedy in caplog.text
    assert "still wait in the outbox" in capsys.readouterr().out
    client.restore_experiment("1")
    assert main(["sync", "one", "--root", str(root)]) == 0
    [run] = client.search_runs(["1"])
    assert [point.value for point in client.get_metric_history(run.info.run_id, "reward/joint")] == [1.0, 2.0]
