"""The sequential environment: a helper and a main take turns; main sees the helper's code before writing its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field

from magrpo.envs.coding import CodingEnv
from magrpo.types import Message, Observation, PastTurn, Problem

_SYSTEM = {
    "helper": (
        "You are one of two programmers who solve a problem together, one after the other. You begin: plan how to "
        "divide the work and write a helper function named `aux` that does a useful, self-contained part of it. Your "
        "partner reads your function, then writes the function that the problem asks for and calls `aux`.\n"
        "Answer with Python code only: the function `aux`, which must return a value, and the imports it needs. "
        "Do not write the problem's function, do not explain, do not print and do not read input."
    ),
    "main": (
        "You are one of two programmers who solve a problem together, one after the other. Your partner has written a "
        "helper function named `aux`; you read it and write the function that the problem asks for. Call `aux` and "
        "use what it returns, but do not leave all the work to it.\n"
        "Answer with Python code only: the function `{entry_point}`, with the signature given, which must return a "
        "value, and the imports it needs. Do not define `aux`, do not explain, do not print and do not read input."
    ),
}


class SequentialEnv(CodingEnv):
    """``helper`` acts at even turns (from 0), ``main`` at odd ones; two turns are a round.

    ``main`` sees the helper's latest code, ``helper`` only its own. From the second round on, both get feedback on the
    program of the previous round. Each of the helper's ``G`` completions is followed by one completion of ``main``, or
    by ``G`` with ``rollout.tree = "full"``.
    """

    system: ClassVar[Mapping[str, str]] = _SYSTEM

    kind: str = "sequential"
    num_turns: int = Field(2, ge=2, multiple_of=2)
    """Turns of one episode; two turns are a round."""

    def acting(self, turn: int) -> tuple[str, ...]:
        return (self.roles()[turn % 2],)

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert (role,) == self.acting(len(history)), role
        halves = zip(history[::2], history[1::2], strict=False)
        rounds = [PastTurn(first.texts | second.texts, second.reward, second.reports) for first, second in halves]
        seen = super().observe(problem, role, rounds, agent)
        if role == "helper":
            return seen
        (code,) = history[-1].texts.values()
        *before, last = seen.messages
        if self.prompt == "bare":
            content = f"# partner\n{code}\n{last.content}"
        else:
            content = f"{last.content}\nYour partner wrote:\n```python\n{code}\n```"
        return Observation((*before, Message(last.role, content)))
