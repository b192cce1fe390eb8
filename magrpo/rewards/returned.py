"""The reward ``returned``: a program (``env.kind = "program"``) prices its own episodes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from magrpo.plugins import Plugin, quote_value
from magrpo.types import Execution, ExecutionReport, JointReward, Problem

_FIELDS = {"reward", "parts", "local"}


class ReturnedReward(Plugin):
    """The joint reward is what the program returned: a number, or a dict with ``parts`` and ``local`` rewards."""

    kind: str = "returned"
    maxima: dict[str, float] = Field(default_factory=lambda: {"outcome": 1.0})
    """The parts of the reward with their largest values. A program that returns a number returns the only part."""

    def fraction(self, total: float) -> float:
        """A joint reward as a fraction of the largest one."""
        return total / sum(self.maxima.values())

    def passed(self, reports: Mapping[str, ExecutionReport]) -> None:
        """Return None: whether a problem is solved is part of what the program returns."""

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        """Request nothing."""
        return {}

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        """Never called."""
        raise TypeError("the program returns the rewards of its episodes")

    def read_returned(self, result: Any, agents: Sequence[str]) -> JointReward:
        """The joint reward in what a program returned: a number, or ``{"parts": {...}, "local": {agent: ...}}``.

        Raises ValueError, with what was expected, for anything else.
        """
        parts, local = result, {}
        if isinstance(result, Mapping) and result.keys() & _FIELDS:
            if unknown := sorted(result.keys() - _FIELDS):
                raise ValueError(
                    f"the program returned a dict with {', '.join(unknown)}; its keys are reward, parts, local"
                )
            parts, local = result.get("parts", result.get("reward")), result.get("local", {})
        if not isinstance(parts, Mapping):
            if len(self.maxima) > 1:
                raise ValueError(
                    f"the program returned {quote_value(result)}; reward.maxima has several parts: {self._names}"
                )
            parts = {next(iter(self.maxima)): parts}
        if parts.keys() != self.maxima.keys():
            raise ValueError(f"the program returned the parts {sorted(parts)}; reward.maxima has {self._names}")
        for name, value in parts.items():
            if not _is_number(value) or value > self.maxima[name]:
                raise ValueError(
                    f"the program returned {quote_value(value)} for {name!r}; it must be a finite number of at most "
                    f"{self.maxima[name]:g} (reward.maxima)"
                )
        if not isinstance(local, Mapping) or not all(map(_is_number, local.values())) or local.keys() - set(agents):
            raise ValueError(f"the program returned local = {quote_value(local)}; it must map agents to finite numbers")
        values = {name: float(parts[name]) for name in self.maxima}
        return JointReward(math.fsum(values.values()), values, {name: float(value) for name, value in local.items()})

    @property
    def _names(self) -> str:
        return ", ".join(self.maxima)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
