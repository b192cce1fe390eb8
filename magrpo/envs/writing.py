"""The writing environment: two authors write one text without seeing each other's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from magrpo.plugins import Plugin
from magrpo.types import Message, Observation, PastTurn, Problem

ROLES: Mapping[str, tuple[str, str]] = {"tldr": ("summary", "elaboration"), "arxiv": ("background", "methods")}

_TASK = {
    "summary": (
        "Summarise this post in one or two plain sentences. A partner writes a longer summary of the same post at the "
        "same time; you do not see it.\n\nThe post:\n{prompt}\n\nWrite the short summary only."
    ),
    "elaboration": (
        "Summarise this post in detail, two to three times as long as the one or two sentences that a partner writes "
        "about it at the same time; you do not see them. Keep to the post's main words, add more of your own, and lead "
        "the reader with transition words.\n\nThe post:\n{prompt}\n\nWrite the detailed summary only."
    ),
    "background": (
        "You and a partner write the introduction of a scientific paper from its abstract. You write the background "
        "and motivation; your partner writes about the methods at the same time, in about the same length; you do not "
        "see it. Write 130 to 250 words, in the words of the abstract where you can, with transition words.\n\n"
        "The abstract:\n{prompt}\n\nWrite your part only, as running text."
    ),
    "methods": (
        "You and a partner write the introduction of a scientific paper from its abstract. You write about the methods "
        "and their significance; your partner writes the background at the same time, in about the same length; you "
        "do not see it. Write 130 to 250 words, in the words of the abstract where you can, with transition words.\n\n"
        "The abstract:\n{prompt}\n\nWrite your part only, as running text."
    ),
}
_LEVELS = {
    "structure": ("length", "One of the two texts is too short or too long."),
    "length_ratio": ("ratio", "The lengths of the two texts do not fit each other well."),
    "unique_words": ("words", "The two texts differ too much or too little in how many different words they use."),
    "style": ("style", "Use more kinds of transition words, and more of the same content words as your partner."),
}
_MAXIMA = {"structure": 0.5, "length_ratio": 1.0, "unique_words": 0.5, "style": 1.0}
_GOOD_FRAC = 0.9
"""A level counts as good if it scores at least this fraction of its maximum."""

BARE_LINES: tuple[str, ...] = (
    *(f"{word} {verdict}" for word, _ in _LEVELS.values() for verdict in ("ok", "bad")),
    "all good",
    "revise",
)
"""Every line that feedback in the bare prompt can contain."""


class WritingEnv(Plugin):
    """Two authors write ``summary`` and ``elaboration`` of a post, or ``background`` and ``methods`` from an abstract.

    Both act at every turn. ``Problem.prompt`` is the post or the abstract. Feedback is made from the reward's parts.
    """

    kind: str = "writing"
    task: Literal["tldr", "arxiv"] = "tldr"
    """``tldr``: two summaries of a post; ``arxiv``: an introduction from an abstract."""
    num_turns: int = Field(1, ge=1)
    """Turns of one episode."""
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: the text under a one-word heading, for a tiny model."""
    feedback: Literal["level_feedback", "plain", "discussion"] = "level_feedback"
    """Feedback between turns. ``level_feedback``: the verdict on each level; ``plain``: none; ``discussion``: the
    partner's last text."""

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
        messages = [Message("user", _TASK[role].format(prompt=problem.prompt))]
        for turn in history:
            request = [*self._list_feedback(turn, agent), "Revise your text. Write the text only."]
            messages += [Message("assistant", turn.texts[agent]), Message("user", "\n".join(request))]
        return Observation(tuple(messages))

    def _list_bare_feedback(self, turn: PastTurn, agent: str) -> list[str]:
        if self.feedback == "discussion":
            return ["revise", *(f"# partner\n{text}" for name, text in turn.texts.items() if name != agent)]
        if self.feedback == "plain":
            return ["revise"]
        verdicts = _judge_levels(turn)
        if all(verdicts.values()):
            return ["all good"]
        return [f"{_LEVELS[name][0]} {'ok' if good else 'bad'}" for name, good in verdicts.items()]

    def _list_feedback(self, turn: PastTurn, agent: str) -> list[str]:
        if self.feedback == "discussion":
            return [f"Your partner wrote:\n{text}" for name, text in turn.texts.items() if name != agent]
        if self.feedback == "plain":
            return ["Look at your text again and improve it where you can."]
        advice = [_LEVELS[name][1] for name, good in _judge_levels(turn).items() if not good]
        return advice or ["The two texts fit each other well."]


def _judge_levels(turn: PastTurn) -> dict[str, bool]:
    """Whether each level that was reached is good. Levels after one that scored 0 were not reached."""
    verdicts = {}
    for name, maximum in _MAXIMA.items():
        verdicts[name] = turn.reward.parts[name] >= _GOOD_FRAC * maximum
        if turn.reward.parts[name] == 0:
            break
    return verdicts
