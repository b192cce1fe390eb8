"""The heavy parts of a run, each opened when first needed."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from magrpo.assets import locate_model
from magrpo.checks.runners import open_engine_plugin, open_sandbox, serve_weights
from magrpo.config.agents import start_weights
from magrpo.config.run import BaselineRow, RunConfig
from magrpo.engines import EngineError
from magrpo.envs.program import AgentProgram
from magrpo.model.host import EngineHost
from magrpo.run.files import checkpoint_iteration, locate_weights, read_place
from magrpo.run.steps import Step
from magrpo.run.store import Pointer, RunStore
from magrpo.sandboxes import SandboxDied
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.stages.checkpoints import check_bases

if TYPE_CHECKING:
    import torch

    from magrpo.cluster.connection import Cluster
    from magrpo.gateway.player import EpisodePlayer
    from magrpo.interfaces import Engine, Sandbox, Served, Updates
    from magrpo.model.lineup import Lineup
    from magrpo.model.policy import Policy

log = logging.getLogger(__name__)


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


def _forget_start(config: RunConfig, store: RunStore) -> RunConfig:
    """The configuration without the folders to start from once checkpoint 0 holds their weights."""
    if not store.is_committed(Step("start", 0).output):
        return config
    agents = tuple(agent.model_copy(update={"start_from": None}) for agent in config.agents)
    return config.model_copy(update={"agents": agents})


def _locate_agents(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths of the agents' folders: actors of a cluster work in other folders."""
    agents = []
    for agent in config.agents:
        paths = {"model": agent.model, "start_from": agent.start_from and agent.start_from.absolute()}
        if locate_model(agent.model) == agent.model and Path(agent.model).is_dir():
            paths["model"] = os.path.join(Path.cwd(), agent.model)  # noqa: PTH118  two spellings stay two bases
        agents.append(agent.model_copy(update=paths))
    return config.model_copy(update={"agents": tuple(agents)})


