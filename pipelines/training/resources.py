"""What is heavy in a run, each opened when it is first needed: policy, updater, engine and sandbox.

And which weights they hold: live in the updater, served by the engine. Imports no prefect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING

from magrpo.config import BaselineRow, RunConfig
from magrpo.store import Pointer, RunStore

if TYPE_CHECKING:
    from magrpo.interfaces import Engine, Sandbox
    from magrpo.policy import Policy
    from magrpo.stages.update import Updater


class Resources:
    """Policy, updater, engine and sandbox of one run. ``isolated`` is told the level of a sandbox that opens."""

    def __init__(self, config: RunConfig, store: RunStore, isolated: Callable[[str], None]) -> None:
        self._config = config
        self._store = store
        self._isolated = isolated
        self._open = ExitStack()
        self._live: Pointer | None = None  # the checkpoint the updater holds
        self._served: Pointer | None = None  # the checkpoint the engine holds
        self._seated = 0  # rows of baselines whose weights the engine has been given

    @cached_property
    def policy(self) -> Policy:
        """The agents' models."""
        from magrpo.policy import Policy

        config = self._config
        return Policy.open(config.agents, config.model, config.lora, config.train.seed)

    @cached_property
    def updater(self) -> Updater:
        """The optimizers of ``policy``."""
        from magrpo.stages.update import Updater

        return Updater.of(self.policy, self._config, self._store.path / "failed-batch")

    @cached_property
    def sandbox(self) -> Sandbox:
        """Where programs run."""
        sandbox: Sandbox = self._config.sandbox.open()
        self._open.callback(sandbox.close)
        if sandbox.level:
            self._isolated(sandbox.level)
        return sandbox

    @cached_property
    def _engine(self) -> Engine:
        engine: Engine = self._config.engine.open(self.policy)
        self._open.callback(engine.close)
        return engine

    def serve(self, checkpoint: Pointer) -> Engine:
        """The engine, awake, with the weights of ``checkpoint``."""
        self._resume(checkpoint)
        if self._served is not None:
            self._engine.wake()
        if self._served != checkpoint:
            folder = self._store.folder(checkpoint) / "weights"
            self._engine.load(self.policy.version, {agent.name: folder / agent.name for agent in self._config.agents})
            self._served = checkpoint
        return self._engine

    def seat(self, row: BaselineRow, untrained: Pointer) -> Engine:
        """The engine with the weights that ``row`` asks for; they are no checkpoint's."""
        untrained_weights = self._store.folder(untrained) / "weights"
        weights = {agent.name: agent.start_from or untrained_weights / agent.name for agent in row.agents}
        self._live = self._served = None
        self._seated += 1  # no two rows have the same version, so that every engine takes up the weights
        self._engine.load(self._seated, weights)
        return self._engine

    def train(self, checkpoint: Pointer) -> Updater:
        """The updater with the weights of ``checkpoint``, for an update; the engine sleeps.

        The weights are nobody's from here on, until :meth:`trained` names them.
        """
        self._resume(checkpoint)
        if self._served is not None:
            self._engine.sleep()
        self._live = None
        return self.updater

    def trained(self, checkpoint: Pointer) -> None:
        """The updater's weights are those of ``checkpoint``, just committed."""
        self._live = checkpoint

    def let_go(self) -> None:
        """Close engine and sandbox, one of which died: another try opens them anew."""
        self.close()
        self.__dict__.pop("_engine", None)
        self.__dict__.pop("sandbox", None)
        self._served = None

    def close(self) -> None:
        """Close engine and sandbox."""
        self._open.close()

    def _resume(self, checkpoint: Pointer) -> None:
        """Make the live weights and optimizers those of ``checkpoint``."""
        if self._live != checkpoint:
            self.updater.load(self._store.folder(checkpoint))
            self._live = checkpoint
