"""Trajectories as MLflow traces: a span for the problem, one for each agent's answer, one for each scoring.

MLflow usually makes spans during the work and queues them in memory. Here a whole trace is built from a record of the
spool. Its ids derive from the run and the trajectory, so delivering it again replaces it.

Times are those of the stage: the engine answers all prompts of a turn as one batch, so a span shows when the batch ran,
not the duration of one completion. Spans of one batch begin nanoseconds apart, which keeps them in order.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from magrpo.tracking.spool import Record, Refused
from magrpo.types import ExecutionReport, Trajectory, TrajectoryStep, TurnTimes

if TYPE_CHECKING:
    from mlflow.entities import Feedback, Span, TraceInfo

_PREVIEW = 1000  # characters of a problem in MLflow's list of traces, as MLflow cuts them itself
_HOPELESS = frozenset(range(400, 500)) - {401, 403, 408, 429}
"""HTTP statuses after which sending the same trace again is pointless."""


def trace_record(trajectory: Trajectory, step: int, times: Sequence[TurnTimes]) -> Record:
    """The spool's record of a trajectory: complete plain JSON, deliverable even after the run's files are gone.

    ``step`` is the iteration; ``times`` has an entry for each turn.
    """
    turns = zip(trajectory.steps, times, strict=True)
    return {
        "kind": "trace",
        "step": step,
        "task_id": trajectory.problem.task_id,
        "problem": trajectory.problem.prompt,
        "split": trajectory.split,
        "mode": trajectory.mode,
        "path": list(trajectory.path),
        "turns": [_turn_record(taken, when) for taken, when in turns],
    }


def _turn_record(step: TrajectoryStep, times: TurnTimes) -> Record:
    return {
        "rollout": list(times.rollout),
        "score": list(times.score),
        "agents": {name: _agent_record(step, name) for name in step.actions},
        "reports": {name: _execution_record(report) for name, report in step.turn.reports.items()},
        "reward": step.turn.reward.total,
        "parts": dict(step.turn.reward.parts),
        "masked": step.turn.masked,
    }


def _agent_record(step: TrajectoryStep, name: str) -> Record:
    prompt, action = step.prompts[name], step.actions[name]
    return {
        "messages": [{"role": message.role, "content": message.content} for message in prompt.observation.messages],
        "completion": action.text,
        "finish_reason": action.finish_reason,
        "prompt_tokens": len(prompt.token_ids),
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

    Raises:
        Refused: the server does not support such traces (older than MLflow 3.4), or rejects this one.
    """
    from mlflow.exceptions import MlflowException  # takes seconds
    from mlflow.tracing.client import TracingClient

    client = TracingClient(uri)
    traces = [(trace_id(mlflow_run_id, record), record) for record in records]
    try:
        client.log_spans(experiment_id, [span for name, record in traces for span in _spans(name, record)])
        for name, record in traces:
            client.start_trace(_info(name, record, experiment_id, mlflow_run_id))
    except NotImplementedError as error:
        raise Refused(str(error)) from error
    except MlflowException as error:
        answer: int = error.get_http_status_code()  # type: ignore[no-untyped-call]
        if uri.startswith("http") and answer in _HOPELESS:
            raise Refused(str(error).partition("\n")[0][:300]) from error
        raise


def trace_id(mlflow_run_id: str, record: Record) -> str:
    """The id of a trajectory's trace, the same whenever it is recorded."""
    parts = [mlflow_run_id, *(record[key] for key in ("step", "split", "mode", "task_id"))]
    return "tr-" + _hash(*parts, *record["path"])


