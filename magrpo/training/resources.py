"""The heavy parts of a run, each opened when first needed."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from magrpo.checks.runners import open_engine, open_sandbox, serve_weights
from magrpo.config.agents import AgentConfig, start_weights
from magrpo.config.run import BaselineRow, RunConfig
from magrpo.engines import EngineError
from magrpo.fleets import Fleet
from magrpo.fleets.local import LocalFleet
from magrpo.fleets.workers import Workers
from magrpo.model.host import EngineHost
from magrpo.run.files import LOGS, checkpoint_iteration, locate_weights, read_place
from magrpo.run.store import Pointer, RunStore
from magrpo.sandboxes import SandboxDied
from magrpo.sandboxes.pool import PoolSandbox

if TYPE_CHECKING:
    import torch

    from magrpo.interfaces import Engine, Sandbox, Served, Updates
    from magrpo.model.lineup import Lineup
    from magrpo.model.policy import Policy

_MAX_WORKERS = 16
_ALLOCATIONS = 50_000
"""Net allocations after which a process that asks servers collects garbage.

At Python's default of 700, objects of requests in flight survive many collections, which take a third of the time.
"""


class _Closable(Protocol):
    def close(self) -> None: ...


PartT = TypeVar("PartT", bound=_Closable)


class _Part(Generic[PartT]):
    """A part of a run, opened by the first thread that needs it and shared with the others."""

    def __init__(self, open_part: Callable[[], PartT], lock: RLock) -> None:
        self._open_part, self._lock = open_part, lock
        self._opened: list[PartT] = []
        self._closed = False

    @property
    def is_open(self) -> bool:
        return bool(self._opened)

    def get(self) -> PartT:
        """Return the part, opening it if need be; a part that was closed for good is returned closed."""
        with self._lock:
            if not self._opened:
                self._opened.append(self._open_part())
                if self._closed:  # while it was being opened
                    self._opened[0].close()
            return self._opened[0]

    def discard(self) -> None:
        """Close the part; the next use opens a new one."""
        with self._lock:
            while self._opened:
                self._opened.pop().close()

    def close(self) -> None:
        """Close the part for good, without waiting for other threads: one that is using it fails."""
        self._closed = True
        for part in self._opened:
            part.close()


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
        self.num_discarded: Counter[str] = Counter()
        """How often engine and sandbox were closed because they had died, by name."""
        self._opening, self._serving = RLock(), RLock()
        self._fleet = _Part(self._open_fleet, self._opening)
        self._workers = _Part(self._open_workers, self._opening)
        self._sandbox = _Part(self._open_sandbox, self._opening)
        self._updates = _Part(self._open_updates, self._opening)
        self._engine = _Part(self._open_engine, self._serving)
        self._served: dict[str, tuple[int, Served]] = {}
        """Version of each set of weights that the engine holds, by name."""
        self._rows: dict[str, int] = {}  # number of each row of baselines, by name

    @property
    def lineup(self) -> Lineup:
        with self._opening:
            return self._lineup

    @property
    def updates(self) -> Updates:
        """Return the part that computes updates. Call :meth:`free_gpus` before."""
        if self._lag and not self._engine.is_open:
            # Its policy must not be loaded while an update computes: loading sets torch's defaults.
            self._engine.get()
        return self._updates.get()

    @property
    def sandbox(self) -> Sandbox:
        return self._sandbox.get()

    @property
    def workers(self) -> Workers:
        """Return processes that compute the reward of large batches; they start when first needed."""
        return self._workers.get()

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

    def _open_workers(self) -> Workers:
        return Workers(min(_MAX_WORKERS, len(os.sched_getaffinity(0))), self._store.path / LOGS)

    def _open_fleet(self) -> Fleet:
        """Start the fleet, which starts the processes that the place asks for."""
        place = self._place.fleet
        if place.kind == "ray":
            from magrpo.fleets.ray import RayFleet  # ray, which is optional

            return RayFleet(place.address)
        return LocalFleet()

    def _open_updates(self) -> Updates:
        config, dump = self._config, self._store.path / "failed-batch"
        if self._place.update.ranks:
            from magrpo.updates.ranks import RanksUpdates  # torch

            return RanksUpdates(config, self._place, self._fleet.get(), dump, self._store.path / LOGS)
        policy = self._policy
        from magrpo.updates.inline import InlineUpdates  # torch

        return InlineUpdates(policy, config, dump)

    def _open_sandbox(self) -> Sandbox:
        plugin, nodes = self._config.sandbox, self._place.sandbox.nodes
        with self._show_loading("sandbox"):
            if nodes and isinstance(plugin, PoolSandbox):
                from magrpo.sandboxes.ray import open_ray_sandbox  # ray, which is optional

                sandbox: Sandbox = open_ray_sandbox(plugin, nodes, self._place.fleet.address)
            else:
                sandbox = open_sandbox(plugin)
        if sandbox.level:
            self._on_sandbox(sandbox.level)
        return sandbox

    def _open_engine(self) -> Engine:
        host = EngineHost(
            self.lineup,
            self._engine_policy,
            fleet=self._fleet.get(),
            place=self._place.engine,
            num_served=self._lag + 1,
            shares_gpus=self._shares_gpus,
            logs=self._store.path / LOGS,
        )
        if self._place.engine.is_remote:
            gc.set_threshold(_ALLOCATIONS, 20, 10)
        with self._show_loading("engine"):
            return open_engine(self._config.engine, host)

    def _engine_policy(self) -> Policy:
        """The policy of an engine in this process: that of the updates, unless these run while it samples."""
        with self._opening:
            return self._load_policy() if self._lag or self._place.update.ranks else self._policy

    @property
    def _shares_gpus(self) -> bool:
        """Whether engine and updates use the same GPUs by turns."""
        return not self._lag and (self._place.update.colocate or not self._place.engine.is_remote)

    def _find_device(self) -> torch.device | None:
        """The device of weights that only other processes hold, whether or not this machine has one; else None."""
        import torch  # half a second

        is_elsewhere = self._place.engine.is_remote and self._place.update.ranks > 0
        return torch.device("cuda") if is_elsewhere and self._config.model.device == "cuda" else None

    def serve_checkpoint(self, checkpoint: Pointer) -> Served:
        """Load the weights of ``checkpoint`` into the engine and wake it. May be called from several threads."""
        weights = locate_weights(self._store.folder(checkpoint), _names_of(self._config.agents))
        return self._serve(checkpoint["sha"], checkpoint_iteration(checkpoint), weights)

    def serve_row(self, row: BaselineRow, untrained: Pointer) -> Served:
        """Load the weights named by ``row``, which match no checkpoint, into the engine."""
        weights = locate_weights(self._store.folder(untrained), _names_of(row.agents)) | start_weights(row.agents)
        version = self._rows.setdefault(row.name, len(self._rows) + 1)
        return self._serve(f"row {row.name}", version, weights)

    def free_gpus(self) -> None:
        """Let the engine release its GPU memory for an update, unless it samples meanwhile."""
        if self._served and self._shares_gpus:
            self._engine.get().sleep()

    def discard_dead(self, error: EngineError | SandboxDied, discarded_before: Counter[str]) -> None:
        """Close the engine or the sandbox, whose death ``error`` reports; the next use opens a new one.

        No-op if another thread has done so since :attr:`num_discarded` was ``discarded_before``.
        """
        is_engine = isinstance(error, EngineError)
        name, lock = ("engine", self._serving) if is_engine else ("sandbox", self._opening)
        with lock:
            if self.num_discarded[name] != discarded_before[name]:
                return
            self.num_discarded[name] += 1
            if is_engine:
                self._served.clear()
                self._engine.discard()
            else:
                self._sandbox.discard()

    def close(self) -> None:
        """Close everything. Steps in progress in other threads fail."""
        # The fleet is closed last: it ends the processes of the others.
        parts: Sequence[_Part[Any]] = (self._fleet, self._workers, self._sandbox, self._updates, self._engine)
        with ExitStack() as stack:
            for part in parts:
                stack.callback(part.close)

    def _serve(self, name: str, version: int, weights: Mapping[str, Path]) -> Served:
        """Load the weights called ``name``, which replace the oldest version if the engine holds too many."""
        with self._serving:
            if self._served:
                self._engine.get().wake()
            if name not in self._served:
                if len(self._served) > self._lag:
                    oldest = min(self._served, key=lambda served: self._served[served][0])
                    self._served.pop(oldest)[1].close()
                self._served[name] = version, serve_weights(self._engine.get(), version, weights)
            return self._served[name][1]


def _names_of(agents: Sequence[AgentConfig]) -> list[str]:
    return [agent.name for agent in agents]
