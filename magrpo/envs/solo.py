"""One programmer who writes the whole program: the single-agent baseline, and with training GRPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from magrpo.envs.diagnosis import diagnose_solo_turn, format_bare_feedback, format_feedback
from magrpo.plugins import Plugin
from magrpo.types import Message, Observation, PastTurn, Problem

_SYSTEM = (
    "You are a programmer. Answer with Python code only: the function `{entry_point}`, with the signature given, which "
    "must return a value, and the imports and helper functions it needs. Do not explain, do not print and do not read "
    "input."
)
_TASK = "The problem:\n```python\n{prompt}\n```\nWrite the function `{entry_point}`."
_REVISE = "Revise your function `{entry_point}`. Answer with Python code only."


class SoloEnv(Plugin):
    """The single role ``solo`` writes the entry point and everything it needs.

    Feedback is made from the reward's parts and the execution report ``program``, as the reward ``solo`` has them.
    """

    kind: str = "solo"
    num_turns: int = Field(1, ge=1)
    """Turns of one episode."""
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: the problem under the heading ``# main``, by which the
    embedded model knows the role that writes the entry point."""
    feedback: Literal["level_feedback", "passed", "plain"] = "level_feedback"
    """Feedback between turns. ``level_feedback``: diagnostics of each level; ``passed``: one line; ``plain``: none."""
    feedback_tests: Annotated[int, Field(ge=0)] | Literal["all"] = 3
    """Number of failing tests quoted by ``level_feedback``. 0: feedback reveals none of the reward's tests."""

    def roles(self) -> tuple[str, ...]:
        return ("solo",)

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert role in self.roles(), role
        if self.prompt == "bare":
            return Observation((Message("user", self._render_bare(problem, history, agent)),))
        names = {"entry_point": problem.entry_point}
        messages = [
            Message("system", _SYSTEM.format(**names)),
            Message("user", _TASK.format(prompt=problem.prompt.rstrip("\n"), **names)),
        ]
        for turn in history:
            diagnosis = diagnose_solo_turn(turn)
            limit = len(diagnosis.failures) if self.feedback_tests == "all" else self.feedback_tests
            feedback = format_feedback(self.feedback, diagnosis, "main", problem.entry_point, limit)
            messages.append(Message("assistant", turn.texts[agent]))
            messages.append(Message("user", f"{feedback}\n{_REVISE.format(**names)}"))
        return Observation(tuple(messages))

    def _render_bare(self, problem: Problem, history: Sequence[PastTurn], agent: str) -> str:
        task = f"# main\n{problem.prompt}"
        if not history:
            return task
        feedback = format_bare_feedback(self.feedback, diagnose_solo_turn(history[-1]))
        return "\n".join([task, "# previous", history[-1].texts[agent], "# feedback", *feedback, ""])
