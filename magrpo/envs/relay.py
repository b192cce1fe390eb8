"""Environments of two programmers who each see a part of a ``relay`` problem, and of one who sees it all."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from magrpo.envs.prompts import PROMPTS
from magrpo.errors import ConfigError
from magrpo.plugins import Plugin
from magrpo.text import fence_text
from magrpo.types import Message, Observation, PastTurn, Problem


class RelayEnv(Plugin):
    """``first`` and ``second`` each write a function ``aux``; both act at once.

    Each sees only its own part of the problem, ``problem.tags[role]``. The value is passed through the function of
    ``first``, then through that of ``second``.
    """

    feedback: ClassVar[str] = "plain"
    """Agents get no feedback, which other environments call ``plain``. Rows of baselines with one agent ask for it."""

    kind: str = "relay"
    num_turns: Literal[1] = 1
    """Number of turns of an episode."""
    prompt: Literal["instruct", "bare"] = "instruct"
    """``instruct``: full English instructions; ``bare``: only the steps under a one-word heading, for a tiny model."""

    def read_sources(self) -> list[Mapping[str, str]]:
        """The texts of ``prompts.toml`` that agents can be shown."""
        return [PROMPTS["relay"]]

    def roles(self) -> tuple[str, ...]:
        return ("first", "second")

    def acting(self, turn: int) -> tuple[str, ...]:
        return self.roles()

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert role in self.roles(), role
        if role != "solo" and role not in problem.tags:
            raise ConfigError(
                f'problem {problem.task_id}: has no part for the role {role!r}; set problems.kind = "relay", and ask '
                "the agents a problem of their run: magrpo ask RUN --problem ID"
            )
        view = problem.prompt if role == "solo" else problem.tags[role]
        if self.prompt == "bare":
            return Observation((Message("user", f"# helper\n{view}"),))
        return Observation((Message("user", PROMPTS["relay"][role].format(view=view.rstrip("\n"))),))


class RelayInTurnEnv(RelayEnv):
    """``first`` acts at the first turn; ``second`` acts at the second one and sees the text of ``first``: a message."""

    kind: str = "relay_in_turn"
    num_turns: Literal[2] = 2  # type: ignore[assignment]
    """Number of turns of an episode."""
    message: Literal["partner", "none"] = "partner"
    """``partner``: ``second`` sees what ``first`` wrote; ``none``: it does not, a lower bound."""

    def acting(self, turn: int) -> tuple[str, ...]:
        return (self.roles()[turn],)

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        assert (role,) == self.acting(len(history)), role
        seen = super().observe(problem, role, history, agent)
        if role == "first" or self.message == "none":
            return seen
        (text,) = history[-1].texts.values()
        (last,) = seen.messages
        if self.prompt == "bare":
            return Observation((Message("user", f"{last.content}# partner\n{text}\n"),))
        message = PROMPTS["relay"]["partner"].format(text=fence_text(text, "python"))
        return Observation((Message("user", f"{last.content}\n\n{message}"),))


class SoloRelayEnv(RelayEnv):
    """The single role ``solo`` sees all steps and writes one function: the upper bound."""

    kind: str = "relay_solo"

    def roles(self) -> tuple[str, ...]:
        return ("solo",)
