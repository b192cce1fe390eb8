"""The protocols of the project on one page: plug-ins, the resources that they open, and the tracker.

A plug-in subclasses :class:`magrpo.plugins.Plugin` and holds only configuration. Problem sets, environments and
rewards are used as they are. A sandbox or an engine holds resources, so its plug-in opens it and the caller closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from magrpo.types import (
    Action,
    Execution,
    ExecutionReport,
    IsolationLevel,
    JointReward,
    Observation,
    PastTurn,
    Problem,
    Reports,
    Request,
    RoleTexts,
    Split,
)

if TYPE_CHECKING:
    from magrpo.model.host import EngineHost

Progress = Callable[[int], None]
"""Called with the number of items finished since the last call."""


# ---------------------------------------------------------------------------------------- problems, environment, reward
class Problems(Protocol):
    """A problem set."""

    def load(self) -> Mapping[Split, Sequence[Problem]]:
        """Load all splits: disjoint, in a fixed order, ``train`` and ``test`` not empty. ValueError names a remedy."""


class Env(Protocol):
    """The environment: decides which roles act at each turn, and what each agent sees."""

    @property
    def num_turns(self) -> int:
        """The number of turns of one episode, at least 1."""

    def roles(self) -> tuple[str, ...]:
        """The roles, each of which exactly one agent must fill."""

    def acting(self, turn: int) -> tuple[str, ...]:
        """The roles that act at ``turn``, counted from 0: at least one, usually all. The others wait."""

    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        """The observation of the agent in ``role`` after ``history``.

        ``history`` is empty at the first turn; its texts are keyed by agent.
        Raises ConnectionError if a remote service fails, so that a retry may succeed.
        """


class Reward(Protocol):
    """Prices joint actions. Reports are data, so a stored rollout can be priced again without running anything."""

    @property
    def maxima(self) -> Mapping[str, float]:
        """The largest value of every part, above 0, before ``scale`` and ``shift``."""

    def fraction(self, total: float) -> float:
        """A joint reward, or a mean of several, as a fraction of the maximum; 1 if every part is at its maximum."""

    def passed(self, reports: Reports) -> bool | None:
        """Whether a joint action solved its problem, as counted by pass@k; None if the task has no notion of solved."""

    def executions(self, problem: Problem, texts: RoleTexts, reports: Reports) -> Mapping[str, Execution]:
        """The executions still needed, by name of report; called until there are none. ``texts`` is keyed by role."""

    def price(self, problem: Problem, texts: RoleTexts, reports: Reports) -> JointReward:
        """The joint reward, with each part of ``maxima`` and none above its maximum. A pure function.

        ``texts`` holds the latest completion of each role, perhaps from an earlier turn. The program may have invented
        a report that is ``forgeable``: count none of its tests as passed.
        """


# -------------------------------------------------------------------------------------------------- sandbox and engine
@runtime_checkable
class Sandbox(Protocol):
    """Runs untrusted programs. Opened by :meth:`SandboxPlugin.open`."""

    level: str
    """Isolation level: namespaces, namespaces-flat, landlock or none; empty if the sandbox runs nothing."""

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        """Run programs; returns one report for each, in order. Raises SandboxError if the sandbox fails repeatedly."""

    def close(self) -> None:
        """Kill every running program and free every resource. May be called twice."""


@runtime_checkable
class Served(Protocol):
    """One set of weights on an engine, from which completions are sampled. Opened by :meth:`Engine.serve`."""

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        """Sample one completion for each request, in order, with its ``support`` if the sampling parameters record it.

        Raises PromptTooLong, before anything is sampled, if a prompt leaves no room for its completion, and EngineError
        if the engine died or exceeded its deadline. May be called from several threads at once.
        """

    def close(self) -> None:
        """Release the weights, whose folder may then be deleted. May be called twice."""


@runtime_checkable
class Engine(Protocol):
    """Holds the weights of all agents. Opened by :meth:`EnginePlugin.open`."""

    def serve(self, version: int, weights: Mapping[str, Path]) -> Served:
        """Serve the weights of an update: a folder for each agent, in the format of peft or transformers.

        An agent that never had a folder acts with its base model. One that had a folder before must not be asked
        without one: engines differ in the weights that it has. As many sets of weights may be open at once as the
        engine was opened for. Raises EngineError if the engine died.
        """

    def sleep(self) -> None:
        """Release GPU memory for the update; served weights stay open. Does nothing on a CPU."""

    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    def close(self) -> None:
        """Stop every process and free every resource. May be called twice."""


class Updates(Protocol):
    """Computes updates: from folders of samples and of a checkpoint to the folder of the next checkpoint."""

    def begin(self, out: Path) -> None:
        """Write checkpoint 0 into ``out``: the untrained weights, or the weights that ``start_from`` names."""

    def update(self, samples: Path, checkpoint: Path, out: Path, progress: Progress | None = None) -> dict[str, float]:
        """Update the agents of ``checkpoint`` on ``samples`` and write the result into ``out``; returns the metrics.

        Raises NonFiniteLoss, whose message names the saved batch.
        """

    def adopt(self, checkpoint: Path) -> None:
        """Take note that the last output was moved to ``checkpoint``, so that an update from it need not load it."""

    def close(self) -> None:
        """Stop every process and free every resource. May be called twice."""


# ------------------------------------------------------------------------------------------------------------ plug-ins
class PluginConfig(Protocol):
    """The part of :class:`magrpo.plugins.Plugin`, a frozen pydantic model, that the callers of a plug-in use."""

    @property
    def kind(self) -> str:
        """The name that chooses the plug-in in a configuration."""

    def model_dump(self) -> dict[str, Any]:
        """The fields by name, ``kind`` included."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy with some fields replaced; the new values are not validated."""


