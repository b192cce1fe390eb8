"""An engine over many vLLM servers, which the fleet starts or somebody else runs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from magrpo.engines import EngineError, check_prompts, make_action
from magrpo.engines.dispatch import CLOSED, Batch, Dispatcher
from magrpo.engines.named_weights import NamedWeights, ServerGroup
from magrpo.engines.roster import Patience
from magrpo.engines.vllm_arguments import EXTENSION
from magrpo.fleets import Job
from magrpo.interfaces import Progress
from magrpo.plugins import ConfigError
from magrpo.types import Action, Request, SamplingParams

if TYPE_CHECKING:
    from magrpo.model.host import EngineHost

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class PoolEngine:
    """An :class:`magrpo.interfaces.Engine` over vLLM servers; a thread of its own talks to them.

    Raises EngineError if a base model is left without servers, ConfigError if a server rejects the key.

    Args:
        jobs: How the fleet starts the servers of each group; empty: ``host.place`` has addresses.
        key: API key of the servers.
    """

    def __init__(
        self, host: EngineHost, jobs: Mapping[ServerGroup, Job], key: str | None, patience: Patience | None = None
    ) -> None:
        self._host, self._starts_servers = host, bool(jobs)
        self._asleep = self._closed = self._warned = False
        self._full_copies = threading.Lock()  # a server holds one full copy: batches of several versions take turns
        self._loop, self._closing = asyncio.new_event_loop(), threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-pool", daemon=True)
        self._thread.start()
        try:
            self._dispatcher = self._wait(Dispatcher.open(host, jobs, key, patience or Patience()))
        except BaseException:
            self._stop_loop()
            raise

    def serve(self, version: int, weights: Mapping[str, Path]) -> PooledWeights:
        """Load adapters into all servers; full copies load when they generate.

        Raises EngineError if no server is left that serves them.
        """
        lineup = self._host.lineup
        by_holder = {
            holder: NamedWeights.of(holder, version, ServerGroup.of(lineup, holder), Path(weights[holder]))
            for holder in dict.fromkeys(map(lineup.holder, lineup.agents))
            if holder in weights
        }
        unproved = [named.name for named in by_holder.values() if named.probe is None]
        if unproved and not self._warned:
            self._warned = True
            log.warning(
                "no probe file next to %s: cannot check that the servers load these weights", ", ".join(unproved)
            )
        self._wait(self._dispatcher.roster.open_weights(list(by_holder.values())))
        return PooledWeights(self, version, {agent: by_holder.get(lineup.holder(agent)) for agent in lineup.agents})

    def generate(
        self, weights: PooledWeights, requests: Sequence[Request], progress: Progress | None = None
    ) -> list[Action]:
        """One completion for each request, in order, by ``weights``; raises as :class:`magrpo.interfaces.Served`."""
        lineup = self._host.lineup
        check_prompts(lineup, requests)
        groups = {agent: ServerGroup.of(lineup, agent) for agent in {request.agent for request in requests}}
        self._refuse_truncation({groups[r.agent]: r.sampling for r in requests if r.sampling.truncates})
        batch = Batch(
            requests,
            [weights.by_agent[request.agent] for request in requests],
            [groups[request.agent] for request in requests],
            [lineup.stop_token_ids(request.agent) for request in requests],
        )
        with self._full_copies if any(group.agent for group in groups.values()) else nullcontext():
            return self._collect_actions(weights, batch, progress)

    def _collect_actions(self, weights: PooledWeights, batch: Batch, progress: Progress | None) -> list[Action]:
        lineup, requests = self._host.lineup, batch.requests
        actions: dict[int, Action] = {}
        self._wait(self._dispatcher.begin(batch))
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
            with suppress(EngineError):  # closed, and with it the batch
                self._wait(self._dispatcher.end(batch))
        return [actions[number] for number in range(len(requests))]

    def unload(self, weights: PooledWeights) -> None:
        """Unload the adapters of ``weights``, unless others opened the same."""
        if not self._closed:
            named = {named.name: named for named in weights.by_agent.values() if named is not None}
            self._wait(self._dispatcher.roster.close_weights(list(named.values())))

    def sleep(self) -> None:
        """Release GPU memory for the update, where servers share GPUs with it. No-op on CPU."""
        host = self._host
        if self._starts_servers and host.shares_gpus and host.lineup.device.type == "cuda" and not self._asleep:
            self._wait(self._dispatcher.roster.sleep())
            self._asleep = True

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        if self._asleep:
            self._host.lineup.release_cached_memory()
            self._wait(self._dispatcher.roster.wake())
            self._asleep = False

    def close(self) -> None:
        """Unload all adapters, stop the fleet's servers, and fail what other threads ask for. May be called twice."""
        if not self._closed:
            self._closed = True
            self._wait(self._dispatcher.close())
            self._stop_loop()

    def _refuse_truncation(self, sampling: Mapping[ServerGroup, SamplingParams]) -> None:
        """Raise ConfigError if a server's log-probabilities would be those of what truncation left."""

        async def find_obstacle() -> str:
            for group, params in sampling.items():
                for server in self._dispatcher.roster.list_serving(group):
                    if not server.is_extended:
                        key = f"top_p = {params.top_p:g}" if params.top_p < 1 else f"top_k = {params.top_k}"
                        return f"rollout.{key}: {server} sends no log-probabilities from before truncation"
            return ""

        if sampling and (obstacle := self._wait(find_obstacle())):
            raise ConfigError(f"{obstacle}; start it with {EXTENSION}, or set rollout.top_p = 1 and rollout.top_k = 0")

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of ``work`` on the loop. Raises EngineError if that is closed before."""
        with self._closing:
            if self._loop.is_closed():
                work.close()
                raise EngineError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise EngineError(CLOSED) from None
        finally:
            future.cancel()

    def _stop_loop(self) -> None:
        """Stop and close the loop; what it was asked meanwhile is cancelled."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        with self._closing:
            self._loop.run_until_complete(_cancel_tasks())
            self._loop.close()


async def _cancel_tasks() -> None:
    """Cancel all tasks of the loop but this one, and wait for their end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class PooledWeights:
    """A :class:`magrpo.interfaces.Served`: weights by agent, which every server of the agent's group can hold."""

    _engine: PoolEngine
    version: int
    by_agent: Mapping[str, NamedWeights | None]
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
