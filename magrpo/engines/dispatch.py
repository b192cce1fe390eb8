"""Which server of a pool answers which request, and what happens to the requests of a server that is lost.

Siblings of a prompt are one parcel for one server, which computes their prompt once. The free server with the fewest
requests takes the next parcel, longest prompt first. A completion depends on its request and its adapter alone: what a
lost server leaves unfinished is asked of others, with the same seeds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from magrpo.engines import Completion, EngineError
from magrpo.engines.http import Refused, ServerFailed, open_session
from magrpo.engines.probes import TOLERANCES
from magrpo.engines.servers import Adapter, PooledServer, Terms, WrongServer
from magrpo.fleets import Job, ProcessDied
from magrpo.plugins import ConfigError
from magrpo.types import Request

if TYPE_CHECKING:
    from magrpo.engines.host import EngineHost

log = logging.getLogger(__name__)
_FAILURES_IN_A_ROW = 3
"""Failures after which a server leaves the pool."""
_FAILURES_OF_A_REQUEST = 10
"""Failures, at whatever servers, after which a request ends its batch."""


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


@dataclass(eq=False)
class Batch:
    """Requests, what each of them needs, and the queue of their completions by number; an exception ends it."""

    requests: Sequence[Request]
    adapters: Sequence[Adapter | None]
    bases: Sequence[str]
    stop_token_ids: Sequence[Sequence[int]]
    answers: SimpleQueue[tuple[int, Completion] | BaseException] = field(default_factory=SimpleQueue)


@dataclass(eq=False)
class _Item:
    """One request of a batch."""

    batch: Batch
    number: int
    failures: int = 0
    failed_at: set[PooledServer] = field(default_factory=set)

    @property
    def request(self) -> Request:
        return self.batch.requests[self.number]

    @property
    def base(self) -> str:
        return self.batch.bases[self.number]


class Dispatcher:
    """The servers, the parcels that wait for one, and the requests in flight. Lives on one event loop."""

    def __init__(self, host: EngineHost, terms: Terms, patience: Patience) -> None:
        self._host, self._terms, self._patience = host, terms, patience
        self._serving: dict[PooledServer, dict[_Item, asyncio.Task[None]]] = {}
        self._joining: set[PooledServer] = set()
        self._out: set[PooledServer] = set()
        self._waiting: dict[str, list[tuple[int, list[_Item]]]] = {base: [] for base in terms.windows}  # heaps
        self._later, self._sooner = itertools.count(), itertools.count(-1, -1)
        self._batches: set[Batch] = set()
        self._adapters: dict[str, Adapter] = {}
        self._uses: Counter[str] = Counter()
        self._chores: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    @classmethod
    async def open(cls, host: EngineHost, jobs: Mapping[str, Job], key: str | None, patience: Patience) -> Dispatcher:
        """Start or find the servers. Raises EngineError if a base has none, ConfigError if one rejects the key."""
        lineup, place = host.lineup, host.place
        windows = {lineup.base(agent): lineup.max_length(agent) for agent in lineup.agents}
        tolerance = TOLERANCES[str(lineup.dtype).removeprefix("torch.")]
        terms = Terms(open_session(), key, windows, tolerance, place.max_batch, patience.deadline_s, patience.start_s,
                      patience.silence_s)  # fmt: skip
        dispatcher = cls(host, terms, patience)
        try:
            await dispatcher._open_servers(jobs)
        except BaseException:
            await dispatcher.close()
            raise
        return dispatcher

    async def close(self) -> None:
        """Unload all adapters from the servers of others, and stop one's own."""
        tasks = [*self._chores, *itertools.chain.from_iterable(tasks.values() for tasks in self._serving.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        foreign = [server for server in self._serving if server.job is None]
        await asyncio.gather(*(self._unload(server, list(self._adapters)) for server in foreign))
        for chore in self._chores:
            chore.cancel()
        servers = (*self._serving, *self._joining, *self._out)
        own = [server.running for server in servers if server.running is not None]
        await asyncio.gather(*(asyncio.to_thread(running.stop) for running in own))
        await self._terms.session.close()

    # ---------------------------------------------------------------------------------------------------- batches
    def begin(self, batch: Batch) -> None:
        """Ask for the completions of ``batch``; they arrive in its queue."""
        self._batches.add(batch)
        items = [_Item(batch, number) for number in range(len(batch.requests))]
        parcels = sorted(_group_siblings(items), key=lambda parcel: -len(parcel[0].request.prompt_ids))
        for parcel in parcels:
            heapq.heappush(self._waiting[parcel[0].base], (next(self._later), parcel))
        self._dispatch()
        self._fail_stranded()

    def end(self, batch: Batch) -> None:
        """Nobody waits for ``batch`` any more."""
        self._batches.discard(batch)
        for tasks in self._serving.values():
            for item in [item for item in tasks if item.batch is batch]:
                tasks.pop(item).cancel()
        self._dispatch()

    def _dispatch(self) -> None:
        """Hand waiting parcels to servers that are free."""
        for waiting in self._waiting.values():
            postponed = []
            while waiting:
                order, parcel = heapq.heappop(waiting)
                parcel = [item for item in parcel if item.batch in self._batches]
                if not parcel:
                    continue
                candidates = [server for server in self._serving if server.base == parcel[0].base]
                untried = [server for server in candidates if server not in parcel[0].failed_at]
                free = [s for s in untried or candidates if len(self._serving[s]) < self._terms.max_batch]
                if free:
                    server = min(free, key=lambda server: len(self._serving[server]))
                    for item in parcel:
                        self._serving[server][item] = asyncio.create_task(self._ask(server, item))
                    continue
                postponed.append((order, parcel))
                if not parcel[0].failed_at:
                    break  # every server is busy
            for entry in postponed:
                heapq.heappush(waiting, entry)

    async def _ask(self, server: PooledServer, item: _Item) -> None:
        """Ask a server for one completion, and decide what a failure means."""
        batch, number = item.batch, item.number
        try:
            async with server.slots:
                completion = await server.complete(batch.adapters[number], item.request, batch.stop_token_ids[number])
        except ServerFailed as error:
            self._serving[server].pop(item, None)
            self._handle_failure(server, item, error)
        except Refused as error:
            self._serving[server].pop(item, None)
            self._fail(batch, EngineError(str(error)))
        except Exception as error:  # noqa: BLE001  # a fault of this program, which the waiting thread must hear of
            self._fail(batch, error)
        else:
            self._serving[server].pop(item, None)
            server.failures = 0
            batch.answers.put((number, completion))
        self._dispatch()

    def _handle_failure(self, server: PooledServer, item: _Item, error: ServerFailed) -> None:
        item.failures += 1
        item.failed_at.add(server)
        server.failures += 1
        log.info("a completion is asked for again: %s", error)
        self._put_back([item])
        if item.failures >= _FAILURES_OF_A_REQUEST:
            self._fail(item.batch, EngineError(f"one completion failed {item.failures} times, at last: {error}"))
        if isinstance(error, WrongServer) or server.failures >= _FAILURES_IN_A_ROW:
            self._remove(server, str(error))

    def _put_back(self, items: Iterable[_Item]) -> None:
        """Let what was lost go first."""
        for parcel in _group_siblings(items):
            heapq.heappush(self._waiting[parcel[0].base], (next(self._sooner), parcel))

    def _fail(self, batch: Batch, error: BaseException) -> None:
        self._batches.discard(batch)
        batch.answers.put(error)

    def _fail_stranded(self) -> None:
        """End the batches that wait for servers of which none is left."""
        for base, waiting in self._waiting.items():
            if not self._is_left(base):
                for batch in {item.batch for _, parcel in waiting for item in parcel} & self._batches:
                    self._fail(batch, self._describe_loss(base))

    # ---------------------------------------------------------------------------------------------------- servers
    async def _open_servers(self, jobs: Mapping[str, Job]) -> None:
        urls = self._host.place.servers
        servers = [] if jobs or isinstance(urls, int) else [PooledServer(self._terms, url) for url in urls]
        for base, job in jobs.items():
            assert self._host.fleet is not None
            try:
                copies = await asyncio.to_thread(self._host.fleet.start, job)
            except ProcessDied as error:
                raise EngineError(str(error)) from None
            servers += [PooledServer(self._terms, base=base, job=job, running=copy) for copy in copies]
        self._joining.update(servers)
        for obstacle in await asyncio.gather(*(self._try_joining(server) for server in servers)):
            if isinstance(obstacle, Refused):
                raise ConfigError(str(obstacle))
        for base in self._terms.windows:
            if not self._is_left(base):
                raise self._describe_loss(base)
        for server in list(self._out):
            log.warning("%s: %s", server, server.reason)
            self._call_back(server)

    async def _try_joining(self, server: PooledServer) -> ServerFailed | Refused | None:
        """Let a server join if it can; returns why it could not."""
        try:
            await server.join()
            for adapter in self._adapters_for(server):
                await server.load_adapter(adapter)
        except (ServerFailed, Refused) as error:
            server.reason = str(error)
            self._joining.discard(server)
            self._out.add(server)
            return error
        self._joining.discard(server)
        self._out.discard(server)
        self._serving[server], server.failures = {}, 0
        self._spawn(self._watch(server))
        self._dispatch()
        await self._announce()
        return None

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _remove(self, server: PooledServer, reason: str) -> None:
        """Take a server out of the pool, hand its requests to others, and see to its return."""
        tasks = self._serving.pop(server, None)
        if tasks is None:
            return
        for task in tasks.values():
            task.cancel()
        self._put_back(tasks)
        server.reason = reason
        log.warning("%s is out of the pool: %s; %d requests go to others", server, reason, len(tasks))
        self._call_back(server)
        self._dispatch()

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
            log.warning("starting %s again, restart %d of %d", server, server.restarts, restarts)
            try:
                await server.restart(fleet)
            except ServerFailed as error:
                server.reason = str(error)
                continue
            if await self._try_joining(server) is None:
                log.warning("%s is in the pool", server)
                return
            log.warning("%s did not come back: %s", server, server.reason)
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
        self._fail_stranded()
        await self._announce()

    async def _watch(self, server: PooledServer) -> None:
        """Take the server out if it falls silent with requests in flight."""
        while server in self._serving:
            await asyncio.sleep(self._patience.check_s)
            if self._serving.get(server):
                try:
                    await server.check_health()
                except (ServerFailed, Refused) as error:
                    self._remove(server, str(error))

    def _is_left(self, base: str) -> bool:
        """Whether a server of ``base`` is in the pool or on its way."""
        return any(server.base in ("", base) for server in (*self._serving, *self._joining))

    def _describe_loss(self, base: str) -> EngineError:
        reasons = "; ".join(f"{server}: {server.reason}" for server in self._out if server.base in ("", base))
        return EngineError(f"no vLLM server of {base} is left ({reasons or 'none of those given serves it'})")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._finish_chore)

    def _finish_chore(self, task: asyncio.Task[None]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            for batch in list(self._batches):
                self._fail(batch, error)

    # --------------------------------------------------------------------------------------------------- adapters
    async def open_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Load adapters into all servers. Raises EngineError if no server is left that could."""
        self._adapters |= {adapter.name: adapter for adapter in adapters}
        self._uses.update(adapter.name for adapter in adapters)
        for server in (*self._serving, *self._joining, *self._out):
            server.restarts = 0
        for server in [server for server in self._out if server.job is not None]:
            self._call_back(server)
        await asyncio.gather(*(self._load(server) for server in list(self._serving)))
        for base in {adapter.base for adapter in adapters}:
            async with self._changed:
                await self._changed.wait_for(lambda base=base: self._is_served(base) or not self._is_left(base))  # type: ignore[misc]
            if not self._is_left(base):
                await self.close_adapters(adapters)
                raise self._describe_loss(base)

    async def close_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Unload adapters from all servers, unless they are in use elsewhere."""
        self._uses.subtract(adapter.name for adapter in adapters)
        unused = [adapter.name for adapter in adapters if self._uses[adapter.name] <= 0]
        for name in unused:
            self._adapters.pop(name, None)
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
        for adapter in self._adapters_for(server):
            await self._keep(server, server.load_adapter(adapter))

    async def _unload(self, server: PooledServer, names: Sequence[str]) -> None:
        for name in names:
            await self._keep(server, server.unload_adapter(name))

    async def _keep(self, server: PooledServer, work: Coroutine[Any, Any, object]) -> None:
        """Wait for ``work`` of a server, which leaves the pool if it fails."""
        try:
            await work
        except (ServerFailed, Refused) as error:
            self._remove(server, str(error))

    def _adapters_for(self, server: PooledServer) -> list[Adapter]:
        return [adapter for adapter in self._adapters.values() if adapter.base == server.base]

    def _is_served(self, base: str) -> bool:
        return any(server.base == base for server in self._serving)


def _group_siblings(items: Iterable[_Item]) -> list[list[_Item]]:
    """The items of one batch, agent and prompt together, in their order."""
    parcels: dict[tuple[int, str, tuple[int, ...]], list[_Item]] = defaultdict(list)
    for item in items:
        parcels[(id(item.batch), item.request.agent, item.request.prompt_ids)].append(item)
    return list(parcels.values())