class ProblemsPlugin(Problems, PluginConfig, Protocol):
    """The configuration of a problem set, which is the problem set itself."""


class EnvPlugin(Env, PluginConfig, Protocol):
    """The configuration of an environment, which is the environment itself."""


class RewardPlugin(Reward, PluginConfig, Protocol):
    """The configuration of a reward, which is the reward itself."""


class SandboxPlugin(PluginConfig, Protocol):
    """The configuration of a sandbox."""

    def open(self) -> Sandbox:
        """Start the sandbox. Raises SandboxError, with the remedy, if it cannot be started here."""


class EnginePlugin(PluginConfig, Protocol):
    """The configuration of an engine."""

    def open(self, host: EngineHost) -> Engine:
        """Start the engine for the agents of ``host``.

        Raises ConfigError if a library is not installed, and EngineError, with the engine's log, if it did not start.
        """


# Optional members of plug-ins, for plans, reports and keys. Test with isinstance: a plug-in may leave them out.
@runtime_checkable
class ReadsSources(Protocol):
    def read_sources(self) -> Sequence[Any]:
        """The texts outside the configuration that decide what an environment shows to agents, as plain JSON."""


@runtime_checkable
class HasMaxExecutions(Protocol):
    @property
    def max_executions(self) -> int:
        """The largest number of programs that a reward runs for one joint action."""


@runtime_checkable
class MeasuresTexts(Protocol):
    def measure_texts(self, texts: Mapping[str, str]) -> Mapping[str, float]:
        """The quantities by which the paper compares texts, where they differ from the parts of the reward.

        They are fractions of their maxima, in the order of the paper's table. ``texts`` is keyed by role.
        """


@runtime_checkable
class PricesRoles(Protocol):
    @property
    def priced_roles(self) -> Sequence[str]:
        """The roles whose texts a reward prices; a run in an environment without them is refused.

        Only an attribute of the class itself counts, not an inherited one, because a subclass may price other roles.
        """


@runtime_checkable
class TakesReturned(Protocol):
    def read_returned(self, result: Any, agents: Sequence[str]) -> JointReward:
        """The joint reward in what a program (``env.kind = "program"``) returned; ValueError if it holds none."""


@runtime_checkable
class HasHiddenTests(Protocol):
    @property
    def hidden_tests(self) -> bool:
        """Whether each program runs twice, the second time on hidden tests of the problem set."""


@runtime_checkable
class ChecksSource(Protocol):
    def check_source(self) -> None:
        """Raise ConfigError if a file that the problem set reads is missing; loads and downloads nothing."""


@runtime_checkable
class ReadsSentences(Protocol):
    def read_sentence(self, text: str) -> tuple[Problem | None, str]:
        """The problem, with the name and the tests of its function, that a sentence in the set's own words describes.

        Returns None and the reason for any other sentence.
        """


@runtime_checkable
class HasMaxBatch(Protocol):
    @property
    def max_batch(self) -> int:
        """The largest number of completions of one agent that an engine decodes at once."""


@runtime_checkable
class ProbesIsolation(Protocol):
    """A sandbox plug-in that can find its isolation level without opening a sandbox."""

    def probe(self) -> IsolationLevel:
        """The strongest isolation level that works here. Raises SandboxError if no accepted level does."""
