"""A tracking server that is away during a run: the run ends well, and ``magrpo sync`` delivers later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient

from magrpo.config.run import load_config
from magrpo.run.store import RunStore
from magrpo.tracking.mlflow_runs import MlflowTracker
from pipelines.cli import main
from tests.databases import empty_database
from tests.pipelines.micro import write_config


def test_a_run_without_its_server_is_delivered_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, iterations=1)
    sync = ["sync", "late", "--root", str(tmp_path / "runs")]
    with socket.socket() as taken:  # and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert main(["train", str(config), "--local", "--name", "late"]) == 0
        said = capsys.readouterr()
        assert "sync late" in said.out
        assert "Traceback" not in said.out + said.err
        assert main(sync) == 1
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main(sync) == 0
    assert "all records of late are delivered" in capsys.readouterr().out

    [run] = MlflowClient(uri).search_runs(["1"], "tags.`magrpo.run_id` = 'late'")
    assert run.info.status == "FINISHED"
    assert {"reward/joint", "eval/return", "update/lr"} <= set(run.data.metrics)
    contexts = {item.dataset.name.split()[-1]: item.tags[0].value for item in run.inputs.dataset_inputs}
    assert contexts == {"train": "training", "test": "evaluation", "ood": "evaluation"}
    assert (tmp_path / "runs" / "mlflow.db").read_bytes() == empty_database(), "untouched"
    artifacts = tmp_path / "runs" / "mlartifacts" / "magrpo" / run.info.run_id / "artifacts"
    assert {"problems", "stages", "checkpoints", "report"} <= {path.name for path in artifacts.iterdir()}


def test_a_run_that_recorded_nothing_leaves_nothing_in_mlflow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "mlflow.db"
    store = RunStore.create(load_config(write_config(tmp_path), [f"tracking.uri=sqlite:///{database}"]), "fresh")
    files = set(store.path.iterdir())
    assert main(["sync", "fresh", "--root", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out == "fresh has recorded nothing yet\n"
    assert not database.exists()
    assert set(store.path.iterdir()) - files <= {store.path / "lock"}


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
    assert main(["sync", str(root / "one"), "--root", str(root)]) == 0
    [run] = client.search_runs(["1"])
    assert [point.value for point in client.get_metric_history(run.info.run_id, "reward/joint")] == [1.0, 2.0]
