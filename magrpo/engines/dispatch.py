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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from magrpo.engines import Completion, EngineError
from magrpo.engines.http import Refused, ServerFailed, open_session
from magrpo.engines.named_weights import NamedWeights, ServerGroup
from magrpo.engines.probes import TOLERANCES
from magrpo.engines.roster import Patience, Roster
from magrpo.engines.servers import PooledServer, Terms, WrongServer
from magrpo.fleets import Job
from magrpo.types import Request

if TYPE_CHECKING:
    from magrpo.model.host import EngineHost

log = logging.getLogger(__name__)
CLOSED = "the engine was closed"
_FAILURES_IN_A_ROW = 3
"""Failures after which a server leaves the pool."""
_FAILURES_OF_A_REQUEST = 10
"""Failures, at whatever servers, after which a request ends its batch."""


@dataclass(eq=False)
class Batch:
    """Requests, what each of them needs, and the queue of their completions by number; an exception ends it."""

    requests: Sequence[Request]
    weights: Sequence[NamedWeights | None]
    groups: Sequence[ServerGroup]
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
    def group(self) -> ServerGroup:
        return self.batch.groups[self.number]


class Dispatcher:
    """The parcels that wait for a server, and the requests in flight. Lives on one event loop."""

    def __init__(self, host: EngineHost, terms: Terms, patience: Patience) -> None:
        self._terms = terms
        self.roster = Roster(host, terms, patience, self)
        self._in_flight: dict[PooledServer, dict[_Item, asyncio.Task[None]]] = {}
        self._waiting: dict[ServerGroup, list[tuple[int, list[_Item]]]] = {group: [] for group in terms.windows}
        """Heaps of parcels, each with its turn."""
        self._later, self._sooner = itertools.count(), itertools.count(-1, -1)
        self._batches: set[Batch] = set()
        self._closed = False

    @classmethod
    async def open(
        cls, host: EngineHost, jobs: Mapping[ServerGroup, Job], key: str | None, patience: Patience
    ) -> Dispatcher:
        """Start or find the servers; raises as :meth:`Roster.open_servers`."""
        lineup, place = host.lineup, host.place
        windows = {ServerGroup.of(lineup, agent): lineup.max_length(agent) for agent in lineup.agents}
        tolerance = TOLERANCES[str(lineup.dtype).removeprefix("torch.")]
        terms = Terms(open_session(), key, windows, tolerance, place.max_batch, patience.deadline_s, patience.start_s,
                      patience.silence_s)  # fmt: skip
        dispatcher = cls(host, terms, patience)
        try:
            await dispatcher.roster.open_servers(jobs)
        except BaseException:
            await dispatcher.close()
            raise
        return dispatcher

    async def close(self) -> None:
        """End all batches, and close the servers."""
        self._closed = True
        self.fail_all(EngineError(CLOSED))
        tasks = list(itertools.chain.from_iterable(tasks.values() for tasks in self._in_flight.values()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.roster.close()
        await self._terms.session.close()

    # ---------------------------------------------------------------------------------------------------- batches
    async def begin(self, batch: Batch) -> None:
        """Ask for the completions of ``batch``; they arrive in its queue."""
        if self._closed:
            raise EngineError(CLOSED)
        self._batches.add(batch)
        items = [_Item(batch, number) for number in range(len(batch.requests))]
        parcels = sorted(_group_siblings(items), key=lambda parcel: -len(parcel[0].request.prompt_ids))
        for parcel in parcels:
            heapq.heappush(self._waiting[parcel[0].group], (next(self._later), parcel))
        self._dispatch()
        self.fail_stranded()

    async def end(self, batch: Batch) -> None:
        """Nobody waits for ``batch`` any more."""
        self._batches.discard(batch)
        for tasks in self._in_flight.values():
            for item in [item for item in tasks if item.batch is batch]:
                tasks.pop(item).cancel()
        self._dispatch()

    def _dispatch(self) -> None:
        """Hand waiting parcels to servers that are free."""
        for group, waiting in self._waiting.items():
            candidates = self.roster.list_serving(group)
            postponed = []
            while waiting:
                order, parcel = heapq.heappop(waiting)
                parcel = [item for item in parcel if item.batch in self._batches]
                if not parcel:
                    continue
                untried = [server for server in candidates if server not in parcel[0].failed_at]
                free = [s for s in untried or candidates if len(self._in_flight[s]) < self._terms.max_batch]
                if free:
                    server = min(free, key=lambda server: len(self._in_flight[server]))
                    for item in parcel:
                        self._in_flight[server][item] = asyncio.create_task(self._ask(server, item))
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
                completion = await server.complete(batch.weights[number], item.request, batch.stop_token_ids[number])
        except ServerFailed as error:
            self._in_flight[server].pop(item, None)
            self._handle_failure(server, item, error)
        except Refused as error:
            self._in_flight[server].pop(item, None)
            self._fail(batch, EngineError(str(error)))
        except Exception as error:  # noqa: BLE001  # a fault of this program, which the waiting thread must hear of
            self._fail(batch, error)
        else:
            self._in_flight[server].pop(item, None)
            server.failures = 0
            batch.answers.put((number, completion))
        self._dispatch()

    def _handle_failure(self, server: PooledServer, item: _Item, error: ServerFailed) -> None:
        item.failures += 1
        item.failed_at.add(server)
        server.failures += 1
        log.info("retrying a completion: %s", error)
        self._put_back([item])
        if item.failures >= _FAILURES_OF_A_REQUEST:
            self._fail(item.batch, EngineError(f"a completion failed {item.failures} times; the last error: {error}"))
        if isinstance(error, WrongServer) or server.failures >= _FAILURES_IN_A_ROW:
            self.roster.remove(server, str(error))

    def _put_back(self, items: Iterable[_Item]) -> None:
        """Let what was lost go first."""
        for parcel in _group_siblings(items):
            heapq.heappush(self._waiting[parcel[0].group], (next(self._sooner), parcel))

    def _fail(self, batch: Batch, error: BaseException) -> None:
        self._batches.discard(batch)
        batch.answers.put(error)

    # ---------------------------------------------------------------------------------------------------- servers
    def add_server(self, server: PooledServer) -> None:
        """See :class:`RosterListener`."""
        self._in_flight[server] = {}
        self._dispatch()

    def drop_server(self, server: PooledServer) -> int:
        """See :class:`RosterListener`."""
        tasks = self._in_flight.pop(server)
        for task in tasks.values():
            task.cancel()
        self._put_back(tasks)
        self._dispatch()
        return len(tasks)

    def is_busy(self, server: PooledServer) -> bool:
        """See :class:`RosterListener`."""
        return bool(self._in_flight.get(server))

    def fail_stranded(self) -> None:
        """See :class:`RosterListener`."""
        for group, waiting in self._waiting.items():
            if not self.roster.is_left(group):
                for batch in {item.batch for _, parcel in waiting for item in parcel} & self._batches:
                    self._fail(batch, self.roster.describe_loss(group))

    def fail_all(self, error: BaseException) -> None:
        """See :class:`RosterListener`."""
        for batch in list(self._batches):
            self._fail(batch, error)


def _group_siblings(items: Iterable[_Item]) -> list[list[_Item]]:
    """The items of one batch, agent and prompt together, in their order."""
    parcels: dict[tuple[int, str, tuple[int, ...]], list[_Item]] = defaultdict(list)
    for item in items:
        parcels[(id(item.batch), item.request.agent, item.request.prompt_ids)].append(item)
    return list(parcels.values())
