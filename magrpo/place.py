"""The place: where a run runs. It is in no stage key and may change at every resume; what is trained never depends on it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from magrpo.plugins import ConfigError, Section, validate_config


class FleetPlace(Section):
    """What starts processes."""

    kind: Literal["local", "ray"] = "local"
    """``local``: on this machine; ``ray``: on the nodes of a Ray cluster, which this machine is a node of."""
    address: str = "auto"
    """With ``ray``: the cluster's address, ``auto`` for the one that this machine belongs to."""

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, value: str) -> str:
        if value.startswith("ray://"):
            raise ValueError(
                'the driver must be a node of the cluster: run `ray start --address=HEAD:6379 --num-cpus=0` here and set "auto"'
            )
        return value


class EnginePlace(Section):
    """vLLM servers over HTTP, if there are any; else the engine runs as its plug-in says."""

    servers: int | tuple[str, ...] = 0
    """Number of servers to start for each base model, or the addresses of servers that run already. 0: none."""
    gpus: int = Field(1, ge=0)
    """GPUs of each server that is started, by tensor parallelism inside one node. 0: on processors."""
    max_batch: int = Field(256, ge=1)
    """Maximum number of completions in flight at each server."""
    restarts: int = Field(3, ge=0)
    """Maximum number of restarts of one server in one stage."""
    batch_invariant: bool = False
    """Whether vLLM computes each completion in the same way whatever else is in its batch. Slower; GPUs only."""

    @field_validator("servers")
    @classmethod
    def _check_servers(cls, value: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if isinstance(value, int):
            if value < 0:
                raise ValueError("must be 0 or more, or a list of addresses")
            return value
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no address of a server; write it as http://10.0.0.5:8000")
        if not value or len(set(value)) != len(value):
            raise ValueError("must name at least one server, and each once")
        return tuple(url.rstrip("/") for url in value)

    @property
    def is_remote(self) -> bool:
        """Whether completions come from servers over HTTP."""
        return self.servers != 0


class UpdatePlace(Section):
    """The processes that compute updates."""

    ranks: int = Field(0, ge=0)
    """Number of processes under ``torchrun``, one GPU each; must divide ``optim.lanes`` times the number of trained
    adapters and copies. 0: the update runs in the run's own process."""
    shard: Literal["none", "base"] = "none"
    """``base``: each rank holds a part of the frozen base model (FSDP2). Full weights are always sharded."""
    colocate: bool = False
    """Whether servers and ranks share the GPUs by turns: servers sleep during an update."""


class SandboxPlace(Section):
    """Where programs run."""

    nodes: int = Field(0, ge=0)
    """With Ray: a pool of jails on each of so many nodes. 0: on this machine only."""


class Place(Section):
    """Where a run runs. Without a file: in one process, on this machine."""

    fleet: FleetPlace = FleetPlace()
    engine: EnginePlace = EnginePlace()
    update: UpdatePlace = UpdatePlace()
    sandbox: SandboxPlace = SandboxPlace()

    @model_validator(mode="after")
    def _fits_together(self) -> Place:
        if self.sandbox.nodes and self.fleet.kind != "ray":
            raise ValueError('sandbox.nodes needs a cluster: set fleet.kind = "ray", or leave it out')
        if self.update.shard == "base" and self.update.ranks < 2:
            raise ValueError('update.shard = "base" needs update.ranks of 2 or more')
        if self.update.colocate:
            if not isinstance(self.engine.servers, int) or not self.engine.servers or not self.update.ranks:
                raise ValueError("update.colocate needs engine.servers that are started here, and update.ranks")
            if self.fleet.kind != "local":
                raise ValueError('update.colocate shares the GPUs of one machine: set fleet.kind = "local"')
        return self

    @property
    def is_default(self) -> bool:
        """Whether everything runs in one process on this machine."""
        return self == Place()


def load_place(path: Path, overrides: Sequence[str] = ()) -> Place:
    """Read a place from a TOML file. Raises ConfigError, which names the file, the key and the remedy."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
    return validate_config(Place, tree, overrides, str(path))
