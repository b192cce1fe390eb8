"""The calls of one episode: who answers, with which seed, which call a later one extends, and what is a retry.

Knows nothing of HTTP. All methods are called from one thread.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from magrpo.seeds import derive_seed
from magrpo.types import Action, Call, Problem, SamplingParams

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class EpisodeTask:
    """One episode to play. ``index``: its number among the episodes of its problem, from 0."""

    problem: Problem
    index: int
    sampling: SamplingParams
    seed: int
    """Seed of the stage, from which those of the completions are derived."""


@dataclass(frozen=True, slots=True)
class SampledCall:
    """One answered request of a program, with its whole prompt and all its messages."""

    agent: str
    number: int
    """Its number among the calls of its agent, from 0."""
    batch: int
    """Number of the batch that it was sampled in. Calls of one batch were asked for before either was answered."""
    prompt_ids: tuple[int, ...]
    messages: Messages
    action: Action
    overruled: Mapping[str, Any]
    ends_early: bool = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and the completion."""
        return (*self.prompt_ids, *self.action.token_ids)


@dataclass
class Session:
    """The calls of one episode so far."""

    task: EpisodeTask
    agents: Sequence[str]
    """The agents in the order of the configuration."""
    max_calls: int
    num_asked: int = 0
    """Number of completions asked for, answered or not."""
    num_waiting: int = 0
    """Number of requests that wait for their answer."""
    waited_s: float = 0.0
    """Time in which at least one request waited."""
    is_sealed: bool = False
    infra_error: str = ""
    """A failure that is not the program's, such as one of the sandbox; empty if there was none."""
    calls: list[SampledCall] = field(default_factory=list)
    get_time: Callable[[], float] = time.monotonic
    """The clock, in seconds, that measures ``waited_s``."""
    _waits_since: float = 0.0
    _asked: Counter[str] = field(default_factory=Counter)
    """Number of completions asked for, by agent."""
    _repeats: Counter[str] = field(default_factory=Counter)
    """Number of completions asked for, by digest of what tells them apart."""

    def begin_call(self, agent: str, prompt_ids: Sequence[int], requested_seed: int | None) -> tuple[int, int]:
        """Count a completion that is asked for; returns its number among those of ``agent``, and its seed.

        The seed of an agent's first completion is the one that a built-in environment gives it. Later ones follow from
        their prompt, so neither the calls of other agents nor the order in which requests arrive change them.
        """
        number = self._asked[agent]
        self._asked[agent] += 1
        self.num_asked += 1
        place = (self.task.seed, self.task.problem.task_id, (), agent, self.task.index)
        if number == 0 and requested_seed is None:
            return number, derive_seed(*place)
        digest = hashlib.blake2b(repr((agent, tuple(prompt_ids), requested_seed)).encode(), digest_size=16).hexdigest()
        repeat = self._repeats[digest]
        self._repeats[digest] += 1
        return number, derive_seed(*place, "call", digest, repeat)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count the block as time in which a request waits."""
        if self.num_waiting == 0:
            self._waits_since = self.get_time()
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self.waited_s += self.get_time() - self._waits_since

    def list_earlier(self, agent: str) -> list[tuple[int, ...]]:
        """Prompt and completion of each answered call of ``agent`` whose completion was not cut off."""
        return [call.token_ids for call in self.calls if call.agent == agent and call.action.finish_reason == "stop"]

    def seal(self) -> tuple[Call, ...]:
        """End the session; returns its calls in the order of their answers, without what earlier calls hold.

        Calls of one batch are put in the order of the agents, since it is chance which of them arrived first.
        """
        self.is_sealed = True
        order = {agent: place for place, agent in enumerate(self.agents)}
        self.calls.sort(key=lambda call: (call.batch, order[call.agent], call.number))
        return tuple(self._shorten(number) for number in range(len(self.calls)))

    def _shorten(self, number: int) -> Call:
        call = self.calls[number]
        extends = max(
            (i for i in range(number) if _extends(call, self.calls[i])),
            key=lambda i: len(self.calls[i].token_ids),
            default=-1,
        )
        prompt_ids, messages = call.prompt_ids, call.messages
        if extends >= 0:
            prompt_ids = prompt_ids[len(self.calls[extends].token_ids) :]
            messages = messages[len(self.calls[extends].messages) :]
        return Call(call.agent, extends, prompt_ids, messages, call.action, dict(call.overruled), call.ends_early)


def _extends(call: SampledCall, earlier: SampledCall) -> bool:
    """Whether the messages of ``call``, and its prompt, begin with all of the earlier call of the same agent."""
    begun = earlier.token_ids
    return (
        call.agent == earlier.agent
        and call.prompt_ids[: len(begun)] == begun
        and call.messages[: len(earlier.messages)] == earlier.messages
    )
