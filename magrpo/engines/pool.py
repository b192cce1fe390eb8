"""An engine over many vLLM servers, which the fleet starts or somebody else runs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from magrpo.engines import check_prompts, make_action
from magrpo.engines.dispatch import Batch, Dispatcher, Patience
from magrpo.engines.servers import Adapter
from magrpo.fleets import Job
from magrpo.interfaces import Progress
from magrpo.plugins import ConfigError
from magrpo.types import Action, Request

if TYPE_CHECKING:
    from magrpo.engines.host import EngineHost

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class PoolEngine:
    """An :class:`magrpo.interfaces.Engine` over vLLM servers; a thread of its own talks to them.

    Raises EngineError if a base model is left without servers, ConfigError if a server rejects the key.

    Args:
        jobs: How the fleet starts the servers of each base model; empty: ``host.place`` has addresses.
        key: API key of the servers.
    """

    def __init__(
        self, host: EngineHost, jobs: Mapping[str, Job], key: str | None, patience: Patience | None = None
    ) -> None:
        self._host, self._starts_servers = host, bool(jobs)
        self._asleep = self._closed = self._warned = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-pool", daemon=True)
        self._thread.start()
        try:
            self._dispatcher = self._wait(Dispatcher.open(host, jobs, key, patience or Patience()))
        except BaseException:
            self._stop_loop()
            raise

    def serve(self, version: int, weights: Mapping[str, Path]) -> PooledWeights:
        """Load adapters into all servers. Raises EngineError if none is left that serves them."""
        lineup = self._host.lineup
        by_holder = {
            holder: Adapter.of(holder, version, lineup.base(holder), Path(weights[holder]))
            for holder in dict.fromkeys(map(lineup.holder, lineup.agents))
            if holder in weights
        }
        unproved = [adapter.name for adapter in by_holder.values() if adapter.probe is None]
        if unproved and not self._warned:
            self._warned = True
            log.warning("no probe lies beside %s, so servers cannot prove them", ", ".join(unproved))
        self._wait(self._dispatcher.open_adapters(list(by_holder.values())))
        return PooledWeights(self, version, {agent: by_holder.get(lineup.holder(agent)) for agent in lineup.agents})

    def generate(
        self, weights: PooledWeights, requests: Sequence[Request], progress: Progress | None = None
    ) -> list[Action]:
        """One completion for each request, in order, by ``weights``; raises as :class:`magrpo.interfaces.Served`."""
        lineup = self._host.lineup
        check_prompts(lineup, requests)
        refuse_truncation(requests)
        batch = Batch(
            requests,
            [weights.adapters[request.agent] for request in requests],
            [lineup.base(request.agent) for request in requests],
            [lineup.stop_token_ids(request.agent) for request in requests],
        )
        actions: dict[int, Action] = {}
        self._loop.call_soon_threadsafe(self._dispatcher.begin, batch)
        try:
            while len(actions) < len(requests):
                answer = batch.answers.get()
                if isinstance(answer, BaseException):
                    raise answer
                number, completion = answer
                actions[number] = make_action(lineup, requests[number], completion, weights.version)
                if progress is not None:
                    progress(1)
        finally:
            self._loop.call_soon_threadsafe(self._dispatcher.end, batch)
        return [actions[number] for number in range(len(requests))]

    def unload(self, weights: PooledWeights) -> None:
        """Unload the adapters of ``weights``, unless others opened the same."""
        if not self._closed:
            adapters = {adapter.name: adapter for adapter in weights.adapters.values() if adapter is not None}
            self._wait(self._dispatcher.close_adapters(list(adapters.values())))

    def sleep(self) -> None:
        """Release GPU memory for the update, where servers share GPUs with it. No-op on CPU."""
        host = self._host
        if self._starts_servers and host.shares_gpus and host.lineup.device.type == "cuda" and not self._asleep:
            self._wait(self._dispatcher.sleep())
            self._asleep = True

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        if self._asleep:
            self._host.lineup.release_cached_memory()
            self._wait(self._dispatcher.wake())
            self._asleep = False

    def close(self) -> None:
        """Unload all adapters, and stop the servers that the fleet started. May be called twice."""
        if not self._closed:
            self._closed = True
            self._wait(self._dispatcher.close())
            self._stop_loop()

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(eq=False)
class PooledWeights:
    """A :class:`magrpo.interfaces.Served`: adapters by agent, which every server of the pool holds."""

    _engine: PoolEngine
    version: int
    adapters: Mapping[str, Adapter | None]
    """None: the agent acts with its base."""
    _closed: bool = False

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        """See :meth:`PoolEngine.generate`."""
        return self._engine.generate(self, requests, progress)

    def close(self) -> None:
        """Unload the adapters everywhere, before anybody deletes their folder. May be called twice."""
        if not self._closed:
            self._closed = True
            self._engine.unload(self)


def refuse_truncation(requests: Sequence[Request]) -> None:
    """Raise ConfigError for requests that truncate: servers send log-probabilities of what truncation left."""
    for sampling in {request.sampling for request in requests}:
        if sampling.truncates:
            key = f"rollout.top_p = {sampling.top_p:g}" if sampling.top_p < 1 else f"rollout.top_k = {sampling.top_k}"
            raise ConfigError(
                f"{key}: vLLM servers over HTTP send no log-probabilities from before truncation; set "
                "rollout.top_p = 1 and rollout.top_k = 0, or leave engine.servers out of the place"
            )
