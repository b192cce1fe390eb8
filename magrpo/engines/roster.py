"""The servers of a pool: which of them take part, what weights they hold, and how those that were lost come back."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from magrpo.engines import EngineError
from magrpo.engines.http import Refused, ServerFailed
from magrpo.engines.named_weights import NamedWeights, ServerGroup
from magrpo.engines.servers import PooledServer, Terms
from magrpo.fleets import Job, ProcessDied
from magrpo.plugins import ConfigError

if TYPE_CHECKING:
    from magrpo.model.host import EngineHost

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long a pool waits, in seconds."""

    deadline_s: float = 3600.0
    """For one completion."""
    start_s: float = 900.0
    """For a server to start."""
    silence_s: float = 60.0
    """For a server to say that it is well."""
    check_s: float = 5.0
    """Between two such questions to a server that works."""
    return_s: float = 10.0
    """Before a server that somebody else runs is tried again."""


class RosterListener(Protocol):
    """Who gives work to the servers."""

    def add_server(self, server: PooledServer) -> None:
        """A server has joined."""

    def drop_server(self, server: PooledServer) -> int:
        """A server has left; returns the number of requests that others answer now."""

    def is_busy(self, server: PooledServer) -> bool:
        """Whether a server has requests in flight."""

    def fail_stranded(self) -> None:
        """A group may have no server left: end what waits for it."""

    def fail_all(self, error: BaseException) -> None:
        """End all work, because of a fault of this program."""


