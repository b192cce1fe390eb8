"""Which trajectories of a run become traces, and where they are read from. Imports no prefect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from magrpo.interfaces import Tracker
from magrpo.store import Pointer, RunStore, read_records
from magrpo.types import RolloutGroup, ScoredTurn, Step, Trajectory, TurnTimes

ItemT = TypeVar("ItemT")
Level = Sequence[RolloutGroup[ScoredTurn]]


def trace_training(
    iteration: int,
    rollouts: Sequence[Pointer],
    scored: Sequence[Pointer],
    count: int,
    store: RunStore,
    tracker: Tracker,
) -> None:
    """Record the first trajectory of ``count`` problems of an iteration; pointers have an entry for each turn."""
    levels = [read_records(store.folder(p) / "groups.jsonl.gz", RolloutGroup[ScoredTurn]) for p in scored]
    times = [TurnTimes(store.interval(r), store.interval(s)) for r, s in zip(rollouts, scored, strict=False)]
    for root in spread(levels[0], count):
        trajectory = first_trajectory(root, levels)
        tracker.trace(trajectory, iteration, times[: len(trajectory.steps)])


def trace_evaluation(iteration: int, evaluation: Pointer, count: int, store: RunStore, tracker: Tracker) -> None:
    """Record the first sampled trajectory of ``count`` held-out problems, the same at every evaluation of a run."""
    path = store.folder(evaluation) / "trajectories.jsonl.gz"
    if not path.exists():
        return  # evaluated by a version that kept none
    kept = [t for t in read_records(path, Trajectory) if (t.split, t.mode) == ("test", "sampled")]
    interval = store.interval(evaluation)
    for trajectory in spread(kept, count):
        tracker.trace(trajectory, iteration, [TurnTimes(interval, interval)] * len(trajectory.steps))


def spread(items: Sequence[ItemT], count: int) -> Sequence[ItemT]:
    """At most ``count`` of the items, evenly spread over them from the first on."""
    return items[:: max(1, len(items) // count)][:count]


def first_trajectory(root: RolloutGroup[ScoredTurn], levels: Sequence[Level]) -> Trajectory:
    """From a first turn along the first joint action that was continued, to where none was."""
    nodes = [root]
    for level in levels[1:]:
        child = next(_children(nodes[-1], level), None)
        if child is None:
            break
        nodes.append(child)
    path = (*nodes[-1].path, 0)
    steps = tuple(Step.of(node, index) for node, index in zip(nodes, path, strict=True))
    return Trajectory(root.problem, "train", "sampled", path, steps)


def _children(node: RolloutGroup[ScoredTurn], level: Level) -> Iterator[RolloutGroup[ScoredTurn]]:
    """The nodes of the next turn that continue a node, in their order."""
    for other in level:
        if other.problem.task_id == node.problem.task_id and other.path[:-1] == node.path:
            yield other
