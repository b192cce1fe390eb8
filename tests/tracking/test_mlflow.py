"""MLflow as the place where records end up: runs, parameters, servers that are away, the model registry."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from magrpo.config.services import TrackingConfig, hide_password
from magrpo.errors import ConfigError
from magrpo.process.ports import find_free_ports
from magrpo.tracking.connection import (
    RecordRefused,
    Unavailable,
    check_reachable,
    check_tracking,
    make_database,
    tracking_uri,
)
from magrpo.tracking.experiment_view import experiment_tags, missing_tags, view_link
from magrpo.tracking.mlflow_runs import PARENT_FOLDER_TAG, PARENT_TAG, STUDY_TAG, MlflowSink, MlflowTracker
from magrpo.tracking.model_registry import ModelRegistry
from magrpo.tracking.outbox import Outbox, Record, find_folder_id
from tests.databases import write_database
from tests.servers import serve_mlflow


def _tracker(root: Path, run_id: str = "run-1") -> MlflowTracker:
    return MlflowTracker(TrackingConfig(), root, run_id, root / run_id)


def test_runs_of_one_name_in_two_roots_are_two_runs_of_one_store(tmp_path: Path, uri: str) -> None:
    config = TrackingConfig(uri=uri)
    for attempt in range(2):
        for number, root in enumerate((tmp_path / "one", tmp_path / "two")):
            tracker = MlflowTracker(config, root, "nightly", root / "nightly")
            tracker.metrics({"reward/joint": float(number)}, attempt)
            tracker.close("FINISHED")
    client = MlflowClient(uri)
    histories = [client.get_metric_history(run.info.run_id, "reward/joint") for run in client.search_runs(["1"])]
    assert sorted([point.value for point in history] for history in histories) == [[0.0, 0.0], [1.0, 1.0]]


def test_a_run_that_is_delivered_later_began_with_its_first_record(tmp_path: Path) -> None:
    with closing(Outbox(tmp_path / "one")) as outbox:
        for value, time_ms in (("RUNNING", 1_000_000), ("FINISHED", 2_000_000)):
            outbox.append({"kind": "status", "value": value, "time_ms": time_ms})
    for began_s in (None, 3_000.0):
        database = write_database(tmp_path / f"{began_s}.db")
        tracker = MlflowTracker(TrackingConfig(uri=database), tmp_path, "one", tmp_path / "one", began_s=began_s)
        tracker.flush()
        found = MlflowClient(database).get_run(tracker.mlflow_run_id).info
        assert (found.start_time, found.end_time) == (1_000_000, 2_000_000), began_s


def test_runs_of_two_studies_of_one_name_have_parents_of_their_own(tmp_path: Path, uri: str) -> None:
    config, client = TrackingConfig(uri=uri), MlflowClient(uri)
    roots = tmp_path / "one", tmp_path / "two"
    parents = []
    for root in roots:
        parent = MlflowTracker(config, root, "s", root / "studies" / "s", STUDY_TAG)
        parent.close("FINISHED")
        parents.append(parent)
    for root, parent in zip(roots, parents, strict=True):
        run = MlflowTracker(config, root, "a", root / "a")
        run.tags({PARENT_TAG: "s", PARENT_FOLDER_TAG: find_folder_id(root / "studies" / "s")})
        run.close("FINISHED")
        assert client.get_run(run.mlflow_run_id).data.tags["mlflow.parentRunId"] == parent.mlflow_run_id


def test_artifacts_of_a_folder_that_moved_are_delivered(tmp_path: Path) -> None:
    def deliver(folder: Path, database: str) -> MlflowTracker:
        config = TrackingConfig(uri=write_database(tmp_path / f"{database}.db"))
        tracker = MlflowTracker(config, tmp_path, "run-1", folder)
        tracker.artifact(folder / "report.html", "report")
        tracker.record_start()
        tracker.close("FINISHED")
        (delivered,) = MlflowClient(config.uri).list_artifacts(tracker.mlflow_run_id, "report")
        assert delivered.path == "report/report.html"
        return tracker

    folder = tmp_path / "runs" / "run-1"
    folder.mkdir(parents=True)
    (folder / "report.html").write_text("<p>")
    deliver(folder, "first")
    moved = folder.rename(tmp_path / "run-1")
    deliver(moved, "second")


def test_mlflow_run_is_created_filled_and_reopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    data = tmp_path / "problems.jsonl"
    data.write_text("{}\n")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_text("w")
    tracker = _tracker(tmp_path)
    tracker.params({"train.seed": 0, "env.prompt": "x" * 7000, "../a+b.toml: root": "runs"})
    tracker.tags({"colour": "blue"})
    tracker.dataset("coopcode", data, "f" * 64, "train")
    tracker.artifact(data, "problems")
    tracker.artifact(folder, "iterations/0001")
    for step in range(3):
        tracker.metrics({"reward/joint": float(step), "update/loss": float("nan")}, step)
    tracker.close("FAILED")

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs(["1"])
    assert run.info.status == "FAILED"
    tracker = _tracker(tmp_path)
    tracker.record_start()
    tracker.metrics({"reward/joint": 9.0}, 2)
    tracker.metrics({"reward/joint": 3.0}, 3)
    tracker.close("FINISHED")

    experiment = client.get_experiment_by_name("magrpo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run-1"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.seed": "0", "env.prompt": "x" * 6000, "_a_b.toml: root": "runs"}
    assert run.data.tags["colour"] == "blue"
    assert run.data.tags["magrpo.run_id"] == "run-1"
    history = client.get_metric_history(run.info.run_id, "reward/joint")
    assert sorted((p.step, p.value) for p in history) == [(0, 0.0), (1, 1.0), (2, 2.0), (2, 9.0), (3, 3.0)]
    assert run.data.metrics["reward/joint"] == 3.0
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("coopcode", "f" * 36)
    assert [(tag.key, tag.value) for tag in dataset.tags] == [("mlflow.data.context", "train")]
    assert (tmp_path / "mlartifacts" / "magrpo" / run.info.run_id / "artifacts/problems/problems.jsonl").is_file()
    assert [item.path for item in client.list_artifacts(run.info.run_id, "iterations/0001")] == [
        "iterations/0001/weights"
    ]
    command, page = tracker.mlflow_page()
    assert command == f"DO_NOT_TRACK=true mlflow ui --backend-store-uri sqlite:///{tmp_path / 'mlflow.db'}"
    assert page.endswith(
        f"/#/experiments/{experiment.experiment_id}/runs/{run.info.run_id}?workflowType=machine_learning"
    )
    server = page.partition("/#")[0]
    assert tracker.runs_page() == f"{server}/{view_link(experiment.experiment_id)}"
    assert view_link(experiment.experiment_id) in experiment.tags["mlflow.note.content"]
    assert experiment.tags == experiment_tags(experiment.experiment_id)


def test_an_experiment_is_shown_as_training_with_the_return_first() -> None:
    tags = experiment_tags("7")
    assert all(len(value) <= 5000 for value in tags.values()), "longer than MLflow stores"
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    assert "#/experiments/7/runs?viewStateShareKey=magrpo&workflowType=machine_learning" in tags["mlflow.note.content"]
    view = json.loads(tags["mlflow.sharedViewState.magrpo"])
    shown = ["metrics.`eval/return`", "metrics.`eval/pass_at_1`", "tags.`gain`", "tags.`verdict`"]
    assert view["selectedColumns"][:4] == view["columnOrder"][:4] == shown
    own = {"mlflow.experimentKind": "genai_development", "mlflow.note.content": "mine"}
    assert missing_tags("7", tags) == {}
    assert missing_tags("7", own).keys() == tags.keys() - own.keys()


@pytest.mark.usefixtures("uri")
def test_runs_that_begin_at_once_share_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    find = MlflowClient.get_experiment_by_name
    answers = iter([None])  # to the first question: another run creates the experiment after it

    def find_too_late(client: MlflowClient, name: str) -> object:
        for answer in answers:
            client.create_experiment(name)
            return answer
        return find(client, name)

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", find_too_late)
    tracker = _tracker(tmp_path)
    tracker.metrics({"reward/joint": 1.0}, 1)
    tracker.close("FINISHED")
    assert tracker.num_undelivered == 0
    assert "cannot be used" not in caplog.text


def test_a_database_that_was_replaced_gets_the_whole_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record_steps(database: str, *steps: int) -> list[int]:
        """The steps that MLflow has after recording these."""
        uri = write_database(tmp_path / database)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        tracker = _tracker(tmp_path)
        tracker.params({"a": 1})
        for step in steps:
            tracker.metrics({"reward/joint": float(step)}, step)
        tracker.close("FINISHED")
        (run,) = MlflowClient(uri).search_runs(["1"])
        assert run.data.params == {"a": "1"}
        assert run.info.status == "FINISHED"
        return [point.step for point in MlflowClient(uri).get_metric_history(run.info.run_id, "reward/joint")]

    assert record_steps("one.db", 0, 1) == [0, 1]
    shutil.copy(tmp_path / "one.db", tmp_path / "backup.db")
    assert record_steps("one.db", 2, 3) == [0, 1, 2, 3]
    assert record_steps("new.db", 4) == [0, 1, 2, 3, 4]
    (tmp_path / "run-1" / "tracking.sent").unlink()  # the remedy of docs/faults.md for a restored backup
    assert record_steps("backup.db") == [0, 1, 2, 3, 4], "steps 0 and 1, delivered twice, count once"


BAD_URIS = {
    "mlruns": "is no URI; of a file it is sqlite:///",
    "file:///tmp/mlruns": "has a scheme that MLflow does not know",
    "htp://host": "did you mean 'http'",
    "http://": "names no host",
    "http://host:port": "is no URL",
    "http://user:secret@[host": "is no URL",
    "sqlite://": "names no file",
    "sqlite:////tmp": "names no file",
    "sqlite:////tmp/x?y.db": "names no file",
    "sqlite:////tmp/x#y.db": "names no file",
}


@pytest.mark.parametrize(("uri", "problem"), BAD_URIS.items())
def test_a_uri_that_mlflow_cannot_use_is_refused(
    tmp_path: Path, uri: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"^tracking.uri .*{problem}") as caught:
        tracking_uri(TrackingConfig(uri=uri), tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match=f"MLFLOW_TRACKING_URI .*{problem}"):
        tracking_uri(TrackingConfig(), tmp_path)


@pytest.mark.parametrize("name", ["a?b", "a#b"])
def test_a_root_that_no_uri_can_hold_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="cannot hold MLflow's database"):
        tracking_uri(TrackingConfig(), tmp_path / name)


def test_a_database_whose_making_was_killed_is_made_anew(tmp_path: Path) -> None:
    for stale in (".mlflow.db.draft", ".mlflow.db.draft-journal"):
        (tmp_path / stale).write_text("torn")
    make_database(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
    made = (tmp_path / "mlflow.db").stat()
    make_database(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert (tmp_path / "mlflow.db").stat() == made
    check_reachable(f"sqlite:///{tmp_path / 'mlflow.db'}")


def test_a_changed_param_is_reported_and_the_first_value_stays(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = _tracker(tmp_path)
    tracker.params({"a": 1, "b": 1})
    tracker.params({"a": 2})
    tracker.close("FINISHED")
    tracker = _tracker(tmp_path)
    tracker.params({"b": 3, "c": 4})
    tracker.close("FINISHED")

    (run,) = MlflowClient(uri).search_runs(["1"])
    assert run.data.params == {"a": "1", "b": "1", "c": "4"}
    assert "other values of b" in caplog.text


def test_an_unreachable_server_is_reported_once_and_everything_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    [port] = find_free_ports(1)
    config = TrackingConfig(uri=f"http://me:secret@127.0.0.1:{port}")
    with caplog.at_level(logging.WARNING):
        tracker = MlflowTracker(config, tmp_path, "run-1", tmp_path / "run-1")
        tracker.metrics({"reward/joint": 1.0}, 1)
        tracker.close("FINISHED")
    assert tracker.num_undelivered == 3  # with the id of the folder
    assert caplog.text.count("cannot be used") == 1
    assert "secret" not in caplog.text


def test_where_runs_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(TrackingConfig(), tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert tracking_uri(TrackingConfig(), tmp_path) == "http://tracking:5000"
    assert tracking_uri(TrackingConfig(uri="sqlite:///x.db"), tmp_path) == "sqlite:///x.db"
    assert hide_password("https://me:secret@host:5000/x") == "https://***@host:5000/x"


def test_a_long_card_is_cut_where_a_section_begins() -> None:
    from magrpo.tracking.model_registry import shorten_card

    short = "# card\n\n## one\n\ntext\n"
    assert shorten_card(short) == short
    cut = shorten_card(short + "\n## two\n\n" + "x" * 5000)
    assert cut.startswith(short)
    assert "two" not in cut
    assert "README.md" in cut
    assert len(shorten_card("x" * 6000)) == 5000


@pytest.mark.slow
def test_the_registry_works_through_a_server(tmp_path: Path) -> None:
    """Registered twice it is one version; the alias goes and comes; what is downloaded is what was registered."""
    with serve_mlflow(tmp_path) as uri:
        _work_with_a_registry(uri, tmp_path)


def _work_with_a_registry(uri: str, folder: Path) -> None:
    """Assert each step from registering a team to removing its champion."""
    tracker = MlflowTracker(TrackingConfig(uri=uri), folder, "run-1", folder / "run-1")
    tracker.close("FINISHED")
    registry = ModelRegistry(uri, "team")
    assert registry.find_champion() is None
    weights, described = folder / "weights", folder / "described"
    for path in (weights / "main", described):
        path.mkdir(parents=True)
    (weights / "main" / "adapter.bin").write_bytes(b"\0\1")
    (described / "README.md").write_text("# team")
    first, again, second = (registry.register_team(tracker.mlflow_run_id, weights, label) for label in ("a", "a", "b"))
    assert (first.number, again, second.number) == (1, first, 2)
    registry.describe_version(first, described, "# team", {"magrpo.run_id": "run-1"})
    registry.set_champion(1)
    champion = registry.find_champion()
    assert champion is not None
    assert (champion.number, champion.tags) == (1, {"magrpo.run_id": "run-1"})
    (folder / ".copy").mkdir()  # a download that was killed
    registry.download_version(champion, folder / "copy")
    assert not (folder / ".copy").exists()
    assert (folder / "copy" / "main" / "adapter.bin").read_bytes() == b"\0\1"
    assert (folder / "copy" / "README.md").read_text() == "# team"
    registry.set_champion(None)
    assert registry.find_champion() is None


def test_artifacts_of_any_experiment_stay_in_the_root(tmp_path: Path, uri: str) -> None:
    data = tmp_path / "data.txt"
    data.write_text("x")
    root = tmp_path / "runs"
    config = TrackingConfig(experiment="/Users/me@example.org/my runs", uri=uri)
    tracker = MlflowTracker(config, root, "a", root / "a")
    tracker.artifact(data, "data")
    tracker.close("FINISHED")
    assert tracker.num_undelivered == 0
    assert len(list((root / "mlartifacts").glob("*/*/artifacts/data/data.txt"))) == 1


@pytest.mark.parametrize(("name", "folder"), [("../../x", "x"), ("a.b c", "a.b-c"), (".", "experiment")])
def test_a_folder_of_artifacts_is_named_after_its_experiment(tmp_path: Path, uri: str, name: str, folder: str) -> None:
    sink = MlflowSink(uri, name, "a", tmp_path, "magrpo.run_id")
    assert sink.locate_artifacts() == (tmp_path / folder).as_uri()


@pytest.mark.parametrize("uri", ["databricks", "databricks://work"])
def test_databricks_needs_an_absolute_path(tmp_path: Path, uri: str) -> None:
    with pytest.raises(
        ConfigError, match=r"tracking.experiment = 'magrpo': on Databricks an experiment is an absolute"
    ):
        check_tracking(TrackingConfig(uri=uri), tmp_path)
    assert check_tracking(TrackingConfig(uri=uri, experiment="/Users/me@example.org/magrpo"), tmp_path) == uri


RECORD: Record = {"kind": "metrics", "step": 1, "time_ms": 1, "values": {"reward/joint": 1.0}}


def test_an_experiment_that_is_deleted_during_a_run_loses_no_record(tmp_path: Path, uri: str) -> None:
    sink = MlflowSink(uri, "magrpo", "one", tmp_path / "artifacts", "magrpo.run_id")
    sink.connect()
    MlflowClient(uri).delete_experiment("1")
    with pytest.raises(Unavailable, match="mlflow experiments restore --experiment-id 1"):
        sink.deliver([RECORD])


def test_a_trace_that_is_refused_waits_while_its_experiment_is_deleted(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server then answers like one that does not support the trace."""

    def refuse(*_: object) -> None:
        raise RecordRefused("Not Found")

    monkeypatch.setattr("magrpo.tracking.mlflow_runs.deliver_traces", refuse)
    sink = MlflowSink(uri, "magrpo", "one", tmp_path / "artifacts", "magrpo.run_id")
    sink.connect()
    with pytest.raises(RecordRefused):
        sink.deliver([{"kind": "trace"}])
    MlflowClient(uri).delete_experiment("1")
    with pytest.raises(Unavailable, match="mlflow experiments restore --experiment-id 1"):
        sink.deliver([{"kind": "trace"}])


