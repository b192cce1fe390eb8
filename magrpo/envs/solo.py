"""One programmer who writes the whole program: the single-agent baseline, and with training GRPO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from magrpo.envs.diagnosis import Diagnosis, bare_feedback, full_feedback
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
    """A single role ``solo`` writes the entry point and whatever it needs.

    Feedback is read from the joint reward's part ``syntax`` and the execution report named ``program``, as the reward
    ``solo`` has them.
    """

    kind: str = "solo"
    num_turns: int = Field(1, ge=1)
    """Turns of one episode."""
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: the problem under the heading ``# main``, the embedded model's
    word for the function that the problem asks for."""
    feedback: Literal["level_feedback", "passed", "plain"] = "level_feedback"
    """What the agent learns between turns."""
    feedback_tests: Annotated[int, Field(ge=0)] | Literal["all"] = 3
    """How many failing tests ``level_feedback`` quotes. 0 keeps the tests of the reward out of the feedback."""

    def roles(self) -> tuple[str, ...]:
        """``solo``."""
        return ("solo",)

    def acting(self, turn: int) -> tuple[str, ...]:
        """``solo``, at every turn."""
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        """What the agent sees after ``history`` (empty: the first turn). Texts are keyed by agent."""
        assert role in self.roles(), role
        if self.prompt == "bare":
            return Observation((Message("user", self._bare(problem, history, agent)),))
        names = {"entry_point": problem.entry_point}
        messages = [
            Message("system", _SYSTEM.format(**names)),
            Message("user", _TASK.format(prompt=problem.prompt.rstrip("\n"), **names)),
        ]
        for turn in history:
            diagnosis = _diagnose(turn)
            limit = len(diagnosis.failures) if self.feedback_tests == "all" else self.feedback_tests
            feedback = full_feedback(self.feedback, diagnosis, "main", problem.entry_point, limit)
            messages.append(Message("assistant", turn.texts[agent]))
            messages.append(Message("user", f"{feedback}\n{_REVISE.format(**names)}"))
        return Observation(tuple(messages))

    def _bare(self, problem: Problem, history: Sequence[PastTurn], agent: str) -> str:
        task = f"# main\n{problem.prompt}"
        if not history:
            return task
        feedback = bare_feedback(self.feedback, _diagnose(history[-1]))
        return "\n".join([task, "# previous", history[-1].texts[agent], "# feedback", *feedback, ""])


def _diagnose(turn: PastTurn) -> Diagnosis:
    """As a joint action with nobody to cooperate with: whatever concerns a helper is in order and not talked about."""
    parts, report = turn.reward.parts, turn.reports.get("program")
    return Diagnosis(
        has_aux=True,
        has_entry=parts["structure"] > 0,
        compiles=parts["syntax"] > 0,
        passed=0 if report is None else report.tests_passed,
        total=0 if report is None else report.tests_total,
        failures=() if report is None else tuple(case for case in report.cases if case.status != "pass"),
        cooperation="unknown",
    )
