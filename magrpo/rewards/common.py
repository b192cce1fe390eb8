"""What the rewards of tested programs have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from magrpo.registry import Plugin
from magrpo.types import ExecutionReport


class ProgramReward(Plugin):
    """A reward with a part for tests; the report of the program that all agents made is named ``program``."""

    part_maxima: ClassVar[Mapping[str, float]]
    """The largest value of every part."""

    scale: float = 1.0
    """Factor on the sum of the parts."""
    shift: float = 0.0
    """Added to the scaled sum."""
    refuse_forgeable: bool = False
    """Count a report that did not go through the sandbox's trust split as no test passed."""

    @property
    def maxima(self) -> Mapping[str, float]:
        """The largest value of every part, ``scale`` and ``shift`` aside."""
        return self.part_maxima

    @property
    def max_total(self) -> float:
        """The largest joint reward, ``scale`` and ``shift`` included."""
        return self.scale * sum(self.part_maxima.values()) + self.shift

    def passed(self, reports: Mapping[str, ExecutionReport]) -> bool:
        """Whether the program ran and passed every test."""
        report = reports.get("program")
        return report is not None and 0 < report.tests_total == self._num_passed(report)

    def _num_passed(self, report: ExecutionReport) -> int:
        assert all(case.status != "infra_error" for case in report.cases), (
            "a failed sandbox has no price: mask the turn"
        )
        return 0 if report.forgeable and self.refuse_forgeable else report.tests_passed

    def _share_passed(self, report: ExecutionReport) -> float:
        return self._num_passed(report) / report.tests_total if report.tests_total else 0.0
