"""The reward of two programmers who write one program: structure, syntax, tests, cooperation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from pydantic import Field

from magrpo.rewards.common import ProgramReward, make_executions, merge_hidden_report
from magrpo.rewards.program import (
    Module,
    can_compile,
    extract_module,
    extract_preamble,
    join_modules,
    read_signature,
    returns_value,
)
from magrpo.rewards.stand_ins import first_argument, first_result, module_of, unpacker
from magrpo.rewards.usage import carrying_call, classify_use, does_nothing, only_forwards, packs_lists
from magrpo.types import Case, Execution, ExecutionReport, JointReward, Problem

HELPER = "aux"
"""Name of the function that the helper writes."""
VARIANTS = ("wrapper", "identity", "constant")
"""Names of the reports of programs in which one of the two functions does nothing."""
MAXIMA: Mapping[str, float] = {"structure": 1.0, "syntax": 0.5, "tests": 1.0, "cooperation": 1.5}


@dataclass(frozen=True, slots=True)
class JointProgram:
    """What the completions of one joint action make together, before anything runs."""

    source: str
    variants: Mapping[str, str]
    """Programs in which one of the two does nothing, by the name of their report; empty without both functions."""
    has_helper: bool
    has_entry: bool
    compiles: bool
    use: str
    """How main treats ``aux`` on the syntax tree: none, discarded or used."""
    is_thin: bool
    """Whether the syntax tree shows that one of the two does nothing: ``main`` only forwards, or ``aux`` hands back."""


class CodingReward(ProgramReward):
    """Joint reward of ``helper`` (writes ``aux``) and ``main`` (writes the entry point), at most 4.0 before scaling.

    Reports are named ``program`` (the combined program) and, where the whole bonus would be paid otherwise,
    ``wrapper`` (main only calls ``aux``), ``identity`` (``aux`` returns its argument) and ``constant`` (``aux`` returns
    for ever what it returned first); those of hidden tests have ``_hidden`` added. See ``docs/rewards.md`` for what
    each part demands.
    """

    part_maxima: ClassVar[Mapping[str, float]] = MAXIMA

    kind: str = "coding"
    local_weight: float = Field(0.0, ge=0)
    """Weight of a local part: what each agent gets beside the joint reward for its own share of ``structure`` alone."""

    @property
    def max_executions(self) -> int:
        """Programs of one joint action that run at most; the plan of a run counts with it."""
        return 1 + len(VARIANTS)

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        """The combined program; then, if it passed a test and used ``aux``, its variants, all at once."""
        program = combine_completions(problem.prompt, problem.entry_point, texts["helper"], texts["main"])
        if not (program.has_entry and program.compiles):
            return {}
        if "program" not in reports:
            return make_executions(problem, "program", program.source, watch=HELPER)
        passed = self._num_passed(merge_hidden_report(reports, "program"))
        if program.is_thin or not passed or self._use(program, reports["program"]) != "used":
            return {}
        wanted: dict[str, Execution] = {}
        for name, source in program.variants.items():
            if name not in reports and (name != "constant" or _tells_a_constant(reports)):
                wanted |= make_executions(problem, name, source)
        return wanted

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        """The joint reward with parts ``structure``, ``syntax``, ``tests``, ``cooperation``. ``texts`` by role."""
        assert all(report.status != "infra_error" for report in reports.values()), "mask the turn, do not price it"
        program = combine_completions(problem.prompt, problem.entry_point, texts["helper"], texts["main"])
        parts = dict.fromkeys(MAXIMA, 0.0)
        own = {"helper": 0.4 if program.has_helper else 0.0, "main": 0.6 if program.has_entry else 0.0}
        parts["structure"] = own["helper"] + own["main"]
        if program.has_entry and program.compiles:
            parts["syntax"] = 0.5
            parts["tests"] = self._share_passed(merge_hidden_report(reports, "program"))
            parts["cooperation"] = self._cooperation(program, reports)
        weight = self.scale * self.local_weight
        local = {role: weight * value for role, value in own.items()} if self.local_weight else {}
        return JointReward(self._total(parts), parts, local)

    def _use(self, program: JointProgram, report: ExecutionReport) -> str:
        """How main really treated ``aux``: none, discarded, used, or unknown.

        The run's claim that a result was used counts only where the syntax tree agrees. Its claim that none was used
        says nothing where calls ended in an exception, a timeout or a crash: there may have been no result to use.
        """
        if not program.has_helper or program.use == "none" or report.watched_calls == 0:
            return "none"
        if program.use == "used" and not report.watched_used:
            return "discarded" if all(case.status in ("pass", "wrong") for case in report.cases) else "unknown"
        return program.use

    def _cooperation(self, program: JointProgram, reports: Mapping[str, ExecutionReport]) -> float:
        use = self._use(program, reports["program"])
        if use == "discarded":
            return -0.5
        if use != "used" or self._num_passed(merge_hidden_report(reports, "program")) == 0:
            return 0.0
        thin = program.is_thin or any(_does_as_well(name, reports) for name in program.variants if name in reports)
        return 0.5 if thin else 1.5


@lru_cache(maxsize=4096)
def combine_completions(prompt: str, entry_point: str, helper: str, main: str) -> JointProgram:
    """The problem's preamble, the helper's module and main's module as one program, and what its syntax tree tells."""
    main_module = extract_module(main, entry_point, prompt=prompt, drop=HELPER)
    modules = [extract_preamble(prompt, entry_point), extract_module(helper, HELPER), main_module]
    source = join_modules(modules)
    has_helper, has_entry = returns_value(modules[1].source, HELPER), returns_value(main_module.source, entry_point)
    return JointProgram(
        source=source,
        variants=_variants(modules, entry_point) if has_helper and has_entry else {},
        has_helper=has_helper,
        has_entry=has_entry,
        compiles=can_compile(source),
        use=classify_use(main_module.source, HELPER),
        is_thin=(has_entry and only_forwards(main_module.source, entry_point, HELPER))
        or (has_helper and does_nothing(modules[1].source, HELPER)),
    )


