"""What rewards have in common: scale and shift; what those of tested programs have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from pydantic import Field

from magrpo.plugins import Plugin
from magrpo.rewards.program import Module, extract_preamble, join_modules
from magrpo.types import Execution, ExecutionReport, Problem


class ScaledReward(Plugin):
    """A reward of parts: ``total = scale * sum(parts) + shift``."""

    part_maxima: ClassVar[Mapping[str, float]]
    """The largest value of every part."""

    scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor on the sum of the parts."""
    shift: float = Field(0.0, allow_inf_nan=False)
    """Added to the scaled sum."""

    @property
    def maxima(self) -> Mapping[str, float]:
        """The largest value of every part, ``scale`` and ``shift`` aside."""
        return self.part_maxima

    def fraction(self, total: float) -> float:
        """The share of the maximum that a joint reward, or a mean of joint rewards, is: 1 if every part is full."""
        return (total - self.shift) / (self.scale * sum(self.part_maxima.values()))

    def _total(self, parts: Mapping[str, float]) -> float:
        return self.scale * sum(parts.values()) + self.shift


class ProgramReward(ScaledReward):
    """A reward with a part for tests; the report of the program that all agents made is named ``program``.

    Hidden tests have a run and a report of their own, ``program_hidden``: what is made from ``program`` alone, as
    feedback is, cannot tell anything about them.
    """

    refuse_forgeable: bool = False
    """Count a report that did not go through the sandbox's trust split as no test passed."""

    def passed(self, reports: Mapping[str, ExecutionReport]) -> bool:
        """Whether the program ran and passed every test."""
        report = merge_hidden_report(reports, "program") if "program" in reports else None
        return report is not None and 0 < report.tests_total == self._num_passed(report)

    def _num_passed(self, report: ExecutionReport) -> int:
        assert all(case.status != "infra_error" for case in report.cases), (
            "a failed sandbox has no price: mask the turn"
        )
        return 0 if report.forgeable and self.refuse_forgeable else report.tests_passed

    def _share_passed(self, report: ExecutionReport) -> float:
        return self._num_passed(report) / report.tests_total if report.tests_total else 0.0


def make_executions(problem: Problem, name: str, source: str, watch: str = "") -> dict[str, Execution]:
    """A program against the problem's tests and, as ``<name>_hidden``, against its hidden tests if it has any."""
    prompt, entry_point = problem.prompt, problem.entry_point
    wanted = {name: Execution(source, entry_point, make_trusted_test(prompt, entry_point, problem.test), watch)}
    if problem.hidden_test:
        hidden = make_trusted_test(prompt, entry_point, problem.hidden_test)
        wanted[f"{name}_hidden"] = Execution(source, entry_point, hidden)
    return wanted


def merge_hidden_report(reports: Mapping[str, ExecutionReport], name: str) -> ExecutionReport:
    """The report ``name`` with the cases of the hidden tests after its own."""
    report, hidden = reports[name], reports.get(f"{name}_hidden")
    if hidden is None:
        return report
    return replace(
        report,
        status=hidden.status if report.status == "pass" else report.status,
        cases=report.cases + hidden.cases,
        duration_s=report.duration_s + hidden.duration_s,
        cpu_s=report.cpu_s + hidden.cpu_s,
        memory_bytes=max(report.memory_bytes, hidden.memory_bytes),
        forgeable=report.forgeable or hidden.forgeable,
    )


@lru_cache(maxsize=1024)
def make_trusted_test(prompt: str, entry_point: str, test: str) -> str:
    """The test with the prompt's preamble before it: some tests call the helpers that the prompt defines."""
    above = extract_preamble(prompt, entry_point)
    return join_modules([above, Module((), test)]) if above.source or above.futures else test
