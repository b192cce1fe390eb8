"""What the spool holds of a trajectory: plain JSON and whole, to be delivered even after the run's files are gone."""

from __future__ import annotations

from collections.abc import Sequence

from magrpo.tracking.spool import Record
from magrpo.types import ExecutionReport, Step, Trajectory, TurnTimes


def trace_record(trajectory: Trajectory, step: int, times: Sequence[TurnTimes]) -> Record:
    """The record of a trajectory of iteration ``step``; ``times`` has an entry for each of its turns."""
    turns = zip(trajectory.steps, times, strict=True)
    return {
        "kind": "trace",
        "step": step,
        "task_id": trajectory.problem.task_id,
        "problem": trajectory.problem.prompt,
        "split": trajectory.split,
        "mode": trajectory.mode,
        "path": list(trajectory.path),
        "turns": [_turn(taken, when) for taken, when in turns],
    }


def _turn(step: Step, times: TurnTimes) -> Record:
    return {
        "rollout": list(times.rollout),
        "score": list(times.score),
        "agents": {name: _agent(step, name) for name in step.actions},
        "reports": {name: _report(report) for name, report in step.turn.reports.items()},
        "reward": step.turn.reward.total,
        "parts": dict(step.turn.reward.parts),
        "masked": step.turn.masked,
    }


def _agent(step: Step, name: str) -> Record:
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


def _report(report: ExecutionReport) -> Record:
    failed = next((case for case in report.cases if case.status != "pass"), None)
    return {
        "status": report.status,
        "tests_passed": report.tests_passed,
        "tests_total": report.tests_total,
        "first_failure": failed.message if failed else "",
        "level": report.level,
        "duration_s": report.duration_s,
    }
