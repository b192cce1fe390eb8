"""Environments of programmers: a helper and a main who act at once or in turn, a single programmer, or a team."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from magrpo.envs.diagnosis import Feedback, diagnose_turn, format_bare_feedback, format_feedback, word_feedback
from magrpo.envs.prompts import PROMPTS
from magrpo.envs.rounds import merge_rounds
from magrpo.plugins import Plugin
from magrpo.python_source import parse_python
from magrpo.text import fence_text
from magrpo.types import Message, Observation, PastTurn, Problem


class ProgramEnv(Plugin):
    """Base class: every agent writes a part of one program and, from the second turn on, gets feedback on it.

    Feedback is made from the parts of the joint reward and the execution report ``program``.
    """

    system: ClassVar[Mapping[str, str]]
    """System prompt of each role, used with ``prompt = "instruct"``."""
    task: ClassVar[Mapping[str, str]] = PROMPTS["program"]
    """What each role is asked at the first turn, with the problem."""

    num_turns: int = Field(1, ge=1)
    """Number of turns of an episode."""
    prompt: Literal["instruct", "list", "paper", "bare"] = "instruct"
    """``instruct``: full English instructions, under which untrained models call ``aux``; ``list``: the same, but
    ``aux`` returns a list from which ``main`` makes the answer; ``paper``: a list of rules in the manner of arXiv
    2508.04652; ``bare``: only the problem under a one-word heading, for a tiny model."""
    feedback: Feedback = "level_feedback"
    """Feedback between turns. ``level_feedback``: diagnostics for each level; ``level_passed``: pass or fail for each
    level; ``passed``: one line; ``plain``: none; ``discussion``: the partner's last text."""
    feedback_tests: Annotated[int, Field(ge=0)] | Literal["all"] = 3
    """Number of failing tests that ``level_feedback`` quotes. 0: feedback reveals none of the reward's tests."""

    def read_sources(self) -> list[Mapping[str, str]]:
        """The texts of ``prompts.toml`` that agents can be shown."""
        return [*self._list_prompts(), PROMPTS["program_feedback"]]

    def roles(self) -> tuple[str, ...]:
        return tuple(self.system)

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert role in self.roles(), role
        if self.prompt == "bare":
            lines = [f"# {'main' if role == 'solo' else role}", problem.prompt]
            if history:
                last = history[-1]
                feedback_lines = format_bare_feedback(self.feedback, diagnose_turn(last, role))
                if self.feedback == "discussion":
                    feedback_lines += [f"# partner\n{text}" for text in _list_partner_texts(last, agent)]
                lines += ["# previous", last.texts[agent], "# feedback", *feedback_lines, ""]
            return Observation((Message("user", "\n".join(lines)),))
        parts = _name_parts(problem)
        asked = [texts[role].format(**parts) for texts in self._list_prompts()]
        messages = [*(Message("system", text) for text in asked[:-1]), Message("user", asked[-1])]
        function = "aux" if role == "helper" else problem.entry_point
        for turn in history:
            feedback = self._give_feedback(problem, role, turn, agent)
            request = word_feedback("request", function=function)
            messages += [Message("assistant", turn.texts[agent]), Message("user", f"{feedback}\n{request}")]
        return Observation(tuple(messages))

    def _list_prompts(self) -> Sequence[Mapping[str, str]]:
        """What each role is asked at the first turn: a system prompt, if there is one, and the task."""
        return self.system, self.task

    def _give_feedback(self, problem: Problem, role: str, turn: PastTurn, agent: str) -> str:
        if self.feedback == "discussion":
            texts = map(fence_text, _list_partner_texts(turn, agent))
            return "\n".join([word_feedback("partner"), *texts])
        diagnosis = diagnose_turn(turn, role)
        limit = len(diagnosis.failures) if self.feedback_tests == "all" else self.feedback_tests
        return format_feedback(self.feedback, diagnosis, role, problem.entry_point, limit)


def _name_parts(problem: Problem) -> dict[str, str]:
    """The parts of the problem, by the names that prompts have."""
    return {
        "prompt": problem.prompt.rstrip("\n"),
        "entry_point": problem.entry_point,
        "parameters": list_parameters(problem.prompt, problem.entry_point),
    }


