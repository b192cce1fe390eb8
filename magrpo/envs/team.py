"""The team environment: several helpers each propose a function, a main writes the entry point; all act at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from magrpo.plugins import Plugin
from magrpo.types import Message, Observation, PastTurn, Problem

_TEAM = (
    "You are one of {size} programmers who solve a problem together. {num_helpers} of them, the helpers, each propose "
    "a helper function named `aux` that takes one argument and does a useful, self-contained part of the work; the "
    "last one writes the function that the problem asks for and calls `aux`. That function is tried with each proposal "
    "and the best one is taken. All write at the same time and none sees what the others write."
)
_ROLE = {
    "helper": (
        "You are helper {number}. The proposals should differ: helper 1 proposes the first step of the work, helper 2 "
        "the last one, others what else may be wanted.\n"
        "Answer with Python code only: the function `aux`, which must return a value, and the imports it needs. "
        "Do not write the problem's function, do not explain, do not print and do not read input."
    ),
    "main": (
        "You write the function `{entry_point}`. Call `aux` for the first or the last step, use what it returns and do "
        "the rest of the work yourself.\n"
        "Answer with Python code only: the function with the signature given, which must return a value, and the "
        "imports it needs. Do not define `aux`, do not explain, do not print and do not read input."
    ),
}


class TeamEnv(Plugin):
    """Roles ``helper1``, ``helper2``, ... propose a function ``aux``; ``main`` writes the entry point. One turn.

    All act at once and see only the problem. With ``prompt = "bare"`` all helpers get the same prompt: they differ by
    their weights.
    """

    num_turns: ClassVar[int] = 1

    kind: str = "team"
    num_helpers: int = Field(2, ge=1)
    """Number of helpers; ``reward.num_helpers`` must be equal."""
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: the problem under a one-word heading, for a tiny model."""

    def roles(self) -> tuple[str, ...]:
        return (*(f"helper{i}" for i in range(1, self.num_helpers + 1)), "main")

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert role in self.roles(), role
        assert not history, "a team acts once"
        kind, number = role.rstrip("0123456789"), role.removeprefix("helper")
        if self.prompt == "bare":
            return Observation((Message("user", f"# {kind}\n{problem.prompt}"),))
        system = f"{_TEAM} {_ROLE[kind]}".format(
            size=self.num_helpers + 1, num_helpers=self.num_helpers, number=number, entry_point=problem.entry_point
        )
        own = "aux" if kind == "helper" else problem.entry_point
        task = f"The problem:\n```python\n{problem.prompt.rstrip()}\n```\nWrite the function `{own}`."
        return Observation((Message("system", system), Message("user", task)))
