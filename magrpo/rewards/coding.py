"""The rewards of programmers who write one program: ``coding`` (two), ``solo`` (one), ``team`` (several helpers)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from pydantic import Field

from magrpo.errors import ConfigError
from magrpo.rewards.common import ProgramReward, make_executions, merge_hidden_report, program_compiles
from magrpo.rewards.program import (
    Module,
    can_be_called,
    extract_module,
    extract_preamble,
    join_modules,
    read_signature,
    returns_value,
)
from magrpo.rewards.stand_ins import (
    empty_result,
    first_argument,
    first_result,
    keep_attributes,
    module_of,
    unpacker,
    unreadable_result,
)
from magrpo.rewards.usage import (
    assigns_forwarding,
    classify_use,
    does_nothing,
    find_forwarding_call,
    packs_lists,
)
from magrpo.types import UNJUDGED, Execution, ExecutionReport, JointReward, Problem, Reports, RoleTexts

HELPER = "aux"
"""Name of the function that the helper writes."""
VARIANTS = ("wrapper", "identity", "constant", "empty")
"""Names of the reports of variants: programs in which one of the two functions does no work."""
UNREADABLE = "unreadable"
"""Name of the report of the variant in which nothing that ``aux`` returns or changes can be used."""
MAXIMA: Mapping[str, float] = {"structure": 1.0, "syntax": 0.5, "tests": 1.0, "cooperation": 1.5}
SOLO_MAXIMA: Mapping[str, float] = {"structure": 1.0, "syntax": 0.5, "tests": 1.0}


@dataclass(frozen=True, slots=True)
class JointProgram:
    """The program made of the completions of one joint action, and the verdicts on its syntax tree."""

    source: str
    variants: Mapping[str, str]
    """The variants by name of their report; empty unless both functions are there."""
    has_helper: bool
    has_entry: bool
    """Whether main defines the entry point as a function that returns a value."""
    runs: bool
    """Whether the program runs: main binds the entry point, as such a function or in another way."""
    use: str
    """How main uses ``aux`` by the syntax tree: none, dropped or used."""
    is_thin: bool
    """Whether the syntax tree shows that one function does no work: ``aux`` does none, or main is ``partial(aux)``."""

    @property
    def may_call_helper(self) -> bool:
        """Whether there is ``aux``, and main calls it by the syntax tree."""
        return self.has_helper and self.use != "none"


class CodingReward(ProgramReward):
    """Joint reward of ``helper`` (writes ``aux``) and ``main`` (writes the entry point), at most 4.0 before scaling.

    The report ``program`` belongs to the combined program. If main holds a call of ``aux``, it runs once more as
    ``unreadable``, in which nothing that ``aux`` returns or changes can be used. If it would earn the full bonus, its
    variants run too: first ``wrapper`` (main only calls ``aux``), then, unless that does as well, ``identity`` (``aux``
    returns its argument), ``constant`` (``aux`` always returns its first result) and ``empty`` (``aux`` always returns
    its result for an argument that no test has). Reports of hidden tests end in ``_hidden``. See ``docs/rewards.md``.
    """

    part_maxima: ClassVar[Mapping[str, float]] = MAXIMA
    unscored: ClassVar[frozenset[str]] = ProgramReward.unscored | {"local_weight"}

    kind: str = "coding"
    local_weight: float = Field(0.0, ge=0)
    """Weight of the local reward: each agent also earns its own share of ``structure``, times this weight. 0: off."""

    @property
    def max_executions(self) -> int:
        """See :class:`magrpo.interfaces.HasMaxExecutions`."""
        return 2 + len(VARIANTS)

    @property
    def priced_roles(self) -> tuple[str, ...]:
        """See :class:`magrpo.interfaces.PricesRoles`."""
        return ("helper", "main")

    def executions(self, problem: Problem, texts: RoleTexts, reports: Reports) -> Mapping[str, Execution]:
        """Request the program and ``unreadable``, then the other variants if it passed a test and used ``aux``."""
        program = combine_completions(problem.prompt, problem.entry_point, texts["helper"], texts["main"])
        if not program.runs:
            return {}

        def request_variant(name: str) -> dict[str, Execution]:
            return make_executions(problem, name, program.variants[name], variant_of=program.source)

        if "program" not in reports:
            wanted = make_executions(problem, "program", program.source, watch=HELPER)
            # Nearly every main that holds a call of ``aux`` calls it: to wait for the report would only cost time.
            return wanted | (request_variant(UNREADABLE) if program.may_call_helper else {})
        passed = self._count_passed(merge_hidden_report(reports, "program"))
        if program.is_thin or not passed or self._judge_use(program, reports) != "used":
            return {}
        if "wrapper" not in reports:
            return request_variant("wrapper")
        if _does_as_well("wrapper", reports):
            return {}
        most_passed = max(report.tests_passed for name, report in reports.items() if name.startswith("program"))
        wanted = {}
        for name in VARIANTS:
            # A helper that always returns its first result still passes the first test of a run.
            if name not in reports and (name != "constant" or most_passed > 1):
                wanted |= request_variant(name)
        return wanted

    def price(self, problem: Problem, texts: RoleTexts, reports: Reports) -> JointReward:
        """Price the parts ``structure``, ``syntax``, ``tests`` and ``cooperation``. ``texts`` is keyed by role."""
        assert all(report.status not in UNJUDGED for report in reports.values()), "mask the turn, do not price it"
        program = combine_completions(problem.prompt, problem.entry_point, texts["helper"], texts["main"])
        structure_by_role = {
            "helper": 0.4 if program.has_helper else 0.0,
            "main": 0.6 if program.has_entry else 0.0,
        }
        parts = dict.fromkeys(MAXIMA, 0.0) | {"structure": sum(structure_by_role.values())}
        if program.runs and program_compiles(reports):
            parts["syntax"] = 0.5
            parts["tests"] = self._passed_fraction(merge_hidden_report(reports, "program"))
            parts["cooperation"] = self._price_cooperation(program, reports)
        local: dict[str, float] = {}
        if self.local_weight:
            weight = self.scale * self.local_weight
            local = {role: weight * value for role, value in structure_by_role.items()}
        return JointReward(self.scale_parts(parts), parts, local)

    def _judge_use(self, program: JointProgram, reports: Reports) -> str:
        """How main used ``aux`` in the run: none, discarded, used or unknown.

        That the variant ``unreadable`` runs alike says nothing of results that main reads if a case ended in an
        exception, a timeout or a crash: there may have been no result to use.
        """
        if not _calls_helper(program, reports):
            return "none"
        if not _runs_alike(UNREADABLE, reports):
            return "used"
        is_judged = all(case.status in ("pass", "wrong") for case in reports["program"].cases)
        return "discarded" if is_judged or program.use == "dropped" else "unknown"

    def _price_cooperation(self, program: JointProgram, reports: Reports) -> float:
        use = self._judge_use(program, reports)
        if use == "discarded":
            return -0.5
        if use != "used" or self._count_passed(merge_hidden_report(reports, "program")) == 0:
            return 0.0
        thin = program.is_thin or any(_does_as_well(name, reports) for name in VARIANTS if name in reports)
        return 0.5 if thin else 1.5


class SoloReward(ProgramReward):
    """Reward of ``solo``, who writes the entry point, at most 2.5 before scaling.

    The parts and the report ``program`` are those of the reward ``coding``, without cooperation.
    """

    max_executions: ClassVar[int] = 1
    """See :class:`magrpo.interfaces.HasMaxExecutions`."""

    priced_roles: ClassVar[tuple[str, ...]] = ("solo",)
    """See :class:`magrpo.interfaces.PricesRoles`."""
    part_maxima: ClassVar[Mapping[str, float]] = SOLO_MAXIMA

    kind: str = "solo"

    def executions(self, problem: Problem, texts: RoleTexts, reports: Reports) -> Mapping[str, Execution]:
        """Request the program, if it binds the entry point."""
        source, _, runs = make_solo_program(problem.prompt, problem.entry_point, texts["solo"])
        if "program" in reports or not runs:
            return {}
        return make_executions(problem, "program", source)

    def price(self, problem: Problem, texts: RoleTexts, reports: Reports) -> JointReward:
        """Price the parts ``structure``, ``syntax`` and ``tests``. ``texts`` is keyed by role."""
        assert all(report.status not in UNJUDGED for report in reports.values()), "mask the turn, do not price it"
        _, has_entry, runs = make_solo_program(problem.prompt, problem.entry_point, texts["solo"])
        parts = dict.fromkeys(SOLO_MAXIMA, 0.0) | {"structure": float(has_entry)}
        if runs and program_compiles(reports):
            parts["syntax"] = 0.5
            parts["tests"] = self._passed_fraction(merge_hidden_report(reports, "program"))
        return JointReward(self.scale_parts(parts), parts)


class TeamReward(CodingReward):
    """The largest coding reward of ``main`` paired with one of ``helper1``, ``helper2``, ...; the first on ties.

    The team thus gains from proposals that differ, so that one of them fits main. The name of a report ends in the role
    of its helper, as in ``program:helper2``.
    """

    kind: str = "team"
    num_helpers: int = Field(2, ge=1, le=100)
    """Number of helpers; must equal ``env.num_helpers``."""

    @property
    def max_executions(self) -> int:
        return self.num_helpers * super().max_executions

    @property
    def priced_roles(self) -> tuple[str, ...]:
        return (*(f"helper{i}" for i in range(1, self.num_helpers + 1)), "main")

    def passed(self, reports: Reports) -> bool:
        """Whether the program with any of the proposals passed every test."""
        return any(super(TeamReward, self).passed(own) for _, own in self._reports_by_helper(reports))

    def executions(self, problem: Problem, texts: RoleTexts, reports: Reports) -> Mapping[str, Execution]:
        """Request the executions that the coding reward needs for each pair.

        Raises:
            ConfigError: the environment has another number of helpers.
        """
        given = sum(role != "main" for role in texts)
        if given != self.num_helpers:
            raise ConfigError(f"reward.num_helpers = {self.num_helpers}, but env has {given} helpers; make them equal")
        wanted: dict[str, Execution] = {}
        for role, own in self._reports_by_helper(reports):
            executions = super().executions(problem, _pair(texts, role), own)
            wanted |= {f"{name}:{role}": execution for name, execution in executions.items()}
        return wanted

    def price(self, problem: Problem, texts: RoleTexts, reports: Reports) -> JointReward:
        """Price the best pair, with the parts of the coding reward. ``texts`` is keyed by role."""
        prices = {
            role: super(TeamReward, self).price(problem, _pair(texts, role), own)
            for role, own in self._reports_by_helper(reports)
        }
        best = max(prices.values(), key=lambda price: price.total)
        local = {role: price.local["helper"] for role, price in prices.items() if price.local}
        return replace(best, local=local | {role: value for role, value in best.local.items() if role == "main"})

    def _reports_by_helper(self, reports: Reports) -> Iterator[tuple[str, Reports]]:
        """The role of each helper with its own reports, under the names that the coding reward uses."""
        for i in range(1, self.num_helpers + 1):
            role = f"helper{i}"
            yield role, {name.removesuffix(f":{role}"): r for name, r in reports.items() if name.endswith(f":{role}")}


@lru_cache(maxsize=4096)
def combine_completions(prompt: str, entry_point: str, helper: str, main: str) -> JointProgram:
    """Join the preamble of the problem and the modules of helper and main, and judge the program by its syntax tree."""
    main_module = extract_module(main, entry_point, prompt=prompt, drop=HELPER)
    modules = [extract_preamble(prompt, entry_point), extract_module(helper, HELPER), main_module]
    source = join_modules(modules)
    helper_module = modules[1].source
    has_helper = returns_value(helper_module, HELPER)
    has_entry = returns_value(main_module.source, entry_point)
    runs = can_be_called(main_module.source, entry_point)
    only_main_works = has_helper and does_nothing(helper_module, HELPER)
    only_helper_works = runs and assigns_forwarding(main_module.source, entry_point, HELPER)
    use = classify_use(main_module.source, HELPER, "" if has_entry else entry_point)
    return JointProgram(
        source=source,
        variants=_make_variants(modules, entry_point, use == "used") if has_helper and runs else {},
        has_helper=has_helper,
        has_entry=has_entry,
        runs=runs,
        use=use,
        is_thin=only_main_works or only_helper_works,
    )


@lru_cache(maxsize=4096)
def make_solo_program(prompt: str, entry_point: str, text: str) -> tuple[str, bool, bool]:
    """Join preamble and completion into one program; returns it, and whether it defines and binds the entry point."""
    module = extract_module(text, entry_point, prompt=prompt)
    source = join_modules([extract_preamble(prompt, entry_point), module])
    return source, returns_value(module.source, entry_point), can_be_called(module.source, entry_point)


def _make_variants(modules: Sequence[Module], entry_point: str, reads: bool) -> dict[str, str]:
    """Make the variant in which main only calls ``aux`` and unpacks its result, and those with a stand-in for it.

    ``reads``: whether main uses the results of ``aux`` by its syntax tree.
    """
    above, helper, main = modules
    head, arguments = read_signature(main.source, entry_point)
    call = find_forwarding_call(main.source, entry_point, HELPER) or f"{HELPER}({arguments})"
    unpack = f"__keep__, __unpack__ = unpacker({entry_point}, {packs_lists(helper.source, HELPER)})"
    forward = Module((), f"{head}\n    return __unpack__(__keep__({arguments}), {call})")
    variants = {"wrapper": join_modules([*modules, module_of(unpack, unpacker), forward])}
    for name, stand_in, given in (
        (UNREADABLE, unreadable_result, f"{HELPER}, {reads}"),
        ("identity", first_argument, HELPER),
        ("constant", first_result, HELPER),
        ("empty", empty_result, HELPER),
    ):
        rebinding = f"{HELPER} = keep_attributes({stand_in.__name__}({given}), {HELPER})"
        replacement = module_of(rebinding, stand_in, keep_attributes)
        variants[name] = join_modules([above, helper, replacement, main])
    return variants


def _calls_helper(program: JointProgram, reports: Reports) -> bool:
    """Whether ``aux`` was called, by the run and by the syntax tree."""
    return program.may_call_helper and reports["program"].watched_calls > 0


def _runs_alike(variant: str, reports: Reports) -> bool:
    """Whether the variant and the combined program have the same cases, with the same messages, in all tests."""
    return all(report.cases == other.cases for report, other in _pair_reports(variant, reports))


def _does_as_well(variant: str, reports: Reports) -> bool:
    """Whether the variant passes every test, hidden ones included, that the combined program passes."""
    return all(_list_passed(report) <= _list_passed(other) for report, other in _pair_reports(variant, reports))


def _pair_reports(variant: str, reports: Reports) -> list[tuple[ExecutionReport, ExecutionReport]]:
    """The reports of the combined program, each with that of the variant on the same tests."""
    names = [name for name in reports if name.startswith("program")]
    return [(reports[name], reports[name.replace("program", variant)]) for name in names]


def _list_passed(report: ExecutionReport) -> set[int]:
    """The numbers of the cases that passed."""
    return {i for i, case in enumerate(report.cases) if case.status == "pass"}


def _pair(texts: RoleTexts, role: str) -> RoleTexts:
    return {"helper": texts[role], "main": texts["main"]}
