"""Trajectories as MLflow traces: what is in them, and that a second delivery adds nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Trace

from magrpo.config.services import TrackingConfig
from magrpo.tracking.connection import RecordRefused, Unavailable
from magrpo.tracking.mlflow_runs import MlflowSink, MlflowTracker
from magrpo.tracking.traces import deliver_traces, trace_record
from magrpo.types import (
    Action,
    Case,
    ExecutionReport,
    JointReward,
    Message,
    Observation,
    Problem,
    Prompt,
    ScoredTurn,
    Trajectory,
    TrajectoryStep,
)
from tests.servers import serve_mlflow

AGENTS = ("helper", "main")
REPORT = ExecutionReport("wrong", (Case("pass"), Case("wrong", "f(2) gave 3")), "namespaces")
INTERVAL = (1000.0, 1006.0)


def step(turn: int, reward: float, *, masked: bool = False) -> TrajectoryStep:
    return TrajectoryStep(
        prompts={a: Prompt(Observation((Message("user", f"{a}, turn {turn}"),)), (1, 2, 3)) for a in AGENTS},
        actions={a: Action(a, f"def {a}(): …", (4, 5), (-0.5, -0.25), "stop", 7) for a in AGENTS},
        turn=ScoredTurn({"helper": 0, "main": 0}, JointReward(reward, {"tests": reward}), {"tests": REPORT}, masked),
    )


TRAJECTORY = Trajectory(Problem("set/1", "Add two numbers."), "test", "sampled", (0, 2), (step(1, 0.5), step(2, 2.0)))


def record(uri: str, root: Path, trajectories: Sequence[Trajectory]) -> str:
    """Record trajectories of iteration 20 in the run ``run-1``; returns MLflow's id of the experiment."""
    tracker = MlflowTracker(TrackingConfig(uri=uri), root, "run-1", root / "run-1")
    for trajectory in trajectories:
        tracker.trace(trajectory, 20, INTERVAL)
    tracker.close("FINISHED")
    assert tracker.num_undelivered == 0
    experiment = MlflowClient(uri).get_experiment_by_name("magrpo")
    assert experiment is not None
    return str(experiment.experiment_id)


def traces(uri: str, experiment: str) -> list[Trace]:
    return list(MlflowClient(uri).search_traces(locations=[experiment]))


def check(trace: Trace, uri: str, experiment: str) -> None:
    """Assert that a trace holds all of ``TRAJECTORY``: times, tags, feedback, and a span for each answer and score."""
    [run] = MlflowClient(uri).search_runs([experiment])
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run.info.run_id
    assert (trace.info.request_time, trace.info.execution_duration) == (1_000_000, 6_000)
    tags = {key: value for key, value in trace.info.tags.items() if key.startswith("magrpo.")}
    assert tags == {"magrpo.iteration": "20", "magrpo.split": "test", "magrpo.mode": "sampled"}
    assert trace.info.token_usage == {"input_tokens": 12, "output_tokens": 8, "total_tokens": 20}
    feedback = {found.name: found.feedback.value for found in trace.info.assessments}
    assert feedback == {"reward": 2.0, "tests": 2.0}
    assert len(trace.info.assessments) == 2
    root, *children = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
    assert (root.name, root.inputs) == ("set/1", {"problem": "Add two numbers."})
    assert root.outputs["rewards"] == [0.5, 2.0]
    names = [f"{name} turn {turn}" for turn in (1, 2) for name in ("helper", "main", "score")]
    assert [span.name for span in children] == names
    assert {span.parent_id for span in children} == {root.span_id}
    answer, scored = children[0], children[2]
    assert answer.inputs == {"messages": [{"role": "user", "content": "helper, turn 1"}]}
    [choice] = answer.outputs["choices"]
    assert choice["message"] == {"role": "assistant", "content": "def helper(): …"}
    facts = {key: answer.get_attribute(key) for key in ("policy_version", "finish_reason", "log_probability")}
    assert facts == {"policy_version": 7, "finish_reason": "stop", "log_probability": -0.75}
    report = scored.outputs["reports"]["tests"]
    assert (report["status"], report["tests_passed"], report["tests_total"]) == ("wrong", 1, 2)
    assert (report["level"], report["first_failure"]) == ("namespaces", "f(2) gave 3")


