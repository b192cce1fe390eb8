"""Every Protocol of the project on one page.

A plug-in (:class:`magrpo.plugins.Plugin`) configures; what holds resources is opened from it and closed after use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from magrpo.types import (
    Action,
    Execution,
    ExecutionReport,
    JointReward,
    Observation,
    PastTurn,
    Problem,
    Request,
    Split,
    Trajectory,
    TurnTimes,
)

Progress = Callable[[int], None]
"""Called with the number of items finished since the last call."""


class Problems(Protocol):
    """A problem set."""

    def load(self) -> Mapping[Split, Sequence[Problem]]:
        """All splits, in a fixed order. No problem is in two splits; ``train`` and ``test`` are never empty.

        Raises:
            ValueError: a file, a line or an option is unusable; the message names it and the remedy.
        """
        ...


class Env(Protocol):
    """Who acts when, and who sees what."""

    @property
    def num_turns(self) -> int:
        """Turns of one episode, at least 1."""
        ...

    def roles(self) -> tuple[str, ...]:
        """The roles that must be filled, each by one agent."""
        ...

    def acting(self, turn: int) -> tuple[str, ...]:
        """The roles that act at a turn (from 0), at least one; the others wait. Usually all of them."""
        ...

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        """What the agent in ``role`` sees after ``history`` (empty: the first turn). Texts are keyed by agent.

        Called from several threads at once.

        Raises:
            ConnectionError: something outside that it asks does not answer; trying again may help.
        """
        ...


class Reward(Protocol):
    """Prices joint actions. Execution is data: a stored rollout can be priced again without running anything."""

    @property
    def maxima(self) -> Mapping[str, float]:
        """The largest value of every part, ``scale`` and ``shift`` aside."""
        ...

    def fraction(self, total: float) -> float:
        """The share of the maximum that a joint reward, or a mean of joint rewards, is: 1 if every part is full."""
        ...

    def passed(self, reports: Mapping[str, ExecutionReport]) -> bool | None:
        """Whether a joint action solved its problem: what pass@k counts. None: there is nothing to solve."""
        ...

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        """What still has to run, given the reports so far; called until it returns nothing. ``texts`` by role."""
        ...

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        """The joint reward. A pure function: equal arguments, equal reward.

        ``texts``: what every role wrote last, in this turn or, if it did not act, in an earlier one.
        """
        ...


class Sandbox(Protocol):
    """Runs untrusted programs. Opened from a sandbox plug-in's ``open()``."""

    level: str
    """The isolation level it runs at: namespaces, namespaces-flat, landlock or none; empty: it runs nothing."""

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        """One report for each execution, in order. A bad program is data; only a dead sandbox raises.

        Raises:
            SandboxError: the sandbox itself failed repeatedly.
        """
        ...

    def close(self) -> None:
        """Kill everything still running and free every resource. May be called twice."""
        ...


class Engine(Protocol):
    """Generates completions for all agents. Opened from an engine plug-in's ``open(policy)``."""

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        """One completion for each request, in order, as one batch.

        Where ``request.sampling.records_support``, an action has its ``support`` and log-probabilities over it.

        Raises:
            PromptTooLong: a prompt leaves no room for its completion; raised before anything is sampled.
            EngineError: the engine died or ran past its deadline.
        """
        ...

    def load(self, policy_version: int, weights: Mapping[str, Path]) -> None:
        """Take up the weights that the update wrote: a folder for each agent, in peft's or transformers' form."""
        ...

    def sleep(self) -> None:
        """Give the accelerator's memory to the update that follows. A no-op where there is nothing to give."""
        ...

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    def close(self) -> None:
        """Stop every process and free every resource. May be called twice."""
        ...


class SandboxPlugin(Protocol):
    """Configuration of a sandbox."""

    def open(self) -> Sandbox: ...


class Conventions(Protocol):
    """How the agents of a warm start write about a problem, each by conventions that it draws for itself alone."""

    roles: tuple[str, ...]

    def draw(self, rng: random.Random, role: str) -> str:
        """The name of a convention."""
        ...

    def all(self, role: str) -> Iterable[str]:
        """Conventions whose texts, over all problems, hold every word that any text can hold."""
        ...

    def write(self, problem: Problem, role: str, convention: str) -> str:
        """The completion of the agent in ``role``: equal arguments, equal text."""
        ...

    def flawed(self, problem: Problem, role: str, convention: str, rng: random.Random) -> str:
        """The same with a mistake."""
        ...


class Tracker(Protocol):
    """Records one training run. Never stalls and never kills training."""

    def params(self, params: Mapping[str, object]) -> None:
        """Record configuration values; logged once, compared when a run is reopened."""
        ...

    def tags(self, tags: Mapping[str, str]) -> None: ...

    def dataset(self, name: str, path: Path, digest: str, context: str) -> None:
        """Record a dataset input by its committed file and digest."""
        ...

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at an iteration. Keys are ``stage/quantity``."""
        ...

    def artifact(self, path: Path, folder: str) -> None:
        """Store a file or a folder of a stage under ``folder``."""
        ...

    def trace(self, trajectory: Trajectory, step: int, times: Sequence[TurnTimes]) -> None:
        """Record what agents saw, wrote and got for it at an iteration; ``times`` has an entry for each turn."""
        ...

    def close(self, status: str) -> None:
        """Flush everything; ``status`` is FINISHED or FAILED."""
        ...
