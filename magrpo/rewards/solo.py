"""The solo reward, for one programmer who writes the whole program: structure, syntax, tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

from magrpo.rewards.common import ProgramReward, make_executions, merge_hidden_report
from magrpo.rewards.program import can_compile, extract_module, extract_preamble, join_modules, returns_value
from magrpo.types import Execution, ExecutionReport, JointReward, Problem

MAXIMA: Mapping[str, float] = {"structure": 1.0, "syntax": 0.5, "tests": 1.0}


class SoloReward(ProgramReward):
    """Reward of ``solo``, who writes the entry point, at most 2.5 before scaling.

    The parts and the report ``program`` are those of the reward ``coding``, without cooperation.
    """

    max_executions: ClassVar[int] = 1
    """See :class:`magrpo.interfaces.HasMaxExecutions`."""

    part_maxima: ClassVar[Mapping[str, float]] = MAXIMA

    kind: str = "solo"

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        """The program, if it defines the entry point and compiles."""
        source, has_entry = make_program(problem.prompt, problem.entry_point, texts["solo"])
        if "program" in reports or not (has_entry and can_compile(source)):
            return {}
        return make_executions(problem, "program", source)

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        """The reward with parts ``structure``, ``syntax``, ``tests``. ``texts`` by role."""
        assert all(report.status != "infra_error" for report in reports.values()), "mask the turn, do not price it"
        source, has_entry = make_program(problem.prompt, problem.entry_point, texts["solo"])
        parts = dict.fromkeys(MAXIMA, 0.0) | {"structure": float(has_entry)}
        if has_entry and can_compile(source):
            parts["syntax"] = 0.5
            parts["tests"] = self._passed_fraction(merge_hidden_report(reports, "program"))
        return JointReward(self._scale_parts(parts), parts)


@lru_cache(maxsize=4096)
def make_program(prompt: str, entry_point: str, text: str) -> tuple[str, bool]:
    """Join the problem's preamble and the completion into one program; say whether it defines the entry point."""
    module = extract_module(text, entry_point, prompt=prompt)
    return join_modules([extract_preamble(prompt, entry_point), module]), returns_value(module.source, entry_point)
