"""Play: whole trajectories, each on its own, from a problem to its last turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from magrpo.config import RolloutConfig
from magrpo.stages.backend import Backend, Team
from magrpo.stages.rollout import Node, child_node, has_ended, rollout
from magrpo.stages.score import score
from magrpo.types import Mode, Split, Trajectory, TrajectoryStep


@dataclass(frozen=True, slots=True)
class Start:
    """A node without history where ``node.group_size`` trajectories begin, with their split and mode."""

    split: Split
    mode: Mode
    node: Node


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a trajectory ends.

    It ends early where its reward exceeds ``stop_above``, in reward units (None: never). Of ``max_tries`` tries each
    takes the turns of the environment, and starts at the problem again without history.
    """

    stop_above: float | None = None
    max_tries: int = 1


_ALL_TURNS = Stopping()


def play_trajectories(
    starts: Sequence[Start],
    team: Team,
    backend: Backend,
    config: RolloutConfig,
    seed: int,
    stopping: Stopping = _ALL_TURNS,
) -> list[Trajectory]:
    """Every trajectory from ``starts`` to its end, all of them in one engine batch a turn.

    At each turn the acting agents answer once. A trajectory also ends where the sandbox failed on it: then its last
    turn is masked. Its steps are the turns of all tries.
    """
    aligned = config.model_copy(update={"joint_mode": "aligned", "crossed_pairs": None})
    num_turns = team.env.num_turns
    finished: list[Trajectory] = []
    unfinished: list[tuple[Start, tuple[TrajectoryStep, ...]]] = [(start, ()) for start in starts]
    while unfinished:
        turns_taken = len(unfinished[0][1]) + 1
        groups = rollout([start.node for start, _ in unfinished], team, backend, aligned, seed)
        scored, stats = score(groups, team, backend.sandbox, backend.cache)
        backend.stats.add(stats)
        continued: list[tuple[Start, tuple[TrajectoryStep, ...]]] = []
        for (start, earlier_steps), group in zip(unfinished, scored, strict=True):
            for index, turn in enumerate(group.turns):
                steps = (*earlier_steps, TrajectoryStep.of(group, index))
                has_stopped = turn.masked or has_ended(turn, stopping.stop_above)
                if has_stopped or turns_taken == stopping.max_tries * num_turns:
                    path = (*group.path, index)
                    finished.append(Trajectory(group.problem, start.split, start.mode, path, steps))
                    continue
                node = child_node(group, index, start.node.sampling, 1)
                if turns_taken % num_turns == 0:
                    node = replace(node, history=())
                continued.append((Start(start.split, start.mode, node), steps))
        unfinished = continued
    return finished
