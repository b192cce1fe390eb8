"""Trajectories as MLflow traces: a span for the problem, one for each agent's answer, one for each scoring.

MLflow usually creates spans during the work and queues them in memory. Here a whole trace is built from a record of the
outbox. Its ids derive from the run and the trajectory, so delivering it again replaces it.

Every span shows the time of the evaluation, which works on batches, not that of a single completion. Spans begin
nanoseconds apart, which keeps them in order.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magrpo.errors import first_line
from magrpo.tracking.connection import RecordRefused
from magrpo.tracking.outbox import Record
from magrpo.types import Action, ExecutionReport, Trajectory, TrajectoryStep

if TYPE_CHECKING:
    from mlflow.entities import Feedback, Span, TraceInfo

_PREVIEW = 1000
"""Characters of a problem in MLflow's list of traces, which is where MLflow itself would cut it."""
_MAX_DELETED = 100
"""Largest number of traces in one request of deletion."""
_HOPELESS = frozenset(range(400, 500)) - {401, 403, 408, 429}
"""HTTP statuses after which sending the same trace again is pointless."""


def trace_record(trajectory: Trajectory, step: int, interval: tuple[float, float]) -> Record:
    """Make the record of a trajectory of iteration ``step``: plain JSON that does not need the files of the run.

    ``interval``: begin and end of the stage that sampled it, in seconds since 1970.
    """
    turns = [
        {
            "answers": list(_answer_records(taken)),
            "reports": {name: _execution_record(report) for name, report in taken.turn.reports.items()},
            "reward": taken.turn.reward.total,
            "parts": dict(taken.turn.reward.parts),
            "masked": taken.turn.masked,
        }
        for taken in trajectory.steps
    ]
    return {
        "kind": "trace",
        "step": step,
        "task_id": trajectory.problem.task_id,
        "problem": trajectory.problem.prompt,
        "split": trajectory.split,
        "mode": trajectory.mode,
        "path": list(trajectory.path),
        "interval": list(interval),
        "turns": turns,
    }


def _answer_records(step: TrajectoryStep) -> Iterator[Record]:
    """The records of all completions of a turn. ``extends``: number of an earlier one that it continues; -1: none."""
    for name, action in step.actions.items():
        yield _answer_record(action, step.first_messages[name], len(step.prompts[name].token_ids))
    episode = step.episode
    if episode is not None:
        for number, call in enumerate(episode.calls):
            prompt_tokens = len(episode.prompt_ids(number))
            yield _answer_record(call.action, episode.messages(number), prompt_tokens, call.extends)


def _answer_record(
    action: Action, messages: Sequence[Mapping[str, Any]], prompt_tokens: int, extends: int = -1
) -> Record:
    return {
        "agent": action.agent,
        "extends": extends,
        "messages": list(messages),
        "completion": action.text,
        "finish_reason": action.finish_reason,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(action.token_ids),
        "log_probability": sum(action.sampling_logps),
        "policy_version": action.policy_version,
    }


def _execution_record(report: ExecutionReport) -> Record:
    failed = next((case for case in report.cases if case.status != "pass"), None)
    return {
        "status": report.status,
        "tests_passed": report.tests_passed,
        "tests_total": report.tests_total,
        "first_failure": failed.message if failed else "",
        "level": report.level,
        "duration_s": report.duration_s,
    }


def deliver_traces(uri: str, experiment_id: str, mlflow_run_id: str, records: Sequence[Record]) -> None:
    """Store records of :func:`trace_record` as traces of a run.

    Raises RecordRefused if the server does not support such traces (before MLflow 3.4), or rejects one of them.
    """
    from mlflow.exceptions import MlflowException  # takes seconds
    from mlflow.tracing.client import TracingClient

    client = TracingClient(uri)
    traces = []
    for record in records:
        facts = (record[key] for key in ("step", "split", "mode", "task_id"))
        traces.append(("tr-" + _hash(mlflow_run_id, *facts, *record["path"]), record))
    try:
        # Both calls below only add to a trace, which would keep what its new version lacks.
        for start in range(0, len(traces), _MAX_DELETED):
            chunk = [trace_id for trace_id, _ in traces[start : start + _MAX_DELETED]]
            client.delete_traces(experiment_id, trace_ids=chunk)
        client.log_spans(experiment_id, [span for trace in traces for span in _make_spans(*trace)])
        for trace_id, record in traces:
            client.start_trace(_make_info(trace_id, record, experiment_id, mlflow_run_id))
    except NotImplementedError as error:
        raise RecordRefused(str(error)) from error
    except MlflowException as error:
        answer: int = error.get_http_status_code()  # type: ignore[no-untyped-call]
        if uri.startswith("http") and answer in _HOPELESS:
            raise RecordRefused(first_line(error)[:300]) from error
        raise


