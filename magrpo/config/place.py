"""Where a run executes: in one process, or in actors of a Ray cluster. Never affects what it trains, so it may change
between resumes and is not part of any stage key."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from magrpo.config.validate import read_toml, validate_config
from magrpo.errors import ConfigError
from magrpo.plugins import Section
from magrpo.text import format_count


class SamplerPlace(Section):
    """Actors that sample completions."""

    count: int = Field(0, ge=0)
    """Number of samplers. Each holds an engine with all agents. 0: sample in the run's own process."""
    gpus: int | None = Field(None, ge=0)
    """Number of GPUs of each sampler; with 2 or more, vLLM splits a base model over them (tensor parallelism). None: 1
    if the models run on a GPU, else 0."""


class RankPlace(Section):
    """Actors that compute one update together."""

    count: int = Field(0, ge=0)
    """Number of ranks; it must divide ``optim.lanes`` times the number of trained adapters and copies. 0: update in the
    run's own process."""
    gpus: int | None = Field(None, ge=0, le=1)
    """Number of GPUs of each rank. None: 1 if the models run on a GPU, else 0."""
    shard: Literal["none", "base"] = "none"
    """``base``: shard the layers of base models, and agents with ``weights = "full"``, over the ranks; ``none``: each
    rank holds everything."""


class JailPlace(Section):
    """Actors that run the agents' programs in sandboxes."""

    nodes: int = Field(0, ge=0)
    """Number of nodes of the cluster that each run a pool of sandboxes. 0: run programs on this machine."""


class Place(Section):
    """Where a run executes. Without a file: in one process on this machine."""

    address: str = ""
    """Address of the Ray cluster, as HOST:PORT; ``auto`` for the cluster that this machine belongs to. Empty: start Ray
    on this machine."""
    colocate: bool = False
    """Whether samplers and ranks take turns on the same GPUs: samplers sleep during an update."""
    samplers: SamplerPlace = SamplerPlace()
    ranks: RankPlace = RankPlace()
    jails: JailPlace = JailPlace()

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, value: str) -> str:
        if value.startswith("ray://"):
            raise ValueError(
                "the driver must be a node of the cluster: run `ray start --address=HEAD:6379 --num-cpus=0` on this "
                'machine, and set address = "auto"'
            )
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Place:
        if self.address and not self.uses_ray:
            raise ValueError("address needs actors to place: set samplers.count, ranks.count or jails.nodes")
        for name, actors in (("samplers", self.samplers), ("ranks", self.ranks)):
            if actors.gpus is not None and not actors.count:
                raise ValueError(f"{name}.gpus is the number of GPUs of each: set {name}.count, or remove it")
        if self.ranks.shard != "none" and self.ranks.count < 2:
            raise ValueError("ranks.shard spreads models over ranks: set ranks.count to 2 or more, or remove it")
        if self.colocate and not (self.samplers.count and self.ranks.count):
            raise ValueError("colocate lets samplers and ranks share GPUs: set samplers.count and ranks.count")
        if self.colocate and (self.samplers.gpus not in (None, 1) or self.ranks.gpus == 0):
            raise ValueError("colocate needs one GPU for each sampler and rank: remove samplers.gpus and ranks.gpus")
        return self

    @property
    def uses_ray(self) -> bool:
        """Whether some of the run executes in actors."""
        return self.samplers.count + self.ranks.count + self.jails.nodes > 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether actors hold all weights, so that the run's own process needs no GPU."""
        return self.samplers.count > 0 and self.ranks.count > 0

    @property
    def is_default(self) -> bool:
        """Whether everything runs in one process on this machine."""
        return self == Place()

    def list_tags(self) -> dict[str, str]:
        """MLflow tags of the place: its description and its numbers of samplers and ranks."""
        numbers = {"magrpo.samplers": str(self.samplers.count), "magrpo.ranks": str(self.ranks.count)}
        return {"magrpo.config.place": self.describe(), **numbers}

    def describe(self) -> str:
        """The place in words, such as ``8 samplers, 8 ranks, on this machine``."""
        parts = []
        if self.samplers.count:
            parts.append(format_count(self.samplers.count, "samplers"))
        if self.ranks.count:
            spread = " with models spread over them" if self.ranks.shard != "none" else ""
            parts.append(format_count(self.ranks.count, "ranks") + spread)
        if self.jails.nodes:
            parts.append(f"sandboxes on {format_count(self.jails.nodes, 'nodes')}")
        if not parts:
            return "one process"
        text = ", ".join(parts)
        if self.colocate:
            text += ", taking turns on the same GPUs"
        cluster = f"the Ray cluster {self.address}" if self.address else "this machine"
        return f"{text}, on {cluster}"


def load_place(path: Path) -> Place:
    """Read a place from a TOML file. Raises ConfigError, which names the file, the key and the remedy."""
    tree = read_toml(path)
    if {"agents", "problems"} & set(tree):
        raise ConfigError(
            f"{path}: is a run configuration, not a cluster file (place); `magrpo config show place` lists the keys"
        )
    return validate_config(Place, tree, (), str(path))
