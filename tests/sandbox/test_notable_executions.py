"""The rows for the artifact."""

from __future__ import annotations

from magrpo.sandboxes.notable_executions import list_notable_executions
from magrpo.types import Case, CaseStatus, Execution, ExecutionReport


def report(status: CaseStatus, duration_s: float) -> ExecutionReport:
    cases = (Case("pass"), Case(status, f"it was {status}"))
    return ExecutionReport(status, cases, "namespaces", duration_s)


def test_the_slowest_and_the_strangest() -> None:
    statuses: list[CaseStatus] = ["pass", "wrong", "crash", "protocol", "exception", "timeout"]
    reports = {Execution(status, "f", ""): report(status, float(k)) for k, status in enumerate(statuses)}
    rows = list_notable_executions(reports, 2)
    assert [(row["why"], row["source"]) for row in rows] == [
        ("slow", "timeout"),
        ("slow", "exception"),
        ("strange", "protocol"),
        ("strange", "crash"),
    ]
    assert rows[2]["message"] == "it was protocol"
    assert (rows[2]["tests_passed"], rows[2]["tests_total"]) == (1, 2)
    assert list_notable_executions({}) == []


def test_ordinary_failures_are_not_strange() -> None:
    reports = {Execution("a", "f", ""): report("wrong", 1.0)}
    assert [row["why"] for row in list_notable_executions(reports)] == ["slow"]
