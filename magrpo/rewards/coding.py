"""The reward of two programmers who write one program: structure, syntax, tests, cooperation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from pydantic import Field

from magrpo.rewards.common import ProgramReward, executions_of, whole
from magrpo.rewards.program import Module, assemble, compiles, delegate, extract, preamble, returns_value
from magrpo.rewards.usage import only_forwards, use_of
from magrpo.types import Case, Execution, ExecutionReport, JointReward, Problem

HELPER = "aux"
"""Name of the function that the helper writes."""
MAXIMA: Mapping[str, float] = {"structure": 1.0, "syntax": 0.5, "tests": 1.0, "cooperation": 1.5}


@dataclass(frozen=True, slots=True)
class Program:
    """What the completions of one joint action make together, before anything runs."""

    source: str
    wrapper: str
    """The same program with main's body replaced by ``return aux(<its parameters>)``; empty without an entry point."""
    has_helper: bool
    has_entry: bool
    compiles: bool
    use: str
    """How main treats ``aux`` on the syntax tree: none, discarded or used."""
    only_forwards: bool


class CodingReward(ProgramReward):
    """Joint reward of ``helper`` (writes ``aux``) and ``main`` (writes the entry point), at most 4.0 before scaling.

    Reports are named ``program`` (the combined program) and ``wrapper`` (main's body replaced by a bare call of
    ``aux``, run only where the thin-wrapper rule needs it), those of hidden tests ``program_hidden`` and
    ``wrapper_hidden``. See ``docs/rewards.md`` for what each part demands.
    """

    part_maxima: ClassVar[Mapping[str, float]] = MAXIMA

    kind: str = "coding"
    local_weight: float = Field(0.0, ge=0)
    """Weight of a local part: what each agent gets beside the joint reward for its own share of ``structure`` alone."""

    @property
    def max_executions(self) -> int:
        """Programs of one joint action that run at most; the plan of a run counts with it."""
        return 2

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        """The combined program; then, if it passed a test and used ``aux``, its wrapper variant."""
        program = combine(problem.prompt, problem.entry_point, texts["helper"], texts["main"])
        if not (program.has_entry and program.compiles):
            return {}
        if "program" not in reports:
            return executions_of(problem, "program", program.source, watch=HELPER)
        undecided = not program.only_forwards and "wrapper" not in reports
        passed = self._num_passed(whole(reports, "program"))
        if undecided and passed and self._use(program, reports["program"]) == "used":
            return executions_of(problem, "wrapper", program.wrapper)
        return {}

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        """The joint reward with parts ``structure``, ``syntax``, ``tests``, ``cooperation``. ``texts`` by role."""
        assert all(report.status != "infra_error" for report in reports.values()), "mask the turn, do not price it"
        program = combine(problem.prompt, problem.entry_point, texts["helper"], texts["main"])
        parts = dict.fromkeys(MAXIMA, 0.0)
        own = {"helper": 0.4 if program.has_helper else 0.0, "main": 0.6 if program.has_entry else 0.0}
        parts["structure"] = own["helper"] + own["main"]
        if program.has_entry and program.compiles:
            parts["syntax"] = 0.5
            parts["tests"] = self._share_passed(whole(reports, "program"))
            parts["cooperation"] = self._cooperation(program, reports)
        weight = self.scale * self.local_weight
        local = {role: weight * value for role, value in own.items()} if self.local_weight else {}
        return JointReward(self._total(parts), parts, local)

    def _use(self, program: Program, report: ExecutionReport) -> str:
        """How main really treated ``aux``: none, discarded, used, or unknown.

        The run's claim that a result was used counts only where the syntax tree agrees. Its claim that none was used
        says nothing where calls ended in an exception, a timeout or a crash: there may have been no result to use.
        """
        if not program.has_helper or program.use == "none" or report.watched_calls == 0:
            return "none"
        if program.use == "used" and not report.watched_used:
            return "discarded" if all(case.status in ("pass", "wrong") for case in report.cases) else "unknown"
        return program.use

    def _cooperation(self, program: Program, reports: Mapping[str, ExecutionReport]) -> float:
        use = self._use(program, reports["program"])
        if use == "discarded":
            return -0.5
        if use != "used" or self._num_passed(whole(reports, "program")) == 0:
            return 0.0
        thin = program.only_forwards or all(
            _passes_unchanged(run.cases, reports[name.replace("program", "wrapper")].cases)
            for name, run in reports.items()
            if name.startswith("program")
        )
        return 0.5 if thin else 1.5


@lru_cache(maxsize=4096)
def combine(prompt: str, entry_point: str, helper: str, main: str) -> Program:
    """The problem's preamble, the helper's module and main's module as one program, and what its syntax tree tells."""
    main_module = extract(main, entry_point, prompt=prompt, drop=HELPER)
    modules = [preamble(prompt, entry_point), extract(helper, HELPER), main_module]
    source = assemble(modules)
    has_entry = returns_value(main_module.source, entry_point)
    forwarding = Module(main_module.futures, delegate(main_module.source, entry_point, HELPER)) if has_entry else None
    return Program(
        source=source,
        wrapper=assemble([*modules[:2], forwarding]) if forwarding else "",
        has_helper=returns_value(modules[1].source, HELPER),
        has_entry=has_entry,
        compiles=compiles(source),
        use=use_of(main_module.source, HELPER),
        only_forwards=has_entry and only_forwards(main_module.source, entry_point, HELPER),
    )


def _passes_unchanged(cases: tuple[Case, ...], variant: tuple[Case, ...]) -> bool:
    """Whether every case that passed in ``cases`` passes in ``variant`` too."""
    return all(
        i < len(variant) and variant[i].status == "pass" for i, case in enumerate(cases) if case.status == "pass"
    )
