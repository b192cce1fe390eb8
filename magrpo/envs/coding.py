"""Two programmers who write one Python program without seeing each other's answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from magrpo.envs.diagnosis import Feedback, diagnose_turn, format_bare_feedback, format_feedback
from magrpo.envs.expert import Expert
from magrpo.plugins import Plugin
from magrpo.types import Message, Observation, PastTurn, Problem

_SYSTEM = {
    "helper": (
        "You are one of two programmers who solve a problem together. You write a helper function named `aux`; "
        "your partner writes the function that the problem asks for and may call `aux`. You both write at the same "
        "time and neither sees what the other writes, so choose the helper that your partner will expect: it takes "
        "the arguments of the problem's function and does a useful, self-contained part of the work.\n"
        "Answer with Python code only: the function `aux`, which must return a value, and the imports it needs. "
        "Do not write the problem's function, do not explain, do not print and do not read input."
    ),
    "main": (
        "You are one of two programmers who solve a problem together. Your partner writes a helper function named "
        "`aux`, which takes the arguments of the problem's function and does a useful, self-contained part of the "
        "work; you write the function that the problem asks for. Call `aux` and use what it returns, but do not "
        "leave all the work to it. You both write at the same time and neither sees what the other writes.\n"
        "Answer with Python code only: the function `{entry_point}`, with the signature given, which must return a "
        "value, and the imports it needs. Do not define `aux`, do not explain, do not print and do not read input."
    ),
}
_TASK = {
    "helper": "The problem:\n```python\n{prompt}\n```\nWrite the helper function `aux` for `{entry_point}`.",
    "main": "The problem:\n```python\n{prompt}\n```\nWrite the function `{entry_point}`. You may call `aux`.",
}
_REVISE = {
    "helper": "Revise your function `aux`. Answer with Python code only.",
    "main": "Revise your function `{entry_point}`. Answer with Python code only.",
}


class CodingEnv(Plugin):
    """A ``helper`` writes ``aux``, a ``main`` writes the entry point; both act at every turn.

    From the second turn on, an agent sees its own completion and feedback made from the joint reward's parts and the
    execution report ``program``. It sees its partner's completion only in feedback mode ``discussion``; in mode
    ``expert_edits`` the expert reads both completions and may quote them.
    """

    system: ClassVar[Mapping[str, str]] = _SYSTEM
    """System prompt of each role, used with ``prompt = "instruct"``."""

    kind: str = "coding"
    num_turns: int = Field(1, ge=1)
    """Turns of one episode."""
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: the problem under a one-word heading, for a tiny model."""
    feedback: Feedback = "level_feedback"
    """Feedback between turns. ``level_feedback``: diagnostics of each level; ``level_passed``: pass or fail of each
    level; ``passed``: one line; ``plain``: none; ``discussion``: the partner's last text; ``expert_edits``: the
    expert's proposals."""
    feedback_tests: Annotated[int, Field(ge=0)] | Literal["all"] = 3
    """Number of failing tests quoted by ``level_feedback`` and shown to the expert by ``expert_edits``. 0: feedback
    reveals none of the reward's tests."""
    expert: Expert | None = None
    """The model that proposes edits, required by ``feedback = "expert_edits"``. None: no expert."""

    @model_validator(mode="after")
    def _require_expert(self) -> CodingEnv:
        if self.feedback == "expert_edits" and self.expert is None:
            raise ValueError("feedback 'expert_edits' needs an expert: set env.expert.model and env.expert.base_url")
        if self.feedback == "expert_edits" and self.prompt == "bare":
            raise ValueError("feedback 'expert_edits' is free text, for prompt 'instruct' only: set env.prompt")
        return self

    def roles(self) -> tuple[str, ...]:
        return ("helper", "main")

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert role in self.roles(), role
        if self.prompt == "bare":
            return Observation((Message("user", self._render_bare(problem, role, history, agent)),))
        names = {"entry_point": problem.entry_point}
        messages = [
            Message("system", self.system[role].format(**names)),
            Message("user", _TASK[role].format(prompt=problem.prompt.rstrip("\n"), **names)),
        ]
        for turn in history:
            messages.append(Message("assistant", turn.texts[agent]))
            feedback = self._give_feedback(problem, role, turn, agent)
            lines = [feedback, *self._quote_partner(turn, agent, "```\n{text}\n```")]
            messages.append(Message("user", "\n".join([*filter(None, lines), _REVISE[role].format(**names)])))
        return Observation(tuple(messages))

    def _render_bare(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> str:
        task = f"# {role}\n{problem.prompt}"
        if not history:
            return task
        last = history[-1]
        lines = format_bare_feedback(self.feedback, diagnose_turn(last))
        lines += self._quote_partner(last, agent, "# partner\n{text}")
        return "\n".join([task, "# previous", last.texts[agent], "# feedback", *lines, ""])

    def _give_feedback(self, problem: Problem, role: str, turn: PastTurn, agent: str) -> str:
        diagnosis = diagnose_turn(turn)
        limit = len(diagnosis.failures) if self.feedback_tests == "all" else self.feedback_tests
        if self.expert is None or self.feedback != "expert_edits":
            return format_feedback(self.feedback, diagnosis, role, problem.entry_point, limit)
        (other,) = (text for name, text in turn.texts.items() if name != agent)
        helper, main = (turn.texts[agent], other)[:: 1 if role == "helper" else -1]
        edits = self.expert.propose_edits(
            prompt=problem.prompt,
            entry_point=problem.entry_point,
            function="aux" if role == "helper" else problem.entry_point,
            helper=helper,
            main=main,
            diagnosis=format_feedback("level_feedback", diagnosis, role, problem.entry_point, limit),
        )
        return f"A reviewer proposes:\n{edits}" if edits else "A reviewer proposes no edits."

    def _quote_partner(self, turn: PastTurn, agent: str, form: str) -> list[str]:
        if self.feedback != "discussion":
            return []
        texts = [form.format(text=text) for name, text in turn.texts.items() if name != agent]
        return texts if self.prompt == "bare" else ["Your partner wrote:", *texts]