def again(root: Path) -> None:
    """Make the outbox forget that anything was delivered."""
    (root / "run-1" / "tracking.sent").unlink()


def deliver_twice(uri: str, root: Path) -> None:
    for _ in range(2):
        experiment = record(uri, root, [TRAJECTORY])
        [trace] = traces(uri, experiment)
        check(trace, uri, experiment)
        again(root)


def test_a_trajectory_becomes_one_trace_however_often_it_is_delivered(tmp_path: Path, uri: str) -> None:
    deliver_twice(uri, tmp_path)


def test_a_turn_done_again_replaces_its_trace(tmp_path: Path, uri: str) -> None:
    record(uri, tmp_path, [TRAJECTORY])
    [trace] = traces(uri, record(uri, tmp_path, [replace(TRAJECTORY, steps=(step(1, 0.5), step(2, 3.0)))]))
    assert {found.name: found.feedback.value for found in trace.info.assessments} == {"reward": 3.0, "tests": 3.0}
    assert len(trace.data.spans) == 7


def test_a_trace_that_became_shorter_keeps_nothing_of_the_longer_one(tmp_path: Path, uri: str) -> None:
    record(uri, tmp_path, [TRAJECTORY])
    [trace] = traces(uri, record(uri, tmp_path, [replace(TRAJECTORY, steps=(step(1, 0.0, masked=True),))]))
    assert [span.name for span in trace.data.spans] == ["set/1", "helper", "main", "score"]
    assert trace.info.assessments == []


def test_where_the_sandbox_failed_there_is_no_feedback(tmp_path: Path, uri: str) -> None:
    masked = replace(TRAJECTORY, path=(0,), steps=(step(1, 0.0, masked=True),))
    [trace] = traces(uri, record(uri, tmp_path, [masked]))
    assert trace.info.state == "ERROR"
    assert trace.info.assessments == []
    assert [span.name for span in trace.data.spans if span.status.status_code == "ERROR"] == ["score"]


def test_a_server_without_traces_refuses_them_and_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old(*_: object) -> None:
        raise NotImplementedError("log_spans is not supported")

    monkeypatch.setattr("mlflow.tracing.client.TracingClient.delete_traces", lambda *_, **__: 0)
    monkeypatch.setattr("mlflow.tracing.client.TracingClient.log_spans", too_old)
    with pytest.raises(RecordRefused, match="not supported"):
        deliver_traces("http://127.0.0.1:1", "1", "run", [trace_record(TRAJECTORY, 1, INTERVAL)])


def test_a_record_is_small_and_plain() -> None:
    text = json.dumps(trace_record(TRAJECTORY, 1, INTERVAL))
    assert "token_ids" not in text
    assert len(text) < 3000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_mlflow(tmp_path_factory.mktemp("server")) as uri:
        yield uri


@pytest.mark.slow
def test_traces_through_a_server(tmp_path: Path, server: str) -> None:
    deliver_twice(server, tmp_path)


@pytest.mark.slow
def test_a_server_whose_experiment_is_deleted_gets_the_traces_later(server: str) -> None:
    sink = MlflowSink(server, "deleted", "one", None, "magrpo.run_id")
    sink.connect()
    client = MlflowClient(server)
    client.delete_experiment(sink.experiment_id)
    with pytest.raises(Unavailable, match="mlflow experiments restore"):
        sink.deliver([trace_record(TRAJECTORY, 1, INTERVAL)])
    client.restore_experiment(sink.experiment_id)
    sink.deliver([trace_record(TRAJECTORY, 1, INTERVAL)])
    assert len(traces(server, sink.experiment_id)) == 1
