"""The heavy parts of a run, each opened when first needed, and the checkpoint that each of them holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

from magrpo.config import BaselineRow, RunConfig
from magrpo.layout import WEIGHTS
from magrpo.store import Pointer, RunStore

if TYPE_CHECKING:
    from magrpo.interfaces import Engine, Sandbox
    from magrpo.policy import Policy
    from magrpo.stages.update import Updater


class Resources:
    """Policy, updater, engine and sandbox of one run.

    ``on_sandbox`` takes the isolation level of an opened sandbox; ``show_loading`` shows what its block loads.
    """

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        on_sandbox: Callable[[str], None],
        show_loading: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._config, self._store, self._on_sandbox = config, store, on_sandbox
        self._show_loading = show_loading
        self._open = ExitStack()
        self.live: Pointer | None = None
        """The checkpoint whose weights the updater holds."""
        self._served: Pointer | None = None  # the checkpoint the engine holds
        self._rows_served = 0  # rows of baselines served so far

    @cached_property
    def policy(self) -> Policy:
        with self._show_loading("libraries"):
            from magrpo.policy import Policy  # torch, transformers

        config = self._config
        with self._show_loading("base model"):
            return Policy.open(config.agents, config.model, config.lora, config.train.seed)

    @cached_property
    def updater(self) -> Updater:
        from magrpo.stages.update import Updater  # torch

        return Updater.of(self.policy, self._config, self._store.path / "failed-batch")

    @cached_property
    def sandbox(self) -> Sandbox:
        with self._show_loading("sandbox"):
            sandbox = self._config.sandbox.open()
        self._open.callback(sandbox.close)
        if sandbox.level:
            self._on_sandbox(sandbox.level)
        return sandbox

    @cached_property
    def _engine(self) -> Engine:
        policy = self.policy
        with self._show_loading("engine"):
            return self._open.enter_context(closing(self._config.engine.open(policy)))

    def serve_checkpoint(self, checkpoint: Pointer) -> Engine:
        """The engine, awake, with the weights of ``checkpoint``."""
        self._resume(checkpoint)
        if self._served is not None:
            self._engine.wake()
        if self._served != checkpoint:
            folder = self._store.folder(checkpoint) / WEIGHTS
            self._engine.load(self.policy.version, {agent.name: folder / agent.name for agent in self._config.agents})
            self._served = checkpoint
        return self._engine

    def serve_row(self, row: BaselineRow, untrained: Pointer) -> Engine:
        """The engine with the weights named by ``row``, which match no checkpoint."""
        folder = self._store.folder(untrained) / WEIGHTS
        weights = {agent.name: agent.start_from or folder / agent.name for agent in row.agents}
        self.live = self._served = None
        self._rows_served += 1  # a version of its own for each row, so that every engine loads the weights
        self._engine.load(self._rows_served, weights)
        return self._engine

    def prepare_update(self, checkpoint: Pointer) -> Updater:
        """The updater with the weights of ``checkpoint``; the engine sleeps. Set ``live`` to the new checkpoint."""
        self._resume(checkpoint)
        if self._served is not None:
            self._engine.sleep()
        self.live = None
        return self.updater

    def discard_workers(self) -> None:
        """Close engine and sandbox after one of them died; the next use opens them again."""
        self.close()
        self.__dict__.pop("_engine", None)
        self.__dict__.pop("sandbox", None)
        self._served = None

    def close(self) -> None:
        """Close engine and sandbox."""
        self._open.close()

    def _resume(self, checkpoint: Pointer) -> None:
        """Make the live weights and optimizers those of ``checkpoint``."""
        if self.live != checkpoint:
            self.updater.load(self._store.folder(checkpoint))
            self.live = checkpoint
