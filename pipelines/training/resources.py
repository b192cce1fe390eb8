"""The heavy parts of a run, each opened when first needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from magrpo.config import AgentConfig, BaselineRow, RunConfig, start_weights
from magrpo.engines.host import EngineHost
from magrpo.layout import WEIGHTS, checkpoint_iteration
from magrpo.store import Pointer, RunStore

if TYPE_CHECKING:
    from magrpo.interfaces import Engine, Sandbox, Served, Updates
    from magrpo.lineup import Lineup
    from magrpo.policy import Policy


class Resources:
    """Lineup, updates, engine and sandbox of one run.

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
        self._lock = RLock()
        self._num_served = 1
        self._served: dict[str, Served] = {}  # by name, the one served longest first
        self._rows: dict[str, int] = {}  # rows of baselines by name, numbered

    @cached_property
    def lineup(self) -> Lineup:
        with self._show_loading("libraries"):
            from magrpo.lineup import Lineup  # torch, transformers

        config = self._config
        return Lineup.open(config.agents, config.model, config.lora)

    @cached_property
    def _policy(self) -> Policy:
        lineup = self.lineup
        from magrpo.policy import Policy  # peft

        with self._show_loading("base model"):
            return Policy.of(lineup, self._config.train.seed)

    @cached_property
    def updates(self) -> Updates:
        """Computes the updates of the run. Call :meth:`free_gpus` before."""
        policy = self._policy
        from magrpo.updates.inline import InlineUpdates  # torch

        updates = InlineUpdates(policy, self._config, self._store.path / "failed-batch")
        return self._open.enter_context(closing(updates))

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
        host = EngineHost(self.lineup, lambda: self._policy)
        with self._show_loading("engine"):
            return self._open.enter_context(closing(self._config.engine.open(host)))

    def serve_checkpoint(self, checkpoint: Pointer) -> Served:
        """The weights of ``checkpoint`` on the engine, awake. May be called from several threads."""
        weights = _weights_in(self._store.folder(checkpoint) / WEIGHTS, self._config.agents)
        return self._serve(checkpoint["sha"], checkpoint_iteration(checkpoint), weights)

    def serve_row(self, row: BaselineRow, untrained: Pointer) -> Served:
        """The weights named by ``row``, which match no checkpoint, on the engine."""
        weights = _weights_in(self._store.folder(untrained) / WEIGHTS, row.agents) | start_weights(row.agents)
        version = self._rows.setdefault(row.name, len(self._rows) + 1)
        return self._serve(f"row {row.name}", version, weights)

    def free_gpus(self) -> None:
        """Let the engine release its GPU memory, for an update on the same GPUs."""
        if self._served:
            self._engine.sleep()

    def discard_workers(self) -> None:
        """Close engine and sandbox after one of them died; the next use opens them again."""
        with self._lock:
            self.close()
            for name in ("_engine", "updates", "sandbox"):
                self.__dict__.pop(name, None)
            self._served.clear()

    def close(self) -> None:
        """Close everything."""
        self._open.close()

    def _serve(self, name: str, version: int, weights: Mapping[str, Path]) -> Served:
        """The weights called ``name``, which replace those served longest if there are too many."""
        with self._lock:
            if self._served:
                self._engine.wake()
            if name not in self._served:
                if len(self._served) == self._num_served:
                    self._served.pop(next(iter(self._served))).close()
                self._served[name] = self._engine.serve(version, weights)
            return self._served[name]


def _weights_in(folder: Path, agents: Sequence[AgentConfig]) -> dict[str, Path]:
    return {agent.name: folder / agent.name for agent in agents}
