"""The vLLM servers of a place: the commands that start them, their API key, and which agents they can serve."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from magrpo.engines.dispatch import Patience
from magrpo.engines.host import EngineHost
from magrpo.engines.pool import PoolEngine
from magrpo.engines.vllm_arguments import ServerOptions, make_arguments
from magrpo.fleets import Job
from magrpo.plugins import ConfigError

KEY = "VLLM_API_KEY"
_MEMORY_FRAC = 0.9
"""Fraction of its GPU's memory that a server takes if nobody else uses the GPU: vLLM's own default."""
_SETTINGS = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
}


def open_pool(host: EngineHost, options: ServerOptions) -> PoolEngine:
    """The engine over the servers of ``host.place``, which it starts if the place has only their number.

    Raises ConfigError for agents that such servers cannot serve, or if vLLM is not installed for those to start.
    """
    full = [agent for agent in host.lineup.agents if host.lineup.weights(agent) == "full"]
    if full:
        raise ConfigError(
            f'agent {full[0]!r}: weights = "full": vLLM servers over HTTP take adapters only; set weights = "lora", '
            "or leave engine.servers out of the place"
        )
    patience = Patience(deadline_s=options.deadline_s)
    if not isinstance(host.place.servers, int):
        return PoolEngine(host, {}, os.environ.get(KEY), patience)
    if host.place.servers and importlib.util.find_spec("vllm") is None:
        raise ConfigError("engine.servers: vLLM is not installed; pip install 'magrpo[vllm]', or give their addresses")
    key = secrets.token_urlsafe(32)
    return PoolEngine(host, make_jobs(host, options, key), key, patience)


def make_jobs(host: EngineHost, options: ServerOptions, key: str) -> dict[str, Job]:
    """How a fleet starts the servers of each base model."""
    lineup, place = host.lineup, host.place
    uses_cuda = lineup.device.type == "cuda"
    environment = {**_SETTINGS, KEY: key}
    if uses_cuda and host.shares_gpus:
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # servers sleep; its other endpoints are open to this machine alone
    if place.batch_invariant and uses_cuda:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    assert isinstance(place.servers, int)
    logs = host.logs or Path(tempfile.mkdtemp(prefix="magrpo-vllm-"))
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    return {
        base: Job(
            name=f"vllm-{number}",
            command=(*command, *_make_flags(_make_arguments(host, options, base))),
            count=place.servers,
            gpus=place.gpus if uses_cuda else 0,
            shares_gpus=host.shares_gpus,
            environment=environment,
            logs=logs,
        )
        for number, base in enumerate(dict.fromkeys(map(lineup.base, lineup.agents)))
    }


def _make_arguments(host: EngineHost, options: ServerOptions, base: str) -> dict[str, object]:
    lineup, place = host.lineup, host.place
    holders = list(dict.fromkeys(lineup.holder(agent) for agent in lineup.agents if lineup.base(agent) == base))
    arguments = make_arguments(lineup, holders, options, host.num_served, host.num_served + 1) | {
        "host": "{host}",
        "port": "{port}",
        "tokens_only": True,
        "max_num_seqs": place.max_batch,
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
    }
    if lineup.device.type == "cuda":
        arguments["gpu_memory_utilization"] = options.memory_frac if host.shares_gpus else _MEMORY_FRAC
        if host.shares_gpus:
            arguments["enable_sleep_mode"] = True
        if place.gpus > 1:
            arguments["tensor_parallel_size"] = place.gpus
    return arguments


def _make_flags(arguments: Mapping[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags
