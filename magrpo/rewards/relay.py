"""The reward ``relay``: functions that different agents wrote are applied one after another."""

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

from magrpo.rewards.common import ProgramReward, make_executions, merge_hidden_report
from magrpo.rewards.program import can_be_called, extract_module, join_modules
from magrpo.types import UNJUDGED, Execution, JointReward, Problem, Reports, RoleTexts

FUNCTION = "aux"
"""Name of the function that every agent writes."""
_ORDER = ("first", "second", "solo")
_LOAD = f"""\
def load_part(source):
    scope = {{"__name__": "part"}}
    exec(source, scope)
    return scope["{FUNCTION}"]
"""


class RelayReward(ProgramReward):
    """The share of tests that pass if the value goes through the function of each agent in turn, at most 1."""

    part_maxima: ClassVar[Mapping[str, float]] = {"tests": 1.0}
    max_executions: ClassVar[int] = 1
    """See :class:`magrpo.interfaces.HasMaxExecutions`."""

    kind: str = "relay"

    @property
    def priced_roles(self) -> tuple[str, ...]:
        """See :class:`magrpo.interfaces.PricesRoles`."""
        return ("solo",) if self.kind == "relay_solo" else ("first", "second")

    def executions(self, problem: Problem, texts: RoleTexts, reports: Reports) -> Mapping[str, Execution]:
        """Request the program, if every agent wrote its function."""
        source = chain_functions(problem.entry_point, tuple(texts[role] for role in _ORDER if role in texts))
        if "program" in reports or not source:
            return {}
        return make_executions(problem, "program", source)

    def price(self, problem: Problem, texts: RoleTexts, reports: Reports) -> JointReward:
        """Price the part ``tests``."""
        assert all(report.status not in UNJUDGED for report in reports.values()), "mask the turn, do not price it"
        passed = self._passed_fraction(merge_hidden_report(reports, "program")) if reports else 0.0
        parts = {"tests": passed}
        return JointReward(self.scale_parts(parts), parts)


@lru_cache(maxsize=4096)
def chain_functions(entry_point: str, texts: tuple[str, ...]) -> str:
    """Write the program that applies the functions of ``texts``; empty if one of them defines none.

    Each text has a namespace of its own, because all functions have the same name.
    """
    sources = [join_modules([extract_module(text, FUNCTION)]) for text in texts]
    if not all(can_be_called(source, FUNCTION) for source in sources):
        return ""
    parts = "\n".join(f"    load_part({source!r})," for source in sources)
    return f"""{_LOAD}

PARTS = [
{parts}
]


def {entry_point}(value):
    for part in PARTS:
        value = part(value)
    return value
"""
