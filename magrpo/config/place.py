"""Where a run executes (servers, ranks, nodes). Never affects what it trains, so it may change between resumes and is
not part of any stage key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from magrpo.plugins import ConfigError, Section, read_toml, validate_config


class FleetPlace(Section):
    """How processes are started."""

    kind: Literal["local", "ray"] = "local"
    """``local``: on this machine; ``ray``: on the nodes of a Ray cluster; this machine must be one of its nodes."""
    address: str = "auto"
    """With ``ray``, the cluster's address. ``auto``: the cluster that this machine belongs to."""

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, value: str) -> str:
        if value.startswith("ray://"):
            raise ValueError(
                "the driver must be a node of the cluster: run `ray start --address=HEAD:6379 --num-cpus=0` on this "
                'machine, and set fleet.address = "auto"'
            )
        return value


class EnginePlace(Section):
    """vLLM servers over HTTP, if any; otherwise the engine runs as its plug-in says."""

    servers: int | tuple[str, ...] = 0
    """Number of servers to start for each base model, or the addresses of servers that are already running. 0: none."""
    gpus: int = Field(1, ge=0)
    """Number of GPUs of each started server (tensor parallelism within one node). 0: run on CPUs."""
    max_batch: int = Field(256, ge=1)
    """Maximum number of completions in progress at each server."""
    restarts: int = Field(3, ge=0)
    """Maximum number of restarts of a server within one stage."""
    batch_invariant: bool = False
    """Whether vLLM computes each completion independently of the rest of its batch. Slower; GPUs only."""

    @field_validator("servers", mode="before")
    @classmethod
    def _check_servers(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(url, str) for url in value):
            raise ValueError(
                f'must be the number of servers to start, or addresses such as ["http://10.0.0.5:8000"]; got {value!r}'
            )
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is not a server address; write it as http://10.0.0.5:8000")
        urls = tuple(url.rstrip("/") for url in value)
        if twice := next((url for url in urls if urls.count(url) > 1), None):
            raise ValueError(f"{twice} is named twice")
        return urls

    def describe(self) -> str:
        """The servers in words, such as ``8 servers of 1 GPU``; empty if there are none."""
        if isinstance(self.servers, tuple):
            return f"{_count(len(self.servers), 'external server')}"
        size = f"of {_count(self.gpus, 'GPU')}" if self.gpus else "on CPUs"
        return f"{_count(self.servers, 'server')} {size}" if self.servers else ""

    @property
    def is_remote(self) -> bool:
        """Whether completions come from servers over HTTP."""
        return self.servers != 0


class UpdatePlace(Section):
    """The processes that compute updates."""

    ranks: int = Field(0, ge=0)
    """Number of processes started by ``torchrun``; it must divide ``optim.lanes`` times the number of trained adapters
    and copies. 0: update in the run's own process."""
    gpus: int | None = Field(None, ge=0, le=1)
    """Number of GPUs of each rank. 0: run on CPUs. None: 1 if this machine has GPUs."""
    shard: Literal["none", "base"] = "none"
    """``base``: shard the layers of base models, and agents with ``weights = "full"``, over the ranks; ``none``: each
    rank holds everything."""
    deadline_s: float = Field(1800.0, gt=0, le=10**6)
    """Maximum time in seconds without progress of the ranks, such as one micro-batch; after that they are killed."""
    colocate: bool = False
    """Whether servers and ranks take turns on the same GPUs: servers sleep during an update."""


class SandboxPlace(Section):
    """Where programs run."""

    nodes: int = Field(0, ge=0)
    """With Ray, number of nodes that each run a pool of sandboxes. 0: on this machine only."""


class Place(Section):
    """Where a run executes. Without a file: in one process on this machine."""

    fleet: FleetPlace = FleetPlace()
    engine: EnginePlace = EnginePlace()
    update: UpdatePlace = UpdatePlace()
    sandbox: SandboxPlace = SandboxPlace()

    @model_validator(mode="after")
    def _fits_together(self) -> Place:
        if self.sandbox.nodes and self.fleet.kind != "ray":
            raise ValueError('sandbox.nodes needs a cluster: set fleet.kind = "ray", or remove it')
        if self.update.shard != "none" and self.update.ranks < 2:
            raise ValueError("update.shard spreads models over ranks: set update.ranks to 2 or more, or remove it")
        if self.update.colocate:
            if not isinstance(self.engine.servers, int) or not self.engine.servers or not self.update.ranks:
                raise ValueError(
                    "update.colocate needs update.ranks, and engine.servers as a number of servers to start"
                )
            if self.fleet.kind != "local":
                raise ValueError('update.colocate shares the GPUs of one machine: set fleet.kind = "local"')
        return self

    @property
    def is_elsewhere(self) -> bool:
        """Whether other machines hold all weights, so that the driver's machine needs no GPU."""
        return self.fleet.kind == "ray" and self.engine.is_remote and self.update.ranks > 0

    @property
    def is_default(self) -> bool:
        """Whether everything runs in one process on this machine."""
        return self == Place()

    def list_tags(self) -> dict[str, str]:
        """MLflow tags of the place: its description and its numbers of servers and ranks."""
        servers = self.engine.servers
        num_servers = servers if isinstance(servers, int) else len(servers)
        numbers = {"magrpo.servers": str(num_servers), "magrpo.ranks": str(self.update.ranks)}
        return {"magrpo.config.place": self.describe(), **numbers}

    def describe(self) -> str:
        """The place in words, such as ``8 servers of 1 GPU, 8 ranks, taking turns on the same GPUs``."""
        update = self.update
        parts = [] if self.fleet.kind == "local" else [f"Ray cluster {self.fleet.address}"]
        parts += [self.engine.describe()] if self.engine.is_remote else []
        if update.ranks:
            parts.append(_count(update.ranks, "rank") + " with models spread over them" * (update.shard != "none"))
        if update.colocate:
            parts.append("taking turns on the same GPUs")
        if self.sandbox.nodes:
            parts.append(f"sandboxes on {_count(self.sandbox.nodes, 'node')}")
        return ", ".join(parts) or "one process"


def load_place(path: Path, overrides: Sequence[str] = ()) -> Place:
    """Read a place from a TOML file. Raises ConfigError, which names the file, the key and the remedy."""
    tree = read_toml(path)
    if {"agents", "problems"} & set(tree):
        raise ConfigError(f"{path}: is a run configuration, not a cluster file (place); `magrpo place` lists the keys")
    return validate_config(Place, tree, overrides, str(path))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