def _hash(*parts: object) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _spans(name: str, record: Record) -> Iterator[Span]:
    turns = record["turns"]
    began, ended = _interval(record)
    written = {agent: text for turn in turns for agent, text in _completions(turn).items()}
    outputs = {"rewards": [turn["reward"] for turn in turns if _priced(turn)], "completions": written}
    inputs = {"problem": record["problem"]}
    attributes = {key: record[key] for key in ("task_id", "split", "mode", "path")} | {"iteration": record["step"]}
    yield _span(name, 0, record["task_id"], "CHAIN", (began, ended), inputs, outputs, attributes)
    number = 1
    for index, turn in enumerate(turns, start=1):
        suffix = f" turn {index}" if len(turns) > 1 else ""
        for agent, said in turn["agents"].items():
            yield _agent_span(name, number, f"{agent}{suffix}", turn["rollout"], said)
            number += 1
        if not _priced(turn):
            continue
        outputs = {key: turn[key] for key in ("reward", "parts", "reports")}
        inputs = {"completions": _completions(turn)}
        status = "STATUS_CODE_ERROR" if turn["masked"] else "STATUS_CODE_OK"
        attributes = {"masked": turn["masked"]}
        times = turn["score"]
        yield _span(name, number, f"score{suffix}", "EVALUATOR", times, inputs, outputs, attributes, status)
        number += 1


def _agent_span(name: str, number: int, title: str, times: Sequence[float], said: Record) -> Span:
    answer = {"message": {"role": "assistant", "content": said["completion"]}, "finish_reason": said["finish_reason"]}
    usage = {
        "input_tokens": said["prompt_tokens"],
        "output_tokens": said["completion_tokens"],
        "total_tokens": said["prompt_tokens"] + said["completion_tokens"],
    }
    attributes = {key: said[key] for key in ("policy_version", "finish_reason", "log_probability")}
    attributes |= {"mlflow.chat.tokenUsage": usage, "mlflow.message.format": "openai"}
    inputs = {"messages": said["messages"]}
    return _span(name, number, title, "CHAT_MODEL", times, inputs, {"choices": [answer]}, attributes)


def _span(
    name: str,
    number: int,
    title: str,
    kind: str,
    times: Sequence[float],
    inputs: object,
    outputs: object,
    attributes: Mapping[str, object],
    status: str = "STATUS_CODE_OK",
) -> Span:
    """Span ``number`` of the trace ``name``; number 0 is the root and parent of all others."""
    from mlflow.entities import Span  # takes seconds

    described = {
        "mlflow.traceRequestId": name,
        "mlflow.spanType": kind,
        "mlflow.spanInputs": inputs,
        "mlflow.spanOutputs": outputs,
        **attributes,
    }
    began, ended = (round(seconds * 1e9) for seconds in times)
    return Span.from_dict(
        {
            "trace_id": _bytes(name.removeprefix("tr-")),
            "span_id": _span_id(name, number),
            "parent_span_id": _span_id(name, 0) if number else None,
            "name": title,
            "start_time_unix_nano": began + number,
            "end_time_unix_nano": max(ended, began + number),
            "status": {"code": status, "message": ""},
            "attributes": {key: json.dumps(value) for key, value in described.items()},
        }
    )


def _span_id(name: str, number: int) -> str:
    return _bytes(_hash(name, number)[:16])


def _bytes(digits: str) -> str:
    return b64encode(bytes.fromhex(digits)).decode()


def _info(name: str, record: Record, experiment_id: str, mlflow_run_id: str) -> TraceInfo:
    from mlflow.entities import TraceInfo, TraceLocation, TraceState  # takes seconds

    began, ended = (round(seconds * 1000) for seconds in _interval(record))
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
    """The reward of the last turn and its parts; none if the sandbox failed."""
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


def _interval(record: Record) -> tuple[float, float]:
    """Start and end of the trajectory, seconds since 1970."""
    return record["turns"][0]["rollout"][0], record["turns"][-1]["score"][1]


def _priced(turn: Record) -> bool:
    """Whether the turn was scored; not while an agent of the team has yet to write."""
    return bool(turn["parts"]) or turn["masked"]


def _completions(turn: Record) -> dict[str, str]:
    return {agent: said["completion"] for agent, said in turn["agents"].items()}