class Roster:
    """The servers of a pool and the weights that are open. Lives on one event loop."""

    def __init__(self, host: EngineHost, terms: Terms, patience: Patience, listener: RosterListener) -> None:
        self._host, self._terms, self._patience, self._listener = host, terms, patience, listener
        self._serving: dict[PooledServer, None] = {}
        self._joining: set[PooledServer] = set()
        self._out: set[PooledServer] = set()
        self._weights: dict[str, NamedWeights] = {}
        self._uses: Counter[str] = Counter()
        self._chores: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    async def open_servers(self, jobs: Mapping[ServerGroup, Job]) -> None:
        """Start or find the servers. Raises EngineError if a group has none, ConfigError if one refuses to serve us."""
        urls = self._host.place.servers
        servers = [] if jobs or isinstance(urls, int) else [PooledServer(self._terms, url) for url in urls]
        for group, job in jobs.items():
            assert self._host.fleet is not None
            try:
                copies = await asyncio.to_thread(self._host.fleet.start, job)
            except ProcessDied as error:
                raise EngineError(str(error)) from None
            servers += [PooledServer(self._terms, group=group, job=job, running=copy) for copy in copies]
        self._joining.update(servers)
        for obstacle in await asyncio.gather(*(self._try_joining(server) for server in servers)):
            if isinstance(obstacle, Refused):
                raise ConfigError(str(obstacle))
        for group in self._terms.windows:
            if not self.is_left(group):
                raise self.describe_loss(group)
        for server in list(self._out):
            log.warning("%s: %s", server, server.reason)
            self._call_back(server)

    async def close(self) -> None:
        """Unload all adapters from the servers of others, and stop one's own."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        foreign = [server for server in self._serving if server.job is None]
        await asyncio.gather(*(self._unload(server, list(self._weights)) for server in foreign))
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*(server.close() for server in (*self._serving, *self._joining, *self._out)))

    def list_serving(self, group: ServerGroup) -> list[PooledServer]:
        """The servers of ``group`` that take part, in the order in which they joined."""
        return [server for server in self._serving if server.group == group]

    def is_left(self, group: ServerGroup) -> bool:
        """Whether a server of ``group`` takes part or is on its way."""
        return any(server.group in (None, group) for server in (*self._serving, *self._joining))

    def describe_loss(self, group: ServerGroup) -> EngineError:
        """The error of a group without servers."""
        reasons = "; ".join(f"{server}: {server.reason}" for server in self._out if server.group in (None, group))
        if group.agent:
            none = f"no configured server is free to serve only agent {group.agent!r}"
        else:
            none = "no configured server serves it"
        return EngineError(f"no vLLM server of {group} is left ({reasons or none})")

    def remove(self, server: PooledServer, reason: str) -> None:
        """Take a server out of the pool, hand its requests to others, and see to its return."""
        if server not in self._serving:
            return
        del self._serving[server]
        server.reason = reason
        count = self._listener.drop_server(server)
        log.warning("%s was removed from the pool: %s; %d requests move to other servers", server, reason, count)
        self._call_back(server)

    # ----------------------------------------------------------------------------------------------- coming back
    async def _try_joining(self, server: PooledServer) -> ServerFailed | Refused | None:
        """Let a server join if it can; returns why it could not."""
        try:
            await server.join()
            for weights in self._adapters_for(server):
                await server.load_weights(weights)
        except (ServerFailed, Refused) as error:
            server.reason = str(error)
            self._joining.discard(server)
            self._out.add(server)
            return error
        self._joining.discard(server)
        self._out.discard(server)
        self._serving[server], server.failures = None, 0
        self._spawn(self._watch(server))
        self._listener.add_server(server)
        await self._announce()
        return None

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _call_back(self, server: PooledServer) -> None:
        """Start a server again, or try one of somebody else again."""
        self._out.discard(server)
        self._joining.add(server)
        self._spawn(self._restart(server) if server.job is not None else self._retry(server))

    async def _restart(self, server: PooledServer) -> None:
        fleet, restarts = self._host.fleet, self._host.place.restarts
        assert fleet is not None
        while server.restarts < restarts:
            server.restarts += 1
            log.warning("restarting %s, attempt %d of %d", server, server.restarts, restarts)
            try:
                await server.restart(fleet)
            except ServerFailed as error:
                server.reason = str(error)
                continue
            if await self._try_joining(server) is None:
                log.warning("%s is in the pool", server)
                return
            log.warning("%s did not rejoin the pool: %s", server, server.reason)
            self._out.discard(server)
            self._joining.add(server)
        await self._give_up(server)

    async def _retry(self, server: PooledServer) -> None:
        """Try until the server is back; the batches do not wait for more than the first attempt."""
        while await self._try_joining(server) is not None:
            await self._give_up(server)
            await asyncio.sleep(self._patience.return_s)
        log.warning("%s is in the pool", server)

    async def _give_up(self, server: PooledServer) -> None:
        self._joining.discard(server)
        self._out.add(server)
        self._listener.fail_stranded()
        await self._announce()

    async def _watch(self, server: PooledServer) -> None:
        """Take the server out if it falls silent with requests in flight."""
        while server in self._serving:
            await asyncio.sleep(self._patience.check_s)
            if self._listener.is_busy(server):
                try:
                    await server.check_health()
                except (ServerFailed, Refused) as error:
                    self.remove(server, str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._finish_chore)

    def _finish_chore(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._listener.fail_all(error)

    # --------------------------------------------------------------------------------------------------- weights
    async def open_weights(self, opened: Sequence[NamedWeights]) -> None:
        """Load adapters into all servers; full copies load when they generate.

        Raises EngineError if no server is left that could.
        """
        self._weights |= {weights.name: weights for weights in opened}
        self._uses.update(weights.name for weights in opened)
        for server in (*self._serving, *self._joining, *self._out):
            server.restarts = 0
        for server in [server for server in self._out if server.job is not None]:
            self._call_back(server)
        await asyncio.gather(*(self._load(server) for server in list(self._serving)))
        for group in {weights.group for weights in opened}:
            async with self._changed:
                await self._changed.wait_for(lambda group=group: self.list_serving(group) or not self.is_left(group))  # type: ignore[misc]
            if not self.is_left(group):
                await self.close_weights(opened)
                raise self.describe_loss(group)

    async def close_weights(self, closed: Sequence[NamedWeights]) -> None:
        """Unload adapters from all servers, unless they are in use elsewhere."""
        self._uses.subtract(weights.name for weights in closed)
        unused = [weights.name for weights in closed if self._uses[weights.name] <= 0]
        for name in unused:
            self._weights.pop(name, None)
        await asyncio.gather(*(self._unload(server, unused) for server in list(self._serving)))

    async def sleep(self) -> None:
        """Let all servers release GPU memory."""
        await self._tell_all(PooledServer.sleep)

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        await self._tell_all(PooledServer.wake)

    async def _tell_all(self, tell: Callable[[PooledServer], Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*(self._keep(server, tell(server)) for server in list(self._serving)))

    async def _load(self, server: PooledServer) -> None:
        for weights in self._adapters_for(server):
            await self._keep(server, server.load_weights(weights))

    async def _unload(self, server: PooledServer, names: Sequence[str]) -> None:
        for name in names:
            await self._keep(server, server.unload_weights(name))

    async def _keep(self, server: PooledServer, work: Coroutine[Any, Any, object]) -> None:
        """Wait for ``work`` of a server, which leaves the pool if it fails."""
        try:
            await work
        except (ServerFailed, Refused) as error:
            self.remove(server, str(error))

    def _adapters_for(self, server: PooledServer) -> list[NamedWeights]:
        """The open weights that a server holds side by side: none if it holds one full copy at a time."""
        adapters = [weights for weights in self._weights.values() if not weights.group.agent]
        return [weights for weights in adapters if weights.group == server.group]