def _hash(*parts: object) -> str:
    """Hash JSON values to 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _make_spans(trace: str, record: Record) -> list[Span]:
    """Make the spans of a trace: the root, then for each turn the answers of its agents and its scoring.

    An answer whose prompt continues an earlier one is a child of that, as the calls of a program often are.
    """
    turns = record["turns"]
    spans: list[Span] = []

    def add_span(*facts: Any, parent: int = 0, failed: bool = False) -> None:
        span = _make_span(trace, len(spans), record["interval"], *facts, parent=parent, failed=failed)
        spans.append(span)

    completions = {agent: text for turn in turns for agent, text in _completions(turn).items()}
    outputs = {"rewards": [turn["reward"] for turn in turns if _is_priced(turn)], "completions": completions}
    attributes = {key: record[key] for key in ("task_id", "split", "mode", "path")} | {"iteration": record["step"]}
    inputs = {"problem": record["problem"]}
    add_span(record["task_id"], "CHAIN", inputs, outputs, attributes)
    for index, turn in enumerate(turns, start=1):
        suffix = f" turn {index}" if len(turns) > 1 else ""
        first = len(spans)
        for said in turn["answers"]:
            parent = 0 if said["extends"] < 0 else first + said["extends"]
            add_span(f"{said['agent']}{suffix}", "CHAT_MODEL", *_describe_answer(said), parent=parent)
        if _is_priced(turn):
            outputs = {key: turn[key] for key in ("reward", "parts", "reports")}
            inputs, attributes = {"completions": _completions(turn)}, {"masked": turn["masked"]}
            add_span(f"score{suffix}", "EVALUATOR", inputs, outputs, attributes, failed=turn["masked"])
    return spans


def _describe_answer(said: Record) -> tuple[Record, Record, Record]:
    """The inputs, outputs and attributes of the span of an answer."""
    answer = {"message": {"role": "assistant", "content": said["completion"]}, "finish_reason": said["finish_reason"]}
    attributes = {key: said[key] for key in ("policy_version", "finish_reason", "log_probability")}
    attributes["mlflow.chat.tokenUsage"] = {
        "input_tokens": said["prompt_tokens"],
        "output_tokens": said["completion_tokens"],
        "total_tokens": said["prompt_tokens"] + said["completion_tokens"],
    }
    attributes["mlflow.message.format"] = "openai"
    return {"messages": said["messages"]}, {"choices": [answer]}, attributes


def _make_span(
    trace: str,
    number: int,
    interval: Sequence[float],
    title: str,
    kind: str,
    inputs: Record,
    outputs: Record,
    attributes: Record,
    *,
    failed: bool,
    parent: int,
) -> Span:
    """Make the span of a trace with a number. Number 0 is the root."""
    from mlflow.entities import Span  # takes seconds

    described = {
        "mlflow.traceRequestId": trace,
        "mlflow.spanType": kind,
        "mlflow.spanInputs": inputs,
        "mlflow.spanOutputs": outputs,
        **attributes,
    }
    began, ended = (round(seconds * 1e9) for seconds in interval)
    return Span.from_dict(
        {
            "trace_id": _encode(trace.removeprefix("tr-")),
            "span_id": _encode(_hash(trace, number)[:16]),
            "parent_span_id": _encode(_hash(trace, parent)[:16]) if number else None,
            "name": title,
            "start_time_unix_nano": began + number,
            "end_time_unix_nano": max(ended, began + number),
            "status": {"code": "STATUS_CODE_ERROR" if failed else "STATUS_CODE_OK", "message": ""},
            "attributes": {key: json.dumps(value) for key, value in described.items()},
        }
    )


def _encode(digits: str) -> str:
    return b64encode(bytes.fromhex(digits)).decode()


def _make_info(name: str, record: Record, experiment_id: str, mlflow_run_id: str) -> TraceInfo:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState  # takes seconds

    began, ended = (round(seconds * 1000) for seconds in record["interval"])
    last = record["turns"][-1]
    tags = {"iteration": record["step"], "split": record["split"], "mode": record["mode"]}
    answer = ", ".join(f"{key} {value:g}" for key, value in {"reward": last["reward"], **last["parts"]}.items())
    return TraceInfo(
        trace_id=name,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=began,
        execution_duration=ended - began,
        state=TraceState.ERROR if last["masked"] else TraceState.OK,
        request_preview=record["problem"][:_PREVIEW],
        response_preview=answer[:_PREVIEW],
        trace_metadata={"mlflow.sourceRun": mlflow_run_id},
        tags={"mlflow.traceName": record["task_id"]} | {f"magrpo.{key}": str(value) for key, value in tags.items()},
        assessments=[*_feedback(name, last, ended)],
    )


def _feedback(name: str, turn: Record, time_ms: int) -> Iterator[Feedback]:
    """Feedback with the reward of the last turn and its parts; none if the sandbox failed."""
    from mlflow.entities import AssessmentSource, Feedback  # takes seconds

    values: dict[str, Any] = {} if turn["masked"] else {"reward": turn["reward"], **turn["parts"]}
    for key, value in values.items():
        feedback = Feedback(
            name=key,
            value=value,
            source=AssessmentSource("CODE", "magrpo"),
            trace_id=name,
            create_time_ms=time_ms,
            last_update_time_ms=time_ms,
        )
        feedback.assessment_id = "a-" + _hash(name, key)
        yield feedback


def _is_priced(turn: Record) -> bool:
    """Whether the turn was scored, which takes texts of all agents of the team."""
    return bool(turn["parts"]) or turn["masked"]


def _completions(turn: Record) -> dict[str, str]:
    return {said["agent"]: said["completion"] for said in turn["answers"]}