@lru_cache(maxsize=1024)
def list_parameters(prompt: str, entry_point: str) -> str:
    """The parameters of the entry point as in ``a, b``; ``...`` if the prompt does not begin its definition."""
    for source in (prompt, f"{prompt.rstrip()}\n    pass\n"):
        try:
            body = parse_python(source).body
        except (SyntaxError, ValueError):  # a ValueError: a null byte
            continue
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == entry_point:
                arguments = node.args
                names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
                names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
                names += [arg.arg for arg in arguments.kwonlyargs]
                names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
                return ", ".join(names)
    return "..."


def _list_partner_texts(turn: PastTurn, agent: str) -> list[str]:
    return [text for name, text in turn.texts.items() if name != agent]


class CodingEnv(ProgramEnv):
    """A ``helper`` writes ``aux``, a ``main`` writes the entry point; both act at every turn.

    An agent sees its partner's completion only in feedback mode ``discussion``.
    """

    system: ClassVar[Mapping[str, str]] = PROMPTS["coding"]
    task: ClassVar[Mapping[str, str]] = PROMPTS["coding_task"]

    kind: str = "coding"

    def _list_prompts(self) -> Sequence[Mapping[str, str]]:
        if self.prompt == "paper":
            return (PROMPTS["paper"],)
        if self.prompt == "list":
            return PROMPTS["coding_list"], PROMPTS["coding_list_task"]
        return super()._list_prompts()


class SequentialEnv(CodingEnv):
    """``helper`` acts at even turns (from 0), ``main`` at odd ones; two turns are a round.

    ``main`` sees the helper's latest code, ``helper`` only its own. From the second round on, both get feedback on the
    program of the previous round. Each of the helper's ``G`` completions is followed by one completion of ``main``, or
    by ``G`` with ``rollout.tree = "full"``.
    """

    system: ClassVar[Mapping[str, str]] = PROMPTS["sequential"]
    task: ClassVar[Mapping[str, str]] = PROMPTS["program"]

    kind: str = "sequential"
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: only the problem under a one-word heading, for a tiny
    model."""
    num_turns: int = Field(2, ge=2, multiple_of=2)
    """Number of turns of an episode; two turns are one round."""

    def acting(self, turn: int) -> tuple[str, ...]:
        return (self.roles()[turn % 2],)

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert (role,) == self.acting(len(history)), role
        seen = super().observe(problem, role, merge_rounds(history), agent)
        if role == "helper":
            return seen
        (code,) = history[-1].texts.values()
        *before, last = seen.messages
        if self.prompt == "bare":
            content = f"# partner\n{code}\n{last.content}"
        else:
            content = f"{last.content}\n{word_feedback('partner')}\n{fence_text(code, 'python')}"
        return Observation((*before, Message(last.role, content)))


class SoloEnv(ProgramEnv):
    """The single role ``solo`` writes the entry point and everything it needs: the single-agent baseline, or GRPO."""

    system: ClassVar[Mapping[str, str]] = PROMPTS["solo"]

    kind: str = "solo"
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: only the problem under the heading ``# main``, which tells the
    embedded model to write the entry point."""
    feedback: Literal["level_feedback", "passed", "plain"] = "level_feedback"
    """Feedback between turns. ``level_feedback``: diagnostics for each level; ``passed``: one line; ``plain``: none."""


class TeamEnv(Plugin):
    """Roles ``helper1``, ``helper2``, ... propose a function ``aux``; ``main`` writes the entry point. One turn.

    All act at once and see only the problem. With ``prompt = "bare"`` all helpers get the same prompt: they differ by
    their weights.
    """

    num_turns: ClassVar[int] = 1

    kind: str = "team"
    num_helpers: int = Field(2, ge=1, le=100)
    """Number of helpers; must equal ``reward.num_helpers``."""
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: only the problem under a one-word heading, for a tiny
    model."""

    def read_sources(self) -> list[Mapping[str, str]]:
        """The texts of ``prompts.toml`` that agents can be shown."""
        return [PROMPTS["team"]]

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
        task = PROMPTS["team"]["task"].format(prompt=problem.prompt.rstrip(), function=function)
        return Observation((Message("system", system), Message("user", task)))
