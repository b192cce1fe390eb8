"""The reward ``returned``: a program (``env.kind = "program"``) prices its own episodes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from magrpo.checks.rewards import LARGEST_REWARD
from magrpo.errors import quote_value
from magrpo.plugins import Plugin
from magrpo.types import Execution, JointReward, Problem, Reports, RoleTexts

_FIELDS = {"reward", "parts", "local"}


class ReturnedReward(Plugin):
    """The joint reward is what the program returned: a number, or a dict with ``parts`` and ``local`` rewards."""

    kind: str = "returned"
    maxima: dict[str, float] = Field(default_factory=lambda: {"outcome": 1.0})
    """The parts of the reward with their largest values. A program that returns a number returns the only part."""

    def fraction(self, total: float) -> float:
        """A joint reward as a fraction of the largest one."""
        return total / sum(self.maxima.values())

    def passed(self, reports: Reports) -> None:
        """Return None: whether a problem is solved is part of what the program returns."""

    def executions(self, problem: Problem, texts: RoleTexts, reports: Reports) -> Mapping[str, Execution]:
        """Request nothing."""
        return {}

    def price(self, problem: Problem, texts: RoleTexts, reports: Reports) -> JointReward:
        """Never called."""
        raise TypeError("the program returns the rewards of its episodes")

    def read_returned(self, result: Any, agents: Sequence[str]) -> JointReward:
        """Read the joint reward that a program returned: a number, or ``{"parts": {...}, "local": {agent: ...}}``.

        Raises ValueError for anything else; the message says which values are allowed.
        """
        fields = result if isinstance(result, Mapping) and result.keys() & _FIELDS else {"reward": result}
        if unknown := sorted(fields.keys() - _FIELDS):
            raise ValueError(
                f"the program returned a dict with {', '.join(unknown)}; its keys are reward, parts, local"
            )
        if {"reward", "parts"} <= fields.keys():
            raise ValueError(
                "the program returned both reward and parts; return one of them: the reward is the sum of the parts"
            )
        parts = self._read_parts(fields.get("parts", fields.get("reward")))
        local = fields.get("local", {})
        if not isinstance(local, Mapping) or not all(map(_is_number, local.values())) or local.keys() - set(agents):
            raise ValueError(
                f"the program returned local = {quote_value(local)}; it must map agents to finite numbers "
                f"of at most {LARGEST_REWARD:g}"
            )
        return JointReward(math.fsum(parts.values()), parts, {name: float(value) for name, value in local.items()})

    def _read_parts(self, returned: Any) -> dict[str, float]:
        """The parts of the reward, in the order of ``maxima``; a number is the only part."""
        if not isinstance(returned, Mapping):
            if len(self.maxima) > 1:
                raise ValueError(
                    f"the program returned {quote_value(returned)}; reward.maxima has several parts: {self._names}"
                )
            returned = dict.fromkeys(self.maxima, returned)
        if returned.keys() != self.maxima.keys():
            raise ValueError(f"the program returned the parts {sorted(returned)}; reward.maxima has {self._names}")
        for name, maximum in self.maxima.items():
            if not _is_number(returned[name]) or returned[name] > maximum:
                raise ValueError(
                    f"the program returned {quote_value(returned[name])} for {name!r}; it must be a finite number of "
                    f"at most {maximum:g} (reward.maxima) and at least {-LARGEST_REWARD:g}"
                )
        return {name: float(returned[name]) for name in self.maxima}

    @property
    def _names(self) -> str:
        return ", ".join(self.maxima)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST_REWARD  # NaN compares false
