"""The sandbox over nodes of a Ray cluster: a pool of jails in an actor on each, programs sent to them in chunks."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magrpo.fleets.ray import Calls, connect_cluster, describe_error, disconnect_cluster
from magrpo.interfaces import Progress
from magrpo.plugins import ConfigError
from magrpo.sandboxes import STRENGTH, SandboxDied, SandboxError
from magrpo.sandboxes.pool import CLOSED, Pool, PoolSandbox
from magrpo.types import Case, Execution, ExecutionReport

log = logging.getLogger(__name__)
_CHUNK = (8, 32)
"""Minimum and maximum number of executions in a chunk."""
_IN_FLIGHT = 2
"""Chunks at an actor: one that runs and one that waits."""
_MAX_DEATHS = 3
"""Deaths of actors that one chunk may cause."""
_PLACEMENT_S = 900.0
"""Seconds within which the nodes must be there; a cluster that grows on demand has to start them in it."""
_WARNING_S = 5.0
"""Seconds of waiting for nodes after which a warning says so."""
_JOIN_S = 60.0
"""Seconds to wait for a new actor when none is left."""
_CLOSE_S = 10.0
"""Seconds that jails have to close before their actors are killed."""


def open_ray_sandbox(plugin: PoolSandbox, nodes: int, address: str = "auto") -> RaySandbox:
    """Open a pool of jails on each of ``nodes`` nodes of the cluster at ``address``.

    Raises ConfigError if no cluster answers, SandboxError if it has too few nodes or one offers only isolation weaker
    than ``min_level``.
    """
    ray = connect_cluster(address)
    try:
        return RaySandbox(ray, plugin, nodes)
    except BaseException:
        disconnect_cluster()
        raise


class Jails:
    """The actor: the jails of one node."""

    def __init__(self, plugin: PoolSandbox) -> None:
        self._plugin = plugin
        self._pool: Pool | None = None

    def open_pool(self) -> str:
        """Start the jails; returns their isolation level. Raises SandboxError."""
        self._pool = self._plugin.open()
        return self._pool.level

    def run_chunk(self, executions: Sequence[Execution]) -> list[ExecutionReport]:
        assert self._pool is not None
        return self._pool.run(executions)

    def close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()


@dataclass(eq=False)
class _Node:
    """An actor at one place of the placement group."""

    place: int
    actor: Any
    opening: Any
    """The reference to its isolation level."""
    is_open: bool = False


@dataclass(eq=False)
class _Chunk:
    executions: list[Execution]
    deaths: int = 0


class RaySandbox:
    """A :class:`magrpo.interfaces.Sandbox` over several nodes. A dead actor is replaced; its chunks go to others."""

    def __init__(self, ray: Any, plugin: PoolSandbox, nodes: int) -> None:
        from ray.util.placement_group import placement_group  # heavy: Ray

        self._ray, self._plugin = ray, plugin
        self._lock = threading.Lock()
        self._runs = Calls()
        selectors = [select_nodes(ray.nodes(), nodes)] * nodes
        self._group = placement_group([{"CPU": 1}] * nodes, strategy="STRICT_SPREAD", bundle_label_selector=selectors)
        self._nodes: list[_Node] = []
        try:
            self._wait_for_nodes(nodes)
            self._nodes = [self._start_node(place) for place in range(nodes)]
            levels = [self._admit(node) for node in self._nodes]
        except BaseException:
            self._remove_actors()
            raise
        self.level = min(levels, key=lambda level: STRENGTH[level])

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        """One report for each execution, in order; equal executions run once.

        Raises SandboxDied if no node is left or the sandbox is closed. Executions whose chunk lost three actors report
        ``infra_error``.
        """
        counts = Counter(executions)
        reports: dict[Execution, ExecutionReport] = {}
        with self._runs.enter(SandboxDied(CLOSED)):
            for done in self._run_chunks(list(counts)):
                for execution, report in done:
                    reports[execution] = report
                    if progress:
                        progress(counts[execution])
        return [reports[execution] for execution in executions]

    def close(self) -> None:
        """Kill the jails on all nodes. May be called twice."""
        if self._runs.close():
            self._remove_actors()
            self._runs.wait()
            disconnect_cluster()

    def _wait_for_nodes(self, nodes: int) -> None:
        if self._group.wait(_WARNING_S):
            return
        found = [node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]]
        cluster = f"the cluster has {sum(cpus >= 1 for cpus in found)} nodes with {sum(found):g} CPUs"
        free = f"{self._ray.available_resources().get('CPU', 0):g} of them free"
        text = "sandbox.nodes = %d: waiting at most %g s for that many nodes with a free CPU; %s, %s"
        log.warning(text, nodes, _PLACEMENT_S, cluster, free)
        if not self._group.wait(_PLACEMENT_S):
            raise SandboxError(f"sandbox.nodes = {nodes}: too few nodes had a free CPU within {_PLACEMENT_S:g} s")

    def _run_chunks(self, executions: list[Execution]) -> Iterator[list[tuple[Execution, ExecutionReport]]]:
        """The reports of each chunk, in the order in which they come."""
        size = min(max(len(executions) // (4 * len(self._nodes)), _CHUNK[0]), _CHUNK[1])
        waiting = deque(_Chunk(executions[i : i + size]) for i in range(0, len(executions), size))
        flying: dict[Any, tuple[_Chunk, _Node]] = {}
        while waiting or flying:
            while waiting and (node := self._find_free_node([at for _, at in flying.values()])):
                chunk = waiting.popleft()
                flying[node.actor.run_chunk.remote(chunk.executions)] = (chunk, node)
            reference = self._wait_for_one(flying)
            if reference is None:
                continue
            chunk, node = flying.pop(reference)
            try:
                reports = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                message = self._replace_node(node, error)
                chunk.deaths += 1
                if chunk.deaths < _MAX_DEATHS:
                    waiting.append(chunk)
                    continue
                failure = ExecutionReport("infra_error", (Case("infra_error", message),), self.level)
                reports = [failure] * len(chunk.executions)
            yield list(zip(chunk.executions, reports, strict=True))

    def _find_free_node(self, busy: Sequence[_Node]) -> _Node | None:
        """The open node with the fewest of ``busy``, the nodes of chunks in flight, if it may get another chunk."""
        with self._lock:
            loads = {node: busy.count(node) for node in self._nodes if node.is_open}
        free = min(loads, key=lambda node: loads[node], default=None)
        return free if free is not None and loads[free] < _IN_FLIGHT else None

    def _wait_for_one(self, flying: Mapping[Any, tuple[_Chunk, _Node]]) -> Any:
        """Wait for one chunk, or admit a node that has opened. Raises SandboxDied if there is neither."""
        with self._lock:
            openings = {node.opening: node for node in self._nodes if not node.is_open}
        ready: list[Any] = []
        if flying or openings:
            ready, _ = self._ray.wait([*flying, *openings], timeout=None if flying else _JOIN_S)
        if not ready:
            raise SandboxDied("no sandbox node is left")
        if ready[0] not in openings:
            return ready[0]
        try:
            self._admit(openings[ready[0]])
        except SandboxError as error:
            log.warning("%s", error)
            self._remove_node(openings[ready[0]])
        return None

    def _admit(self, node: _Node) -> str:
        """Wait until a node is open; returns its isolation level. Raises SandboxError if it cannot be used."""
        try:
            level: str = self._ray.get(node.opening)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise ConfigError(f"on a node of the cluster: {error.cause}") from None
            if not isinstance(error.cause, SandboxError):
                raise
            raise SandboxError(f"a node of the cluster cannot open a sandbox: {error.cause}") from None
        except self._ray.exceptions.RayError as error:
            raise SandboxDied(f"a sandbox node was lost while it opened: {describe_error(error)}") from None
        node.is_open = True
        return level

    def _replace_node(self, node: _Node, error: Exception) -> str:
        """Start an actor in place of one that died or found no working jail; returns what happened to it."""
        if self._runs.is_closed:
            raise SandboxDied(CLOSED) from None
        cause = error.cause if isinstance(error, self._ray.exceptions.RayTaskError) else None
        if cause is not None and not isinstance(cause, SandboxDied):
            raise error
        message = f"a sandbox node was lost: {cause or describe_error(error)}"
        if self._remove_node(node):
            log.warning("%s; its programs move to other nodes", message)
            new = self._start_node(node.place)
            with self._lock:
                self._nodes.append(new)
        return message

    def _remove_node(self, node: _Node) -> bool:
        """Kill a node's actor; False if another thread has done so."""
        with self._lock:
            if node not in self._nodes:
                return False
            self._nodes.remove(node)
        self._ray.kill(node.actor)
        return True

    def _start_node(self, place: int) -> _Node:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # heavy: Ray

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        options = {"num_cpus": 1, "max_concurrency": 2 * _IN_FLIGHT, "scheduling_strategy": strategy}
        actor = self._ray.remote(Jails).options(**options).remote(self._plugin)
        return _Node(place, actor, actor.open_pool.remote())

    def _remove_actors(self) -> None:
        from ray.util.placement_group import remove_placement_group  # heavy: Ray

        closings = [node.actor.close_pool.remote() for node in self._nodes if node.is_open]
        if closings:
            self._ray.wait(closings, num_returns=len(closings), timeout=_CLOSE_S)
        for node in self._nodes:
            self._ray.kill(node.actor)
        remove_placement_group(self._group)


def select_nodes(found: Sequence[Mapping[str, Any]], wanted: int) -> dict[str, str]:
    """A label selector for the nodes of jails: none with GPUs, if ``wanted`` others are among those that Ray lists."""
    able = [node for node in found if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    with_gpus = [node["NodeID"] for node in able if node["Resources"].get("GPU", 0)]
    if not with_gpus or len(able) - len(with_gpus) < wanted:
        return {}
    return {"ray.io/node-id": f"!in({','.join(with_gpus)})"}
