"""What an engine is opened on: the agents, the trainer's policy if it wants one, the fleet and the place of servers."""

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
    """What an engine is opened on."""

    lineup: Lineup
    open_policy: Callable[[], Policy]
    """The policy in this process; its models load at the first call."""
    fleet: Fleet | None = None
    """Starts the servers of ``place``; None: there are none to start."""
    place: EnginePlace = field(default_factory=EnginePlace)
    num_served: int = 1
    """Number of sets of weights that are open at once."""
    shares_gpus: bool = True
    """Whether the update runs on the same GPUs, so that the engine must release memory when it sleeps."""
    logs: Path | None = None
    """Folder for the servers' logs; None: a temporary one."""

    @classmethod
    def of(cls, policy: Policy) -> EngineHost:
        """This process, with a policy that is open."""
        return cls(policy.lineup, lambda: policy)
