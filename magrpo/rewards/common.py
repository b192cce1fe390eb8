"""Base classes of rewards: scale and shift of parts, and the test results of programs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from pydantic import Field

from magrpo.plugins import Plugin
from magrpo.rewards.program import extract_preamble, join_modules, separate_futures
from magrpo.types import UNJUDGED, Execution, ExecutionReport, Problem, Reports


class ScaledReward(Plugin):
    """A reward of parts: ``total = scale * sum(parts) + shift``."""

    part_maxima: ClassVar[Mapping[str, float]]
    """The largest value of every part."""
    unscored: ClassVar[frozenset[str]] = frozenset({"scale", "shift"})
    """Fields that leave a joint reward the same fraction of its maximum."""

    scale: float = Field(1.0, gt=0)
    """Factor applied to the sum of the parts. 1: the rewards as documented."""
    shift: float = 0.0
    """Constant added to the scaled sum."""

    @property
    def maxima(self) -> Mapping[str, float]:
        return self.part_maxima

    def fraction(self, total: float) -> float:
        return (total - self.shift) / (self.scale * sum(self.maxima.values()))

    def scale_parts(self, parts: Mapping[str, float]) -> float:
        """Return the joint reward of these parts: their sum, scaled and shifted."""
        # Rounded once, so that parts with equal sums give equal totals, which are ties.
        return self.scale * math.fsum(parts.values()) + self.shift


class ProgramReward(ScaledReward):
    """A reward with a part for tests. ``program`` is the report of the program that all agents wrote together.

    Hidden tests run separately, in the report ``program_hidden``, so that feedback made from ``program`` reveals
    nothing of them.
    """

    refuse_forgeable: bool = True
    """Whether to count no test as passed if the tests ran in the program's own process, where it could have forged
    their results. A program can bring that about itself, so set this to false only for problems whose tests need
    it."""

    def passed(self, reports: Reports) -> bool:
        report = merge_hidden_report(reports, "program") if "program" in reports else None
        return report is not None and 0 < report.tests_total == self._count_passed(report)

    def _count_passed(self, report: ExecutionReport) -> int:
        assert all(case.status not in UNJUDGED for case in report.cases), "mask the turn, do not price it"
        refused = not report.compiles or (report.forgeable and self.refuse_forgeable)
        return 0 if refused else report.tests_passed

    def _passed_fraction(self, report: ExecutionReport) -> float:
        return self._count_passed(report) / report.tests_total if report.tests_total else 0.0


def make_executions(
    problem: Problem, name: str, source: str, watch: str = "", variant_of: str = ""
) -> dict[str, Execution]:
    """Make the executions of a program on the problem's tests and, as ``<name>_hidden``, on its hidden tests."""
    prompt, entry_point = problem.prompt, problem.entry_point
    test = make_trusted_test(prompt, entry_point, problem.test)
    wanted = {name: Execution(source, entry_point, test, watch, variant_of)}
    if problem.hidden_test:
        hidden = make_trusted_test(prompt, entry_point, problem.hidden_test)
        wanted[f"{name}_hidden"] = Execution(source, entry_point, hidden, variant_of=variant_of)
    return wanted


def program_compiles(reports: Reports) -> bool:
    """Whether the combined program ran and compiled, by its report: completions are compiled only in the sandbox."""
    return "program" in reports and reports["program"].compiles


def merge_hidden_report(reports: Reports, name: str) -> ExecutionReport:
    """Extend the report ``name``, such as ``program`` or ``program:helper2``, by the cases of its hidden tests."""
    stem, colon, role = name.partition(":")
    report, hidden = reports[name], reports.get(f"{stem}_hidden{colon}{role}")
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


def choose_program(names: Iterable[str], reports: Reports) -> str | None:
    """Choose the agents' program that passed the most tests, hidden ones included, the first on ties; None if none ran.

    The agents' programs are called ``program``, perhaps with a role as in ``program:helper2``; if none of ``names`` is,
    any may be one.
    """
    ran = [name for name in names if name in reports and not name.partition(":")[0].endswith("_hidden")]
    own = [name for name in ran if name.partition(":")[0] == "program"]
    return max(own or ran, key=lambda name: merge_hidden_report(reports, name).tests_passed, default=None)


def choose_report(reports: Reports) -> ExecutionReport | None:
    """The report of the program of :func:`choose_program`, hidden tests included; None if nothing ran."""
    chosen = choose_program(reports, reports)
    return None if chosen is None else merge_hidden_report(reports, chosen)


@lru_cache(maxsize=1024)
def make_trusted_test(prompt: str, entry_point: str, test: str) -> str:
    """Put the preamble of the prompt before the test, since some tests call functions that the prompt defines."""
    above = extract_preamble(prompt, entry_point)
    return join_modules([above, separate_futures(test)]) if above.source or above.futures else test