class RunResources:
    """Lineup, updates, engine and sandbox of one run.

    ``on_sandbox`` takes the isolation level of an opened sandbox; ``show_loading`` shows what its block loads.
    """

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        on_sandbox: Callable[[str], None],
        show_loading: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._config, self._store = _locate_agents(_forget_start(config, store)), store
        self._on_sandbox, self._show_loading = on_sandbox, show_loading
        self._place = read_place(store)
        self._lag = 0 if config.baselines.rows else config.train.lag
        self.num_discarded: Counter[str] = Counter()
        """How often engine and sandbox were closed because they had died, by name."""
        self._opening, self._serving = RLock(), RLock()
        self._cluster = _Part(self._open_cluster, self._opening)
        self._sandbox = _Part(self._open_sandbox, self._opening)
        self._player = _Part(self._open_player, self._opening)
        self._updates = _Part(self._open_updates, self._opening)
        self._engine = _Part(self._open_engine, self._serving)
        self._served: dict[str, tuple[int, Served]] = {}
        """Version of each set of weights that the engine holds, by name."""
        self._rows: dict[str, int] = {}  # number of each row of baselines, by name

    @property
    def lineup(self) -> Lineup:
        with self._opening:
            return self._lineup

    def open_updates(self) -> Updates:
        """Return the part that computes updates, opened once. Call :meth:`free_gpus` before."""
        if self._lag and not self._engine.is_open:
            # Its policy must not be loaded while an update computes: loading sets torch's defaults.
            self._engine.get()
        return self._updates.get()

    @property
    def policy(self) -> Policy:
        """The policies in this process, which updates share. Call :meth:`free_gpus` before."""
        with self._opening:
            return self._policy

    @property
    def sandbox(self) -> Sandbox:
        return self._sandbox.get()

    @property
    def player(self) -> EpisodePlayer | None:
        return self._player.get() if isinstance(self._config.env, AgentProgram) else None

    @cached_property
    def _lineup(self) -> Lineup:
        with self._show_loading("libraries"):
            from magrpo.model.lineup import Lineup  # torch, transformers

        config = self._config
        lineup = Lineup.open(config.agents, config.model, config.lora, self._find_device())
        check_bases(self._store, lineup)
        return lineup

    @cached_property
    def _policy(self) -> Policy:
        return self._load_policy()

    def _load_policy(self) -> Policy:
        lineup = self.lineup
        from magrpo.model.policy import Policy  # peft

        with self._show_loading("base model"):
            return Policy.of(lineup, self._config.train.seed)

    def _open_player(self) -> EpisodePlayer:
        env = self._config.env
        assert isinstance(env, AgentProgram)
        from magrpo.gateway.player import EpisodePlayer  # aiohttp

        return EpisodePlayer(env, self._lineup)

    def _open_cluster(self) -> Cluster:
        from magrpo.cluster.connection import Cluster  # only runs that need it may import ray

        with self._show_loading("Ray"):
            return Cluster(self._place.address)

    def _open_updates(self) -> Updates:
        config, dump = self._config, self._store.path / "failed-batch"
        if self._place.ranks.count:
            _ = self.lineup  # compares the base models, which the ranks open for themselves
            cluster = self._cluster.get()
            from magrpo.cluster.ranks import RanksUpdates  # ray, torch

            return RanksUpdates(cluster, self._place, config, dump)
        policy = self._policy
        from magrpo.updates.inline import InlineUpdates  # torch

        return InlineUpdates(policy, self._settle_micro_batches(), dump)

    def _settle_micro_batches(self) -> RunConfig:
        """The configuration of updates in this process, with micro-batches that suit the GPU if they are ``auto``."""
        config, lineup = self._config, self.lineup
        if config.optim.micro_batch_tokens != "auto" or lineup.device.type != "cuda":
            return config
        import torch  # half a second

        from magrpo.planning.card import settle_micro_batches  # transformers

        _, card = torch.cuda.mem_get_info()
        settled = settle_micro_batches(config, lineup.dtype.itemsize, card)
        tokens = settled.optim.micro_batch_tokens
        log.info("updates in micro-batches of %s tokens, chosen for a GPU of %.1f GiB", tokens, card / 2**30)
        return settled

    def _open_sandbox(self) -> Sandbox:
        plugin, nodes = self._config.sandbox, self._place.jails.nodes
        with self._show_loading("sandbox"):
            if nodes and isinstance(plugin, PoolSandbox):
                cluster = self._cluster.get()
                from magrpo.cluster.jails import ClusterSandbox  # ray

                sandbox: Sandbox = ClusterSandbox(cluster, plugin, nodes)
            else:
                sandbox = open_sandbox(plugin)
        if sandbox.level:
            self._on_sandbox(sandbox.level)
        return sandbox

    def _open_engine(self) -> Engine:
        num_served = self._lag + 1
        if self._place.samplers.count:
            cluster = self._cluster.get()
            from magrpo.cluster.samplers import SamplerEngine  # ray, torch

            lineup = self.lineup
            with self._show_loading("engine"):
                return SamplerEngine(cluster, self._place, self._config, lineup, num_served)
        host = EngineHost(self.lineup, self._engine_policy, num_served=num_served)
        with self._show_loading("engine"):
            return open_engine_plugin(self._config.engine, host)

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

    def serve_checkpoint(self, checkpoint: Pointer) -> Served:
        """Load the weights of ``checkpoint`` into the engine and wake it. May be called from several threads."""
        weights = locate_weights(self._store.folder(checkpoint), [agent.name for agent in self._config.agents])
        return self._serve(checkpoint["sha"], checkpoint_iteration(checkpoint), weights)

    def serve_row(self, row: BaselineRow, untrained: Pointer) -> Served:
        """Load the weights named by ``row``, which match no checkpoint, into the engine."""
        names = [agent.name for agent in row.agents]
        weights = locate_weights(self._store.folder(untrained), names) | start_weights(row.agents)
        version = self._rows.setdefault(row.name, len(self._rows) + 1)
        return self._serve(f"row {row.name}", version, weights)

    def free_gpus(self) -> None:
        """Let the engine release its GPU memory for an update, unless it samples meanwhile."""
        if self._served and self._shares_gpus:
            self._engine.get().sleep()

    def discard_dead(self, error: EngineError | SandboxDied, discarded_before: Counter[str]) -> None:
        """Close the part whose death ``error`` reports; the next use opens another one.

        No-op if another thread has done so since :attr:`num_discarded` was ``discarded_before``.
        """
        part: _Part[Any]
        if isinstance(error, EngineError):
            name, part, lock = "engine", self._engine, self._serving
        else:
            name, part, lock = "sandbox", self._sandbox, self._opening
        with lock:
            if self.num_discarded[name] != discarded_before[name]:
                return
            self.num_discarded[name] += 1
            if part is self._engine:
                self._served.clear()
            part.discard()

    def close(self) -> None:
        """Close everything. Steps in progress in other threads fail."""
        # A stack closes in reverse: the cluster goes last, because the others still speak to their actors.
        parts: Sequence[_Part[Any]] = (self._cluster, self._sandbox, self._player, self._updates, self._engine)
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
