"""What an engine is opened on: the agents, the trainer's policy if it wants one, and its share of the GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magrpo.model.lineup import Lineup
    from magrpo.model.policy import Policy


@dataclass(frozen=True)
class EngineHost:
    """Everything that an engine is opened with."""

    lineup: Lineup
    open_policy: Callable[[], Policy]
    """The policy in this process; its models load at the first call."""
    num_served: int = 1
    """Number of sets of weights that are open at once."""
    gpus: int = 1
    """Number of GPUs that the engine may use."""
    owns_gpus: bool = False
    """Whether no trainer uses the same GPUs, so that the engine may fill them and need not sleep."""

    @classmethod
    def of(cls, policy: Policy) -> EngineHost:
        """The host in this process, with a policy that is already open."""
        return cls(policy.lineup, lambda: policy)
