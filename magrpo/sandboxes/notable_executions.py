"""The notable executions of a stage, for a person to look at: the slowest and the strangest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from magrpo.types import Case, Execution, ExecutionReport

STRANGENESS = {
    "infra_error": 9, "protocol": 8, "crash": 7, "memory": 6, "output_limit": 5, "timeout": 4, "load_error": 2,
    "exception": 1,
}  # fmt: skip
"""Strangeness of a status: how unusual it is for an honest program. Other statuses are 0."""


class NotableExecution(TypedDict):
    """One row. ``why``: ``slow`` or ``strange``; times in seconds, memory in bytes."""

    why: str
    status: str
    level: str
    tests_passed: int
    tests_total: int
    duration_s: float
    cpu_s: float
    memory_bytes: int
    forgeable: bool
    message: str
    source: str


def list_notable_executions(reports: Mapping[Execution, ExecutionReport], number: int = 10) -> list[NotableExecution]:
    """The ``number`` slowest executions, then the ``number`` strangest of positive strangeness."""
    slow = sorted(reports.items(), key=lambda item: -item[1].duration_s)[:number]
    odd = [item for item in reports.items() if measure_strangeness(item[1])]
    strange = sorted(odd, key=lambda item: -measure_strangeness(item[1]))[:number]
    return [_row("slow", *item) for item in slow] + [_row("strange", *item) for item in strange]


def write_notable_executions(path: Path, reports: Mapping[Execution, ExecutionReport]) -> None:
    """Write :func:`list_notable_executions` as a JSON list, one row on a line."""
    rows = [json.dumps(row) for row in list_notable_executions(reports)]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def measure_strangeness(report: ExecutionReport) -> int:
    """Strangeness of the strangest case; 0 for ordinary programs."""
    return max((STRANGENESS.get(case.status, 0) for case in report.cases), default=0)


def _row(why: str, execution: Execution, report: ExecutionReport) -> NotableExecution:
    worst = max(report.cases, key=lambda case: STRANGENESS.get(case.status, 0), default=Case(report.status))
    return NotableExecution(
        why=why,
        status=worst.status,
        level=report.level,
        tests_passed=report.tests_passed,
        tests_total=report.tests_total,
        duration_s=report.duration_s,
        cpu_s=report.cpu_s,
        memory_bytes=report.memory_bytes,
        forgeable=report.forgeable,
        message=worst.message,
        source=execution.source,
    )
