"""The engine ``vllm``: one server process for each base model, the adapters of all agents in one batch."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import msgspec
from pydantic import Field

from magrpo.engines import Completion, EngineError, check_prompts, make_action
from magrpo.engines.vllm_arguments import find_vllm_obstacle, make_arguments
from magrpo.engines.vllm_server import (
    CreateEngine,
    Done,
    Finished,
    Generate,
    LoadAdapters,
    LoadModel,
    ServerCall,
    Sleep,
    UnloadAdapters,
    Wake,
)
from magrpo.errors import ConfigError
from magrpo.interfaces import Progress
from magrpo.plugins import Plugin
from magrpo.process.child import Child, ProcessDied, wait_for_children
from magrpo.types import Action, Request

if TYPE_CHECKING:
    from magrpo.model.host import EngineHost

log = logging.getLogger(__name__)
_START_DEADLINE_S = 900.0
_RESTARTS = 2
"""Maximum number of restarts of a server for one batch."""
_OWN_MEMORY_FRAC = 0.9
"""Fraction of its GPU's memory that an engine takes if no trainer uses the GPU: vLLM's own default."""
_REPLIES: msgspec.msgpack.Decoder[Done | Finished] = msgspec.msgpack.Decoder(Done | Finished)
_SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in the server process: less to start, less to survive
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler vllm_worker.WorkerExtension knows
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU_SETTINGS = {
    "TORCH_COMPILE_DISABLE": "1",  # only a count of logits would be compiled, which keeps the first batch waiting
}


class VllmEngine(Plugin):
    """vLLM in a separate, supervised process. The default on CUDA."""

    kind: str = "vllm"
    max_batch: int = Field(256, ge=1)
    """Maximum number of completions decoded at once. Affects only speed and memory."""
    memory_frac: float = Field(0.5, gt=0, lt=1)
    """Fraction of the GPU's memory for vLLM, including weights; released while the update runs. A sampler with GPUs of
    its own takes 0.9."""
    cpu_cache_gib: float = Field(1.0, gt=0)
    """Size of the key-value cache on CPU, in GiB."""
    deadline_s: float = Field(3600.0, gt=0, le=10**6)
    """Maximum duration of one batch, in seconds; after that its server is killed and the batch fails."""

    def open(self, host: EngineHost) -> VllmClient:
        """Start the servers with the agents' base models; returns when all of them are ready."""
        lineup = host.lineup
        if obstacle := find_vllm_obstacle(lineup.configs, lineup.model, lineup.lora, lineup.device):
            raise ConfigError(f"engine.kind: {obstacle}, or use 'transformers'")
        return VllmClient(host, self)


