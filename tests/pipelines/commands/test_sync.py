"""A tracking server that is away during a run: the run ends well, and ``magrpo sync`` delivers later."""

from __future__ import annotations

import os
import socket
from functools import partial
from pathlib import Path

from mlflow import MlflowClient

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
    assert "every record of late is delivered" in log.read_text()

    [run] = MlflowClient(uri).search_runs(["1"], "tags.`magrpo.run_id` = 'late'")
    assert run.info.status == "FINISHED"
    assert {"reward/joint", "eval/return", "update/lr"} <= set(run.data.metrics)
    contexts = {item.dataset.name.split()[-1]: item.tags[0].value for item in run.inputs.dataset_inputs}
    assert contexts == {"train": "training", "test": "evaluation", "ood": "evaluation"}
    assert (tmp_path / "runs" / "mlflow.db").read_bytes() == empty_database(), "untouched"
    artifacts = tmp_path / "runs" / "mlartifacts" / "magrpo" / run.info.run_id / "artifacts"
    assert {"problems", "stages", "checkpoints", "report"} <= {path.name for path in artifacts.iterdir()}
