"""Names of weights on servers, which mean the same weights for ever, and groups of servers that can hold them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from magrpo.engines.probes import Probe, read_probe

if TYPE_CHECKING:
    from magrpo.model.lineup import Lineup


class ServerGroup(NamedTuple):
    """Servers that can stand in for one another: of a base with all its adapters, or of one agent's full copy."""

    base: str
    agent: str = ""
    """The agent whose full copies they hold, one at a time; empty: they hold adapters."""

    @classmethod
    def of(cls, lineup: Lineup, agent: str) -> ServerGroup:
        """The group that serves ``agent``."""
        return cls(lineup.base(agent), agent if lineup.weights(agent) == "full" else "")

    def __str__(self) -> str:
        return f"{self.base} for agent {self.agent!r}" if self.agent else self.base


@dataclass(frozen=True)
class NamedWeights:
    """An adapter or a full copy, under a name that means these weights for ever: ``helper.7.1f3a9c0d2b4e``."""

    name: str
    group: ServerGroup
    folder: Path
    probe: Probe | None

    @classmethod
    def of(cls, agent: str, version: int, group: ServerGroup, folder: Path) -> NamedWeights:
        """The weights in ``folder``; their name ends with the first digits of the SHA-256 of their files."""
        folder = folder.resolve()
        content = hashlib.sha256()
        for file in sorted((*folder.glob("*.safetensors"), folder / f"{'' if group.agent else 'adapter_'}config.json")):
            with file.open("rb") as stream:
                content.update(hashlib.file_digest(stream, "sha256").digest())
        return cls(f"{agent}.{version}.{content.hexdigest()[:12]}", group, folder, read_probe(folder))
