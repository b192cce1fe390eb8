"""Plug-ins with mistakes, as users make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from magrpo.plugins import Plugin
from magrpo.types import PastTurn, Problem
from tests.fakes import LengthEnv, PassReward


class NamedReturn(Plugin, PassReward):
    """A reward whose part would replace the return of every evaluation."""

    maxima: ClassVar[Mapping[str, float]] = {"return": 1.0}


class Absent(Plugin, PassReward):
    """A reward that forgets to return its price."""

    kind: str = "absent"

    def executions(self, *_: object) -> dict[str, Any]:
        return {}

    def price(self, *_: object) -> Any:
        return None


class LateMistake(Plugin, PassReward):
    """A reward that works until a program fails."""

    def price(self, problem: Problem, *arguments: Any) -> Any:
        price = super().price(problem, *arguments)
        return price if price.total else 1 / 0


class Letters(Plugin, LengthEnv):
    """An environment whose only role lacks the comma of a tuple."""

    num_turns: int = 1

    def roles(self) -> Any:
        return "main"


class Broken(Plugin, LengthEnv):
    """An environment that cannot list its roles."""

    num_turns: int = 1

    def roles(self) -> Any:
        return 1 / 0


class Silent(Plugin, LengthEnv):
    """An environment that returns a text instead of an observation."""

    num_turns: int = 1

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Any:
        return problem.prompt
