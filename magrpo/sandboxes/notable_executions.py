"""The notable executions of a stage, for a person to look at: the slowest and the strangest."""

import json
from collections.abc import Mapping
from pathlib import Path

from magrpo.types import Case, Execution, ExecutionReport

STRANGENESS = {
    "infra_error": 9, "test_error": 9, "protocol": 8, "crash": 7, "memory": 6, "output_limit": 5, "timeout": 4,
    "load_error": 2, "exception": 1,
}  # fmt: skip
"""Strangeness of a status: how unusual it is for an honest program. Other statuses have 0."""
COPIED = ("level", "tests_passed", "tests_total", "duration_s", "cpu_s", "memory_bytes", "forgeable")


def list_notable_executions(
    reports: Mapping[Execution, ExecutionReport], number: int = 10
) -> list[dict[str, str | float]]:
    """List the ``number`` slowest executions, then the ``number`` strangest with a positive strangeness.

    Each has ``why`` (``slow`` or ``strange``), ``status`` and ``message`` of its strangest case, its ``source``, and
    the fields :data:`COPIED` of its report.
    """
    by_why = {"slow": sorted(reports.items(), key=lambda item: -item[1].duration_s)}
    strange = [item for item in reports.items() if _measure_strangeness(_find_strangest(item[1]))]
    by_why["strange"] = sorted(strange, key=lambda item: -_measure_strangeness(_find_strangest(item[1])))
    rows: list[dict[str, str | float]] = []
    for why, executions in by_why.items():
        for execution, report in executions[:number]:
            case = _find_strangest(report)
            row = {"why": why, "status": case.status} | {name: getattr(report, name) for name in COPIED}
            rows.append(row | {"message": case.message, "source": execution.source})
    return rows


def write_notable_executions(path: Path, reports: Mapping[Execution, ExecutionReport]) -> None:
    """Write :func:`list_notable_executions` as a JSON list, one row on a line."""
    rows = [json.dumps(row) for row in list_notable_executions(reports)]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")


def _measure_strangeness(case: Case) -> int:
    return STRANGENESS.get(case.status, 0)


def _find_strangest(report: ExecutionReport) -> Case:
    return max(report.cases, key=_measure_strangeness, default=Case(report.status))
