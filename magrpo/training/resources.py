"""The heavy parts of a run, each opened when first needed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

from magrpo.checks.runners import open_engine, open_sandbox, serve_weights
from magrpo.config.agents import AgentConfig, start_weights
from magrpo.config.run import BaselineRow, RunConfig
from magrpo.engines import EngineError
from magrpo.model.host import EngineHost
from magrpo.run.layout import checkpoint_iteration, locate_weights, read_place
from magrpo.run.store import Pointer, RunStore
from magrpo.sandboxes import SandboxDied
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.stages.pricing import open_workers

if TYPE_CHECKING:
    import torch

    from magrpo.cluster.connection import Cluster
    from magrpo.interfaces import Engine, Sandbox, Served, Updates
    from magrpo.model.lineup import Lineup
    from magrpo.model.policy import Policy

_MAX_WORKERS = 16


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
        self._place = read_place(store)
        self._lag = 0 if config.baselines.rows else config.train.lag
        self._close_part: dict[str, Callable[[], None]] = {}
        """Closes each open part, by name."""
        self._closed = False
        self.num_discarded: Counter[str] = Counter()
        """How often each part was closed because it had died."""
        self._opening = RLock()
        self._serving = RLock()
        self._served: dict[str, tuple[int, Served]] = {}
        """What the engine holds, and its version, by name."""
        self._rows: dict[str, int] = {}  # rows of baselines by name, numbered

    @property
    def lineup(self) -> Lineup:
        with self._opening:
            return self._lineup

    @property
    def updates(self) -> Updates:
        """Computes the updates of the run. Call :meth:`free_gpus` before."""
        if self._lag and "_engine" not in self.__dict__:
            with self._serving:  # its policy must not be loaded while an update computes: loading sets torch's defaults
                assert self._engine
        with self._opening:
            return self._updates

    @property
    def sandbox(self) -> Sandbox:
        with self._opening:
            return self._sandbox

    @property
    def workers(self) -> ProcessPoolExecutor:
        """Processes that call the reward of large batches; they start when they are first needed."""
        with self._opening:
            return self._workers

    @cached_property
    def _workers(self) -> ProcessPoolExecutor:
        workers = open_workers(min(_MAX_WORKERS, len(os.sched_getaffinity(0))))
        self._note_open("_workers", partial(workers.shutdown, cancel_futures=True))
        return workers

    @cached_property
    def _lineup(self) -> Lineup:
        with self._show_loading("libraries"):
            from magrpo.model.lineup import Lineup  # torch, transformers

        config = self._config
        return Lineup.open(config.agents, config.model, config.lora, self._find_device())

    @cached_property
    def _policy(self) -> Policy:
        return self._load_policy()

    def _load_policy(self) -> Policy:
        lineup = self.lineup
        from magrpo.model.policy import Policy  # peft

        with self._show_loading("base model"):
            return Policy.of(lineup, self._config.train.seed)

    @cached_property
    def _cluster(self) -> Cluster:
        from magrpo.cluster.connection import Cluster  # only runs that need it may import ray

        with self._show_loading("Ray"):
            cluster = Cluster(self._place.address)
        self._note_open("_cluster", cluster.close)
        return cluster

    @cached_property
    def _updates(self) -> Updates:
        config, dump = self._config, self._store.path / "failed-batch"
        updates: Updates
        if self._place.ranks.count:
            cluster = self._cluster
            from magrpo.cluster.ranks import RanksUpdates  # ray, torch

            updates = RanksUpdates(cluster, self._place, config, dump)
        else:
            policy = self._policy
            from magrpo.updates.inline import InlineUpdates  # torch

            updates = InlineUpdates(policy, config, dump)
        self._note_open("_updates", updates.close)
        return updates

    @cached_property
    def _sandbox(self) -> Sandbox:
        with self._show_loading("sandbox"):
            sandbox = self._open_sandbox()
        self._note_open("_sandbox", sandbox.close)
        if sandbox.level:
            self._on_sandbox(sandbox.level)
        return sandbox

    @cached_property
    def _engine(self) -> Engine:
        engine = self._open_samplers() if self._place.samplers.count else self._open_engine_here()
        self._note_open("_engine", engine.close)
        return engine

    def _open_engine_here(self) -> Engine:
        host = EngineHost(self.lineup, self._engine_policy, num_served=self._lag + 1)
        with self._show_loading("engine"):
            return open_engine(self._config.engine, host)

    def _open_samplers(self) -> Engine:
        with self._opening:
            cluster = self._cluster
        from magrpo.cluster.samplers import SamplerEngine  # ray, torch

        lineup = self.lineup
        with self._show_loading("engine"):
            return SamplerEngine(cluster, self._place, self._config, lineup, self._lag + 1)

    def _engine_policy(self) -> Policy:
        """The policy of an engine in this process: that of the updates, unless these run while it samples."""
        with self._opening:
            return self._load_policy() if self._lag or self._place.ranks.count else self._policy

    @property
    def _shares_gpus(self) -> bool:
        """Whether engine and updates use the same GPUs by turns."""
        return not self._lag and (self._place.colocate or not self._place.samplers.count)

    def _find_device(self) -> torch.device | None:
        """The device of weights that only other processes hold, whether or not this machine has one; else None."""
        import torch  # half a second

        return torch.device("cuda") if self._place.is_elsewhere and self._config.model.device == "cuda" else None

    def _open_sandbox(self) -> Sandbox:
        plugin, nodes = self._config.sandbox, self._place.jails.nodes
        if nodes and isinstance(plugin, PoolSandbox):
            cluster = self._cluster
            from magrpo.cluster.jails import ClusterSandbox  # ray

            return ClusterSandbox(cluster, plugin, nodes)
        return open_sandbox(plugin)

    def serve_checkpoint(self, checkpoint: Pointer) -> Served:
        """The weights of ``checkpoint`` on the engine, awake. May be called from several threads."""
        weights = locate_weights(self._store.folder(checkpoint), _names_of(self._config.agents))
        return self._serve(checkpoint["sha"], checkpoint_iteration(checkpoint), weights)

    def serve_row(self, row: BaselineRow, untrained: Pointer) -> Served:
        """The weights named by ``row``, which match no checkpoint, on the engine."""
        weights = locate_weights(self._store.folder(untrained), _names_of(row.agents)) | start_weights(row.agents)
        version = self._rows.setdefault(row.name, len(self._rows) + 1)
        return self._serve(f"row {row.name}", version, weights)

    def free_gpus(self) -> None:
        """Let the engine release its GPU memory for an update, unless it samples meanwhile."""
        if self._served and self._shares_gpus:
            self._engine.sleep()

    def discard_dead(self, error: EngineError | SandboxDied | BrokenExecutor, discarded_before: Counter[str]) -> None:
        """Close the part whose death raised ``error``; the next use opens it again.

        No-op if another thread did so since :attr:`num_discarded` was ``discarded_before``.
        """
        name, lock = "_engine", self._serving
        if not isinstance(error, EngineError):
            name = "_sandbox" if isinstance(error, SandboxDied) else "_workers"
            lock = self._opening
        with lock:
            if self.num_discarded[name] != discarded_before[name]:
                return
            self.num_discarded[name] += 1
            self._close_part.pop(name, lambda: None)()
            self.__dict__.pop(name, None)
            if name == "_engine":
                self._served.clear()

    def close(self) -> None:
        """Close everything. Steps in progress in other threads fail."""
        self._closed = True
        with ExitStack() as parts:
            for close_part in list(self._close_part.values()):
                parts.callback(close_part)

    def _note_open(self, name: str, close_part: Callable[[], None]) -> None:
        self._close_part[name] = close_part
        if self._closed:  # while it was being opened
            close_part()

    def _serve(self, name: str, version: int, weights: Mapping[str, Path]) -> Served:
        """The weights called ``name``, which replace the oldest version if there are too many."""
        with self._serving:
            if self._served:
                self._engine.wake()
            if name not in self._served:
                if len(self._served) > self._lag:
                    oldest = min(self._served, key=lambda served: self._served[served][0])
                    self._served.pop(oldest)[1].close()
                self._served[name] = version, serve_weights(self._engine, version, weights)
            return self._served[name][1]


def _names_of(agents: Sequence[AgentConfig]) -> list[str]:
    return [agent.name for agent in agents]
