"""Environments of authors: two who write two texts at once or in turn, or one who writes both."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from magrpo.envs.prompts import PROMPTS
from magrpo.envs.rounds import merge_rounds
from magrpo.plugins import Plugin
from magrpo.types import Message, Observation, PastTurn, Problem

ROLES: Mapping[str, tuple[str, str]] = {"tldr": ("summary", "elaboration"), "arxiv": ("background", "methods")}
_WORDS = {"structure": "length", "length_ratio": "ratio", "unique_words": "words", "style": "style"}
"""What the bare prompt calls each level."""
_MAXIMA = {"structure": 0.5, "length_ratio": 1.0, "unique_words": 0.5, "style": 1.0}
_GOOD_FRAC = 0.9
"""A level counts as good if it scores at least this fraction of its maximum."""

BARE_LINES: tuple[str, ...] = (
    *(f"{word} {verdict}" for word in _WORDS.values() for verdict in ("ok", "bad")),
    "all good",
    "revise",
)
"""Every line that feedback in the bare prompt can contain."""


class WritingEnv(Plugin):
    """Two authors write ``summary`` and ``elaboration`` of a post, or ``background`` and ``methods`` from an abstract.

    Both act at every turn. ``Problem.prompt`` is the post or the abstract. Feedback is made from the reward's parts.
    """

    prompts: ClassVar[Mapping[str, str]] = PROMPTS["writing"]
    """Prompt of each role, used with ``prompt = "instruct"``."""
    words: ClassVar[Mapping[str, str]] = PROMPTS["writing_feedback"]
    """Feedback, with advice on each level that is not good, and what each agent is asked after it."""

    kind: str = "writing"
    task: Literal["tldr", "arxiv"] = "tldr"
    """``tldr``: write two summaries of a post; ``arxiv``: write an introduction from an abstract."""
    num_turns: int = Field(1, ge=1)
    """Number of turns of an episode."""
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: only the text under a one-word heading, for a tiny model."""
    feedback: Literal["level_feedback", "plain", "discussion"] = "level_feedback"
    """Feedback between turns. ``level_feedback``: the verdict on each level; ``plain``: none; ``discussion``: the
    partner's last text."""

    def read_sources(self) -> list[Mapping[str, str]]:
        """The texts of ``prompts.toml`` that agents can be shown."""
        return [self.prompts, self.words]

    def roles(self) -> tuple[str, ...]:
        return ROLES[self.task]

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert role in self.roles(), role
        if self.prompt == "bare":
            lines = [f"# {role}", problem.prompt]
            if history:
                lines += ["# previous", history[-1].texts[agent], "# feedback"]
                lines += [*self._list_bare_feedback(history[-1], agent), ""]
            return Observation((Message("user", "\n".join(lines)),))
        messages = [Message("user", self._ask_author(problem, role))]
        for turn in history:
            request = [*self._list_feedback(turn, agent), self._word_feedback("request")]
            messages += [Message("assistant", turn.texts[agent]), Message("user", "\n".join(request))]
        return Observation(tuple(messages))

    def _ask_author(self, problem: Problem, role: str) -> str:
        return self.prompts[role].format(prompt=problem.prompt)

    def _list_bare_feedback(self, turn: PastTurn, agent: str) -> list[str]:
        if self.feedback == "discussion":
            return ["revise", *(f"# partner\n{text}" for name, text in turn.texts.items() if name != agent)]
        verdicts = _judge_levels(turn)
        if self.feedback == "plain" or not verdicts:
            return ["revise"]
        if all(verdicts.values()):
            return ["all good"]
        return [f"{_WORDS[name]} {'ok' if good else 'bad'}" for name, good in verdicts.items()]

    def _list_feedback(self, turn: PastTurn, agent: str) -> list[str]:
        if self.feedback == "discussion":
            return [self._word_feedback("partner", text=text) for name, text in turn.texts.items() if name != agent]
        verdicts = _judge_levels(turn)
        if self.feedback == "plain" or not verdicts:
            return [self._word_feedback("plain")]
        advice = [self._word_feedback(name) for name, good in verdicts.items() if not good]
        return advice or [self._word_feedback("good")]

    def _word_feedback(self, name: str, **values: str) -> str:
        return self.words[name].format(**values)


class SequentialWritingEnv(WritingEnv):
    """The first author acts at even turns (from 0), the second, who sees the first one's latest text, at odd ones.

    Two turns are a round. From the second round on, both get feedback on the texts of the previous round.
    """

    prompts: ClassVar[Mapping[str, str]] = PROMPTS["writing_sequential"]

    kind: str = "writing_sequential"
    num_turns: int = Field(2, ge=2, multiple_of=2)
    """Number of turns of an episode; two turns are one round."""

    def acting(self, turn: int) -> tuple[str, ...]:
        return (self.roles()[turn % 2],)

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert (role,) == self.acting(len(history)), role
        seen = super().observe(problem, role, merge_rounds(history), agent)
        if role == self.roles()[0]:
            return seen
        (text,) = history[-1].texts.values()
        *before, last = seen.messages
        seen_text = f"# partner\n{text}" if self.prompt == "bare" else f"{self._word_feedback('partner', text=text)}\n"
        # The request stays last: a small model copies what is last.
        return Observation((*before, Message(last.role, f"{seen_text}\n{last.content}")))


class SoloWritingEnv(WritingEnv):
    """The single role ``solo`` writes both texts, an empty line between them: the single-agent baseline, or GRPO."""

    prompts: ClassVar[Mapping[str, str]] = PROMPTS["writing_solo"]
    words: ClassVar[Mapping[str, str]] = PROMPTS["writing_solo_feedback"]

    kind: str = "writing_solo"
    feedback: Literal["level_feedback", "plain"] = "level_feedback"
    """Feedback between turns. ``level_feedback``: the verdict on each level; ``plain``: none."""

    def roles(self) -> tuple[str, ...]:
        return ("solo",)

    def _ask_author(self, problem: Problem, role: str) -> str:
        return self.prompts[self.task].format(prompt=problem.prompt)


def _judge_levels(turn: PastTurn) -> dict[str, bool]:
    """Whether each level that was reached is good. Levels after one that scored 0 were not reached.

    Empty for a reward other than ``writing``, which has no parts of these names.
    """
    parts = turn.reward.parts
    verdicts = {}
    for name in _MAXIMA:
        if name not in parts:
            continue
        verdicts[name] = parts[name] >= _GOOD_FRAC * _MAXIMA[name]
        if parts[name] == 0:
            break
    return verdicts
