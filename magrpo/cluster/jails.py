"""The sandbox over nodes of a cluster: an actor with a pool of jails on each, to which programs are dealt in chunks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from magrpo.cluster.connection import Cluster, StartedActor, start_actor
from magrpo.cluster.dealing import MAX_RESTARTS, Crew, NotOpen
from magrpo.interfaces import Progress
from magrpo.sandboxes import STRENGTH, SandboxDied
from magrpo.sandboxes.pool import Pool, PoolSandbox
from magrpo.types import Case, Execution, ExecutionReport

MIN_CHUNK, MAX_CHUNK = 8, 32
"""Smallest and largest number of executions in a chunk, if there are as many."""
_CHUNKS_AT_ONCE = 2
"""Chunks at a node: while the last programs of one are running, the next begins."""


class Jails(StartedActor):
    """The actor: the jails of one node."""

    def __init__(self, plugin: PoolSandbox) -> None:
        self._plugin = plugin
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    def open(self) -> str:
        """Start the jails unless they are started; returns their isolation level. Raises SandboxError."""
        with self._lock:
            self._pool = self._pool or self._plugin.open()
            return self._pool.level

    def work(self, executions: Sequence[Execution]) -> list[ExecutionReport]:
        """Run a chunk. After SandboxDied, :meth:`open` starts other jails; until then, it raises NotOpen."""
        pool = self._pool
        if pool is None:
            raise NotOpen
        try:
            return pool.run(executions)
        except SandboxDied:
            with self._lock:
                self._pool = None if self._pool is pool else self._pool
            pool.close()
            raise


class ClusterSandbox:
    """A :class:`magrpo.interfaces.Sandbox` whose jails are on ``nodes`` nodes of a cluster.

    Raises ConfigError or SandboxError if a node cannot open the jails, and SandboxDied if there are too few nodes.
    """

    def __init__(self, cluster: Cluster, plugin: PoolSandbox, nodes: int) -> None:
        self._group = placement_group([{"CPU": 1}] * nodes, strategy="STRICT_SPREAD")
        options = {"num_cpus": 1, "max_restarts": MAX_RESTARTS, "max_concurrency": _CHUNKS_AT_ONCE}
        strategies = [PlacementGroupSchedulingStrategy(self._group, i) for i in range(nodes)]
        actors = [start_actor(Jails, {**options, "scheduling_strategy": at}, plugin) for at in strategies]
        self._crew = Crew(cluster, "sandbox nodes", actors * _CHUNKS_AT_ONCE, SandboxDied, (SandboxDied,))
        try:
            levels = self._crew.open()
        except BaseException:
            self.close()
            raise
        self.level = min(levels, key=lambda level: STRENGTH[level])

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        """One report for each execution, in order; equal executions run once.

        Raises SandboxDied if no node is left. Executions whose chunk lost three actors report ``infra_error``.
        """
        counts = Counter(executions)
        distinct = list(counts)
        fair_share = len(distinct) // (2 * max(len(self._crew.actors), 1))
        size = min(max(fair_share, MIN_CHUNK), MAX_CHUNK)
        chunks = [distinct[i : i + size] for i in range(0, len(distinct), size)]
        reports: dict[Execution, ExecutionReport] = {}
        with closing(self._crew.deal(chunks)) as results:
            for number, result in results:
                of_chunk = result
                if isinstance(result, SandboxDied):
                    failure = ExecutionReport("infra_error", (Case("infra_error", str(result)),), self.level)
                    of_chunk = [failure] * len(chunks[number])
                for execution, report in zip(chunks[number], of_chunk, strict=True):
                    reports[execution] = report
                    if progress:
                        progress(counts[execution])
        return [reports[execution] for execution in executions]

    def close(self) -> None:
        """Kill the jails on all nodes. May be called twice."""
        try:
            with self._crew.cluster.hold(SandboxDied("the sandbox was closed")):
                self._crew.close()
                remove_placement_group(self._group)
        except SandboxDied:  # the connection is closed, and Ray has removed the group
            return