def _variants(modules: Sequence[Module], entry_point: str) -> dict[str, str]:
    """The program in which main only calls ``aux`` and unpacks the result, and those with a stand-in for ``aux``."""
    above, helper, main = modules
    head, arguments = read_signature(main.source, entry_point)
    call = carrying_call(main.source, entry_point, HELPER) or f"{HELPER}({arguments})"
    unpack = f"__keep__, __unpack__ = unpacker({entry_point}, {packs_lists(helper.source, HELPER)})"
    forward = Module((), f"{head}\n    return __unpack__(__keep__({arguments}), {call})")
    variants = {"wrapper": join_modules([*modules, module_of(unpacker, unpack), forward])}
    for name, stand_in in (("identity", first_argument), ("constant", first_result)):
        replace = module_of(stand_in, f"{HELPER} = {stand_in.__name__}({HELPER})")
        variants[name] = join_modules([above, helper, replace, main])
    assert tuple(variants) == VARIANTS
    return variants


def _runs(reports: Mapping[str, ExecutionReport]) -> dict[str, ExecutionReport]:
    """The reports of the whole program, by what their names end in: nothing, or ``_hidden``."""
    return {name.removeprefix("program"): run for name, run in reports.items() if name.startswith("program")}


def _tells_a_constant(reports: Mapping[str, ExecutionReport]) -> bool:
    """Whether a run passed two tests: with its first result for ever, a helper still answers the first test."""
    return any(run.tests_passed > 1 for run in _runs(reports).values())


def _does_as_well(variant: str, reports: Mapping[str, ExecutionReport]) -> bool:
    """Whether the variant passes every test that the whole program passes."""
    return all(_passes_unchanged(run.cases, reports[variant + end].cases) for end, run in _runs(reports).items())


def _passes_unchanged(cases: tuple[Case, ...], variant: tuple[Case, ...]) -> bool:
    """Whether every case that passed in ``cases`` passes in ``variant`` too."""
    return all(
        i < len(variant) and variant[i].status == "pass" for i, case in enumerate(cases) if case.status == "pass"
    )