class VllmClient:
    """An :class:`magrpo.interfaces.Engine` over vLLM's processes: one for each shared base, one for each full copy."""

    def __init__(self, host: EngineHost, config: VllmEngine) -> None:
        self._host, self._lineup, self._config = host, host.lineup, config
        lineup = host.lineup
        self._folder = Path(tempfile.mkdtemp(prefix="magrpo-vllm-"))
        self._asleep = self._closed = False
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for agent in lineup.agents:
            has_adapter = lineup.weights(agent) == "lora"
            groups[("base", lineup.base(agent)) if has_adapter else ("agent", agent)].append(agent)
        self._agents = list(groups.values())
        self._servers: dict[int, Child] = {}
        self._lock = Lock()  # one call at a time
        self._count = 0
        self._adapters: dict[int, dict[int, ServerCall]] = {}  # the calls that loaded them, by weights and server
        self._models: dict[int, ServerCall] = {}  # the last call that loaded a full copy, by server
        with ExitStack() as undo:
            undo.callback(self.close)
            self._start(range(len(self._agents)))
            undo.pop_all()

    def serve(self, version: int, weights: Mapping[str, Path]) -> VllmWeights:
        """Load adapters under new ids; full copies load when they generate. Raises EngineError if a server dies."""
        self._count += 1
        adapters: dict[int, ServerCall] = {}
        models: dict[int, ServerCall] = {}
        for server, agents in enumerate(self._agents):
            given = {agent: str(Path(weights[agent]).resolve()) for agent in agents if agent in weights}
            if given and self._lineup.weights(agents[0]) == "lora":
                adapters[server] = LoadAdapters(self._count, given)
            elif given:
                models[server] = LoadModel(given[agents[0]])
        with self._lock:
            self._call(adapters)
            self._adapters[self._count] = adapters
        return VllmWeights(self, self._count, version, models)

    def generate(self, served: VllmWeights, requests: Sequence[Request], progress: Progress | None) -> list[Action]:
        """One completion for each request, in order, as one batch for each server.

        A server that dies is restarted and generates the missing completions; a third death is an EngineError, and so
        is a missed deadline. Raises NonFiniteLogits.
        """
        check_prompts(self._lineup, requests)
        shares = [{i: r for i, r in enumerate(requests) if r.agent in agents} for agents in self._agents]
        actions: dict[int, Action] = {}
        with self._lock, ExitStack() as stack:
            self._load_models(served.models)
            # One stack for each server: one that is done must not be killed while another goes on.
            deadlines = [stack.enter_context(ExitStack()) for _ in shares]
            for server, share in enumerate(shares):
                self._send_requests(served.number, server, share, deadlines[server])
            reading = {
                server: self._read_completions(served.number, server, share, deadlines[server])
                for server, share in enumerate(shares)
            }
            while reading:
                for server in self._wait_for_replies(reading):
                    completions = next(reading[server], None)
                    if completions is None:
                        del reading[server]
                        deadlines[server].close()
                        continue
                    for i, completion in completions.items():
                        actions[i] = make_action(self._lineup, requests[i], completion, served.version)
                        if progress is not None:
                            progress(1)
        return [actions[i] for i in range(len(requests))]

    def unload(self, served: VllmWeights) -> None:
        """Forget the adapters of weights that are no longer needed; a dead server has forgotten them already."""
        with self._lock, suppress(EngineError):
            self._call(dict.fromkeys(self._adapters.pop(served.number, {}), UnloadAdapters(served.number)))

    def sleep(self) -> None:
        """Release GPU memory for the update. No-op on CPU."""
        if self._lineup.device.type == "cuda" and not self._asleep:
            self._asleep = True
            self._call(dict.fromkeys(self._servers, Sleep()))

    def wake(self) -> None:
        """Undo :meth:`sleep`, after releasing memory that the trainer has cached meanwhile."""
        if self._asleep:
            self._lineup.release_cached_memory()
            self._call(dict.fromkeys(self._servers, Wake()))
            self._asleep = False

    def close(self) -> None:
        """Kill the servers. Their logs are deleted unless one of them died. May be called twice."""
        self._closed = True  # a thread that waits for an answer must not start them again
        died = any(server.died for server in self._servers.values())
        for server in self._servers.values():
            server.kill()
        if not died:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, numbers: Sequence[int]) -> None:
        """Start these servers; returns when they are ready."""
        self._lineup.release_cached_memory()
        command = [sys.executable, "-m", "magrpo.engines.vllm_server", str(os.getpid())]
        on_cpu = self._lineup.device.type == "cpu"
        environment = {**os.environ, **_SETTINGS, **(_CPU_SETTINGS if on_cpu else {})}
        # On a GPU one after another: a starting vLLM counts all memory taken from the card meanwhile as its own.
        for together in [numbers] if on_cpu else [[i] for i in numbers]:
            for i in together:
                log = self._folder / f"server-{i}.{len(list(self._folder.glob(f'server-{i}.*')))}.log"
                self._servers[i] = Child(command, log, environment)
                self._servers[i].name = f"the vLLM server of {', '.join(self._agents[i])}"
            self._call({i: CreateEngine(self._engine_arguments(self._agents[i])) for i in together}, _START_DEADLINE_S)

    def _engine_arguments(self, agents: Sequence[str]) -> dict[str, object]:
        """Keyword arguments of ``vllm.LLM`` for a server of ``agents``."""
        arguments = make_arguments(self._host, agents, self._config.cpu_cache_gib)
        arguments["max_num_seqs"] = self._config.max_batch
        if self._lineup.device.type == "cuda":
            share = _OWN_MEMORY_FRAC if self._host.owns_gpus else self._config.memory_frac
            arguments["gpu_memory_utilization"] = share / len(self._agents)
        return arguments

    def _load_models(self, models: Mapping[int, ServerCall]) -> None:
        """Load the full copies that a server does not hold already."""
        missing = {server: call for server, call in models.items() if self._models.get(server) != call}
        self._call(missing)
        self._models |= missing

    def _send_requests(self, served: int, server: int, share: Mapping[int, Request], deadlines: ExitStack) -> None:
        """Send requests to a server; if it is dead, reading its answer will raise."""
        stop_token_ids = {agent: self._lineup.stop_token_ids(agent) for agent in self._agents[server]}
        deadlines.enter_context(self._servers[server].enforce_deadline(self._config.deadline_s))
        with suppress(ProcessDied):
            self._servers[server].send(msgspec.msgpack.encode(Generate(served, dict(share), stop_token_ids)))

    def _read_completions(
        self, served: int, server: int, share: Mapping[int, Request], deadlines: ExitStack
    ) -> Iterator[Mapping[int, Completion]]:
        """A server's completions by number of the request, as they come. If it dies, a new one generates the rest."""
        missing = dict(share)
        for left in reversed(range(_RESTARTS + 1)):
            try:
                while isinstance(reply := self._receive(server), Finished):
                    for i in reply.completions:
                        del missing[i]
                    yield reply.completions
                return
            except EngineError as error:
                if not left or self._closed or self._servers[server].missed_deadline_s is not None:
                    raise
                done = f"{len(share) - len(missing)} of {len(share)} completions"
                log.warning("%s; %s are done, restarting the server for the rest", error, done)
                deadlines.close()
                self._start([server])
                for calls in (*self._adapters.values(), self._models):
                    self._call({i: call for i, call in calls.items() if i == server})
                self._send_requests(served, server, missing, deadlines)

    def _wait_for_replies(self, servers: Iterable[int]) -> list[int]:
        """Wait until one of ``servers`` has sent a message or died; returns all that did.

        None of them may be left unread for long: its socket fills, and then it stops generating.
        """
        children = {self._servers[server]: server for server in servers}
        return [children[child] for child in wait_for_children([*children])]

    def _call(self, calls: Mapping[int, ServerCall], deadline_s: float | None = None) -> None:
        """Make one call to each server at the same time. The deadline is by default that of a batch."""
        with ExitStack() as deadlines:
            for server, call in calls.items():
                child = self._servers[server]
                deadlines.enter_context(child.enforce_deadline(deadline_s or self._config.deadline_s))
                with _as_engine_error():
                    child.send(msgspec.msgpack.encode(call))
            for server in calls:
                assert isinstance(self._receive(server), Done)

    def _receive(self, server: int) -> Done | Finished:
        with _as_engine_error():
            return _REPLIES.decode(self._servers[server].receive())


@contextmanager
def _as_engine_error() -> Iterator[None]:
    try:
        yield
    except ProcessDied as error:
        raise EngineError(str(error)) from None


@dataclass(frozen=True)
class VllmWeights:
    """A :class:`magrpo.interfaces.Served`: adapters that the servers hold, full copies that they load when needed."""

    _client: VllmClient
    number: int
    version: int
    models: Mapping[int, ServerCall]
    """The calls that load full copies, by server."""

    def generate(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Action]:
        """See :meth:`VllmClient.generate`."""
        return self._client.generate(self, requests, progress)

    def close(self) -> None:
        self._client.unload(self)
