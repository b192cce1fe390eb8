"""The vLLM servers of a place: the commands that start them, their API key, and which agents they can serve."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from magrpo.engines.named_weights import ServerGroup
from magrpo.engines.pool import PoolEngine
from magrpo.engines.roster import Patience
from magrpo.engines.vllm_arguments import MIDDLEWARE, WORKER_EXTENSION, ServerOptions, find_obstacle, make_arguments
from magrpo.fleets import Job
from magrpo.model.host import EngineHost
from magrpo.plugins import ConfigError

KEY = "VLLM_API_KEY"
_MEMORY_FRAC = 0.9
"""Fraction of its GPU's memory that a server takes if nobody else uses the GPU: vLLM's own default."""
_SETTINGS = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler vllm_worker.WorkerExtension knows
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # On processors vLLM otherwise puts its executor into a process of its own, and whoever waits of the two spins.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def open_pool(host: EngineHost, options: ServerOptions) -> PoolEngine:
    """The engine over the servers of ``host.place``, which it starts if the place has only their number.

    Raises ConfigError if no server of vLLM can start here, or if those given cannot serve the agents.
    """
    patience = Patience(deadline_s=options.deadline_s)
    if not isinstance(host.place.servers, int):
        return PoolEngine(host, {}, os.environ.get(KEY), patience)
    if host.place.servers and (obstacle := find_obstacle(host.lineup.device.type)):
        raise ConfigError(f"engine.servers: {obstacle}, or give their addresses")
    key = secrets.token_urlsafe(32)
    return PoolEngine(host, make_jobs(host, options, key), key, patience)


def make_jobs(host: EngineHost, options: ServerOptions, key: str) -> dict[ServerGroup, Job]:
    """How a fleet starts the servers of each base model, and of each full copy."""
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
        group: Job(
            name=f"vllm-{number}",
            command=(*command, *_make_flags(_make_arguments(host, options, group))),
            count=place.servers,
            gpus=place.gpus if uses_cuda else 0,
            shares_gpus=host.shares_gpus,
            environment=environment,
            logs=logs,
        )
        for number, group in enumerate(dict.fromkeys(ServerGroup.of(lineup, agent) for agent in lineup.agents))
    }


def _make_arguments(host: EngineHost, options: ServerOptions, group: ServerGroup) -> dict[str, object]:
    lineup, place = host.lineup, host.place
    agents = [agent for agent in lineup.agents if ServerGroup.of(lineup, agent) == group]
    holders = list(dict.fromkeys(map(lineup.holder, agents)))
    arguments = make_arguments(lineup, holders, options, host.num_served, host.num_served + 1) | {
        "host": "{host}",
        "port": "{port}",
        "tokens_only": True,
        "worker_extension_cls": WORKER_EXTENSION,
        "middleware": MIDDLEWARE,
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
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags
