"""The team environment: several helpers each propose a function, a main writes the entry point; all act at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from magrpo.envs.prompts import PROMPTS
from magrpo.plugins import Plugin
from magrpo.types import Message, Observation, PastTurn, Problem


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
        size = {"size": self.num_helpers + 1, "num_helpers": self.num_helpers}
        form = f"{PROMPTS['team']['team']} {PROMPTS['team'][kind]}"
        system = form.format(**size, number=number, entry_point=problem.entry_point)
        function = "aux" if kind == "helper" else problem.entry_point
        task = f"The problem:\n```python\n{problem.prompt.rstrip()}\n```\nWrite the function `{function}`."
        return Observation((Message("system", system), Message("user", task)))
