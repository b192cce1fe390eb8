"""The host of an engine: the agents, the policy of the trainer, and the fleet and the place of servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from magrpo.config.place import EnginePlace
from magrpo.fleets import Fleet

if TYPE_CHECKING:
    from magrpo.model.lineup import Lineup
    from magrpo.model.policy import Policy


@dataclass(frozen=True)
class EngineHost:
    """Everything that an engine is opened with."""

    lineup: Lineup
    open_policy: Callable[[], Policy]
    """Returns the policy of this process, whose models load at the first call."""
    fleet: Fleet | None = None
    """The fleet that starts the servers of ``place``; None: there are none to start."""
    place: EnginePlace = field(default_factory=EnginePlace)
    num_served: int = 1
    """Largest number of sets of weights that are open at once."""
    shares_gpus: bool = True
    """Whether the update runs on the same GPUs, so that the engine must release memory when it sleeps."""
    logs: Path | None = None
    """Folder for the servers' logs; None: a temporary one."""

    @classmethod
    def of(cls, policy: Policy) -> EngineHost:
        """The host in this process, with a policy that is already open."""
        return cls(policy.lineup, lambda: policy)
