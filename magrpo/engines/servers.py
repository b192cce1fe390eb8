"""One vLLM server of a pool: how it starts, joins, proves its weights, answers and is watched."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp

from magrpo.engines import Completion
from magrpo.engines.http import AdapterMissing, Refused, ServerClient, ServerFailed
from magrpo.engines.probes import Probe, read_probe
from magrpo.fleets import Fleet, Job, ProcessDied, Running
from magrpo.types import Request

log = logging.getLogger(__name__)
_POLL_S = 0.5
_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_config.json")


class WrongServer(ServerFailed):
    """A server that would give wrong answers: other weights than it names, another base, too short a window."""


@dataclass(frozen=True)
class Adapter:
    """An adapter, under a name that means these weights for ever: ``helper.7.1f3a9c0d2b4e``."""

    name: str
    base: str
    folder: Path
    probe: Probe | None

    @classmethod
    def of(cls, agent: str, version: int, base: str, folder: Path) -> Adapter:
        """The adapter in ``folder``; its name ends with the first digits of the SHA-256 of its two files."""
        folder = folder.resolve()
        content = hashlib.sha256(b"".join((folder / file).read_bytes() for file in _WEIGHT_FILES))
        return cls(f"{agent}.{version}.{content.hexdigest()[:12]}", base, folder, read_probe(folder))


@dataclass(frozen=True)
class Terms:
    """What a pool asks of all its servers."""

    session: aiohttp.ClientSession
    key: str | None
    windows: dict[str, int]
    """The shortest context window that does, by base model, in tokens."""
    tolerance: float
    """Largest gap between the log-probabilities of a server and those of a probe."""
    max_batch: int
    deadline_s: float
    """Maximum duration of one completion."""
    start_s: float
    """Maximum duration of a start."""
    silence_s: float
    """Maximum duration of a check of health."""


@dataclass(eq=False)
class PooledServer:
    """A server of a pool. Its methods run on the pool's loop and raise ServerFailed, or Refused, if it is of no use."""

    terms: Terms
    url: str = ""
    base: str = ""
    """The base model it serves; empty until a server that somebody else runs has said so."""
    job: Job | None = None
    """How the fleet starts it; None: somebody else does."""
    running: Running | None = None
    restarts: int = 0
    failures: int = 0
    """Failures since its last answer."""
    reason: str = ""
    """Why it last left the pool."""
    _client: ServerClient = field(init=False)
    _loaded: dict[str, int] = field(default_factory=dict)
    """Adapters that it holds and has proved, by name, with the number of the loading."""
    _loadings: int = 0

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.terms.max_batch)
        self._lock = asyncio.Lock()
        self._connect()

    def __str__(self) -> str:
        return f"the vLLM server {self.url}" if self.url else "a vLLM server"

    def _connect(self) -> None:
        if self.running is not None:
            self.url = f"http://{self.running.host}:{self.running.port}"
        self._client = ServerClient(self.terms.session, self.url, self.terms.key, self.terms.deadline_s)
        self._loaded.clear()

    async def restart(self, fleet: Fleet) -> None:
        """Stop the process, whatever it does, and start another in its place."""
        assert self.job is not None
        running, self.running = self.running, None
        try:
            if running is not None:
                await asyncio.to_thread(running.stop)
            (self.running,) = await asyncio.to_thread(fleet.start, replace(self.job, count=1))
        except ProcessDied as error:
            raise ServerFailed(str(error)) from None
        self._connect()

    async def join(self) -> None:
        """Wait until the server is ready, and check which base it serves."""
        self._loaded.clear()
        if self.running is not None:
            await self._wait_for_start(self.running)
        models = {model.id: model for model in await self._client.list_models()}
        bases = [model for model in models.values() if model.parent is None]
        known = [base for base in self.terms.windows if any(base in (model.id, model.root) for model in bases)]
        if not known:
            names = ", ".join(sorted(self.terms.windows))
            raise WrongServer(f"serves {', '.join(model.id for model in bases) or 'no model'}, and none of {names}")
        self.base = known[0]
        window = min((model.max_model_len or 0 for model in bases), default=0)
        needed = self.terms.windows[self.base]
        if window < needed:
            raise WrongServer(f"has a context window of {window} tokens; start it with --max-model-len {needed}")

    async def load_adapter(self, adapter: Adapter) -> int:
        """Load an adapter unless the server has it, and let it prove its weights; returns the number of the loading."""
        async with self._lock:
            if adapter.name not in self._loaded:
                await self._load_and_prove(adapter)
                self._loadings += 1
                self._loaded[adapter.name] = self._loadings
            return self._loaded[adapter.name]

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, so that nothing can ask for its folder any more."""
        async with self._lock:
            if self._loaded.pop(name, None) is not None:
                await self._client.unload_adapter(name)

    async def complete(self, model: Adapter | None, request: Request, stop_token_ids: Sequence[int]) -> Completion:
        """The completion of ``request`` by an adapter; None: by the base."""
        if model is None:
            return await self._client.generate(self.base, request, stop_token_ids)
        loading = await self.load_adapter(model)
        try:
            return await self._client.generate(model.name, request, stop_token_ids)
        except AdapterMissing:
            if self._loaded.get(model.name) == loading:
                del self._loaded[model.name]
                log.warning("%s has lost the adapter %s; loading it again", self, model.name)
        await self.load_adapter(model)
        return await self._client.generate(model.name, request, stop_token_ids)

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

    async def _load_and_prove(self, adapter: Adapter) -> None:
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

    async def _find_fault(self, adapter: Adapter) -> str:
        """How log-probabilities of the adapter differ from the trainer's; empty if they do not, or without a probe."""
        if adapter.probe is None:
            return ""
        gap = adapter.probe.measure_gap(await self._client.score(adapter.name, adapter.probe))
        if gap <= self.terms.tolerance:
            return ""
        return (
            f"does not compute what the weights of {adapter.name} would: its log-probabilities differ by {gap:.2g} on "
            f"average, {self.terms.tolerance:g} is allowed; it serves the base, an older adapter or another base"
        )