def test_a_run_that_is_deleted_while_it_trains_is_made_again_with_all_records(tmp_path: Path, uri: str) -> None:
    sink = MlflowSink(uri, "magrpo", "one", tmp_path / "artifacts", "magrpo.run_id", folder_id="f")
    deleted = sink.connect()
    MlflowClient(uri).delete_run(deleted)
    with pytest.raises(Unavailable, match=f"the run {deleted} was deleted in MLflow"):
        sink.deliver([RECORD])
    assert sink.connect() != deleted, "another destination, to which the outbox sends everything"
    sink.deliver([RECORD])


def test_a_missing_package_of_the_artifact_store_holds_up_no_metrics(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = MlflowClient(uri)
    client.create_experiment("magrpo", artifact_location="s3://bucket/x")
    tracker = MlflowTracker(TrackingConfig(uri=uri), tmp_path, "one", tmp_path / "one")
    page = tmp_path / "one" / "report.html"
    page.write_text("<p>")
    tracker.artifact(page, "report")
    tracker.metrics({"reward/joint": 1.0}, 1)
    tracker.close("FINISHED")
    run = client.get_run(tracker.mlflow_run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"reward/joint": 1.0})
    assert tracker.num_undelivered == 1
    assert "No module named 'boto3'; install it" in caplog.text


def test_any_error_of_an_artifact_store_is_reported(tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no credentials")

    monkeypatch.setattr("mlflow.MlflowClient.log_artifact", fail)
    monkeypatch.setattr("mlflow.MlflowClient.log_artifacts", fail)
    sink = MlflowSink(uri, "magrpo", "one", tmp_path / "artifacts", "magrpo.run_id")
    sink.connect()
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match=r"the store of artifacts failed \(LookupError: no credentials\)"):
        sink.deliver([{"kind": "artifact", "path": str(tmp_path / "file"), "folder": ""}])
    with pytest.raises(Unavailable, match=r"the store of artifacts failed \(LookupError"):
        ModelRegistry(uri, "team").register_team(sink.mlflow_run_id, tmp_path, "label")
