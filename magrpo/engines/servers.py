"""One vLLM server of a pool: how it starts, joins, proves its weights, answers and is watched."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import aiohttp

from magrpo.engines import Completion
from magrpo.engines.http import Refused, ServerClient, ServerFailed, WeightsMissing
from magrpo.engines.named_weights import NamedWeights, ServerGroup
from magrpo.engines.vllm_arguments import EXTENSION
from magrpo.fleets import Fleet, Job, ProcessDied, Running
from magrpo.types import Request

log = logging.getLogger(__name__)
_POLL_S = 0.5
_UNTRAINED = "default"
"""What vLLM calls the weights that it started with."""


class WrongServer(ServerFailed):
    """A server that would give wrong answers: other weights than it names, another base, too short a window."""


@dataclass(frozen=True)
class Terms:
    """What a pool asks of all its servers."""

    session: aiohttp.ClientSession
    key: str | None
    windows: dict[ServerGroup, int]
    """The shortest context window that does, by group, in tokens."""
    tolerance: float
    """Largest gap between the log-probabilities of a server and those of a probe."""
    max_batch: int
    deadline_s: float
    """Maximum duration of one completion."""
    start_s: float
    """Maximum duration of a start."""
    silence_s: float
    """Maximum duration of a check of health."""
    foreign: Counter[ServerGroup] = field(default_factory=Counter)
    """Number of servers of others that each group was given."""


@dataclass(eq=False)
class PooledServer:
    """A server of a pool. Its methods run on the pool's loop and raise ServerFailed, or Refused, if it is of no use."""

    terms: Terms
    url: str = ""
    group: ServerGroup | None = None
    """None until a server that somebody else runs has said which base it serves."""
    job: Job | None = None
    """How the fleet starts it; None: somebody else does."""
    running: Running | None = None
    restarts: int = 0
    failures: int = 0
    """Failures since its last answer."""
    reason: str = ""
    """Why it last left the pool."""
    _client: ServerClient = field(init=False)
    _model: str = ""
    """The name of its base."""
    _loaded: dict[str, int] = field(default_factory=dict)
    """Weights that it holds and has proved, by name, with the number of the loading."""
    _loadings: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.terms.max_batch)
        self._lock = asyncio.Lock()
        self._connect()

    def __str__(self) -> str:
        return f"the vLLM server {self.url}" if self.url else "a vLLM server"

    @property
    def is_extended(self) -> bool:
        """Whether it gives log-probabilities from before truncation, and loads full copies."""
        return self._client.is_extended

    def _connect(self) -> None:
        if self.running is not None:
            self.url = f"http://{self.running.host}:{self.running.port}"
        self._client = ServerClient(self.terms.session, self.url, self.terms.key, self.terms.deadline_s)
        self._loaded.clear()

    async def restart(self, fleet: Fleet) -> None:
        """Stop the process, whatever it does, and start another in its place."""
        try:
            await asyncio.to_thread(self._replace_process, fleet)
        except ProcessDied as error:
            raise ServerFailed(str(error)) from None
        self._connect()

    def _replace_process(self, fleet: Fleet) -> None:
        """In a thread, which goes on when the restart is cancelled."""
        assert self.job is not None
        running, self.running = self.running, None
        if running is not None:
            running.stop()
        (self.running,) = fleet.start(replace(self.job, count=1))
        if self._closed:
            self.running.stop()

    async def close(self) -> None:
        """Stop the process, and the one that a restart starts in its place after this."""
        self._closed = True
        if self.running is not None:
            await asyncio.to_thread(self.running.stop)

    async def join(self) -> None:
        """Wait until the server is ready, and check which base it serves."""
        self._loaded.clear()
        if self.running is not None:
            await self._wait_for_start(self.running)
        bases = [model for model in await self._client.list_models() if model.parent is None]
        names = {name: model.id for model in bases for name in (model.root, model.id)}
        fitting = [group for group in self.terms.windows if group.base in names]
        if not fitting:
            wanted = ", ".join(sorted({group.base for group in self.terms.windows}))
            raise WrongServer(f"serves {', '.join(model.id for model in bases) or 'no model'}, but not {wanted}")
        await self._client.find_extension()
        if self.group not in fitting:
            self.group = self._choose_group(fitting)
            self.terms.foreign[self.group] += 1
        self._model = names[self.group.base]
        window = min((model.max_model_len or 0 for model in bases), default=0)
        needed = self.terms.windows[self.group]
        if window < needed:
            raise WrongServer(f"has a context window of {window} tokens; start it with --max-model-len {needed}")

    def _choose_group(self, fitting: Sequence[ServerGroup]) -> ServerGroup:
        """The group with the fewest servers of others; one of a full copy first, which not every server can hold."""
        able = [group for group in fitting if self.is_extended or not group.agent]
        if not able:
            raise Refused(
                f'agent {fitting[0].agent!r}: {self} cannot load weights = "full"; start it with {EXTENSION}, or set '
                'weights = "lora"'
            )
        return min(able, key=lambda group: (self.terms.foreign[group], not group.agent))

    async def load_weights(self, weights: NamedWeights) -> int:
        """Load weights unless the server has them, and let it prove them; returns the number of the loading."""
        async with self._lock:
            if weights.name not in self._loaded:
                await (self._load_full(weights) if weights.group.agent else self._load_adapter(weights))
                self._loadings += 1
                self._loaded[weights.name] = self._loadings
            return self._loaded[weights.name]

    async def unload_weights(self, name: str) -> None:
        """Forget an adapter, so that nothing can ask for its folder any more. A full copy stays until the next."""
        async with self._lock:
            if self.group is not None and not self.group.agent and self._loaded.pop(name, None) is not None:
                await self._client.unload_adapter(name)

    async def complete(
        self, weights: NamedWeights | None, request: Request, stop_token_ids: Sequence[int]
    ) -> Completion:
        """The completion of ``request`` by ``weights``; None: by the base."""
        if request.sampling.truncates and not self.is_extended:
            raise WrongServer(f"sends no log-probabilities from before truncation; start it with {EXTENSION}")
        if weights is None:
            version = _UNTRAINED if self.group is not None and self.group.agent else None
            return await self._client.generate(self._model, request, stop_token_ids, version)
        loading = await self.load_weights(weights)
        try:
            return await self._generate(weights, request, stop_token_ids)
        except WeightsMissing:
            if self._loaded.get(weights.name) == loading:
                del self._loaded[weights.name]
                log.warning("%s has lost the weights %s; loading them again", self, weights.name)
        await self.load_weights(weights)
        return await self._generate(weights, request, stop_token_ids)

    async def _generate(self, weights: NamedWeights, request: Request, stop_token_ids: Sequence[int]) -> Completion:
        if weights.group.agent:
            return await self._client.generate(self._model, request, stop_token_ids, weights.name)
        return await self._client.generate(weights.name, request, stop_token_ids)

    async def check_health(self) -> None:
        """Return if the server is well."""
        if self.running is not None and (status := self.running.exit_status()) is not None:
            raise ServerFailed(self._describe_end(self.running, status))
        await self._client.check_health(self.terms.silence_s)

    async def sleep(self) -> None:
        """Release GPU memory."""
        await self._client.sleep()

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        await self._client.wake()

    async def _wait_for_start(self, running: Running) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.terms.start_s
        while True:
            if (status := running.exit_status()) is not None:
                raise ServerFailed(self._describe_end(running, status))
            try:
                return await self._client.check_health(min(10.0, self.terms.silence_s))
            except ServerFailed as error:
                if loop.time() > deadline:
                    raise ServerFailed(f"did not start within {self.terms.start_s:g} s; log: {running.log}") from error
            await asyncio.sleep(_POLL_S)

    def _describe_end(self, running: Running, status: int) -> str:
        last_words = running.last_words()
        return f"ended with status {status}{f' ({last_words})' if last_words else ''}; log: {running.log}"

    async def _load_adapter(self, adapter: NamedWeights) -> None:
        """A server of somebody else may have the name already, with these weights or not: then it loads them anew."""
        held = {model.id: model.root for model in await self._client.list_models()}
        if adapter.name in held:
            if held[adapter.name] == str(adapter.folder) and not await self._find_fault(adapter):
                return
            await self._client.unload_adapter(adapter.name)
        try:
            await self._client.load_adapter(adapter.name, adapter.folder)
        except Refused as error:
            raise ServerFailed(str(error)) from None
        if fault := await self._find_fault(adapter):
            raise WrongServer(fault)

    async def _load_full(self, copy: NamedWeights) -> None:
        """Load a full copy in place of the one before."""
        self._loaded.clear()
        await self._client.load_full(copy.name, copy.folder)
        if fault := await self._find_fault(copy):
            raise WrongServer(fault)

    async def _find_fault(self, weights: NamedWeights) -> str:
        """How log-probabilities of the weights differ from the trainer's; empty if they do not, or without a probe."""
        if weights.probe is None:
            return ""
        model, version = (self._model, weights.name) if weights.group.agent else (weights.name, None)
        gap = weights.probe.measure_gap(await self._client.score(model, weights.probe, version))
        if gap <= self.terms.tolerance:
            return ""
        return (
            f"does not serve the weights {weights.name}: its log-probabilities differ by {gap:.2g} on average, at most "
            f"{self.terms.tolerance:g} is allowed; it may serve the base model alone, older weights or another base"
        )
