"""What a run records of its steps with the tracker: metrics, artifacts, datasets and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from magrpo.config import RunConfig
from magrpo.interfaces import Tracker
from magrpo.layout import TRAJECTORIES, WEIGHTS, Step, evaluates_after, read_scored, split_files
from magrpo.store import Pointer, RunStore, merge_metrics, read_records
from magrpo.types import RolloutGroup, ScoredTurn, Trajectory, TrajectoryStep, TurnTimes

ItemT = TypeVar("ItemT")
TreeLevel = Sequence[RolloutGroup[ScoredTurn]]


class RunRecorder:
    """Records each committed step. ``on_evaluation`` is called after every evaluation."""

    def __init__(
        self, config: RunConfig, store: RunStore, tracker: Tracker, on_evaluation: Callable[[], None] = lambda: None
    ) -> None:
        self._config, self._store, self._tracker = config, store, tracker
        self._on_evaluation = on_evaluation
        self._checkpoint: Pointer | None = None
        self._outputs: dict[str, Pointer] = {}
        """Outputs of the iteration so far, by the step's name."""
        self._metrics: dict[str, float] = {}
        """Metrics of the iteration so far."""

    def record_step(self, step: Step, pointer: Pointer) -> None:
        """Record a committed step; metrics are recorded once an iteration."""
        store, tracker = self._store, self._tracker
        folder = store.folder(pointer)
        if step.stage == "prepare":
            self._record_datasets(pointer)
        elif step.stage == "start":
            self._checkpoint = pointer
        elif step.stage in ("report", "tables"):
            if step.stage == "report":
                tracker.metrics(store.metrics(pointer), step.iteration)
            tracker.artifact(folder, "report")
        else:
            self._outputs[step.name] = pointer
            merge_metrics(self._metrics, store.metrics(pointer))
            if step.stage == "update":
                self._checkpoint = pointer
                self._trace_training(step.iteration)
            else:
                tracker.artifact(folder, pointer["dir"])
        if step.stage == "evaluate":
            self._record_evaluation(step.iteration, pointer)
        if step.stage == "evaluate" or (step.stage == "update" and not evaluates_after(self._config, step.iteration)):
            self._finish_iteration(step.iteration)
        elif step.stage == "baseline":
            self._finish_iteration([row.name for row in self._config.baselines.rows].index(step.part))

    def _record_datasets(self, problems: Pointer) -> None:
        for split, path in split_files(self._store.folder(problems)).items():
            sha = self._store.file_digest(problems, path.name)
            context = "training" if split == "train" else "evaluation"
            self._tracker.dataset(f"{self._config.problems.kind} {split}", path, sha, context)
        self._tracker.artifact(self._store.folder(problems), "problems")

    def _finish_iteration(self, number: int) -> None:
        self._tracker.metrics(self._metrics, number)
        self._metrics, self._outputs = {}, {}

    def _record_evaluation(self, iteration: int, evaluation: Pointer) -> None:
        assert self._checkpoint is not None
        weights = self._store.folder(self._checkpoint) / WEIGHTS
        self._tracker.artifact(weights, f"checkpoints/{iteration:05d}")
        self._trace_evaluation(iteration, evaluation)
        self._on_evaluation()

    def _trace_training(self, iteration: int) -> None:
        """Record the first trajectory of some of the iteration's problems."""
        tracking, store = self._config.tracking, self._store
        if not tracking.traces or iteration % tracking.trace_every:
            return
        rollouts, scores = (
            [pointer for name, pointer in self._outputs.items() if name.startswith(f"{stage}.")]
            for stage in ("rollout", "score")
        )
        levels = [read_scored(store.folder(pointer)) for pointer in scores]
        times = [
            TurnTimes(store.work_interval(r), store.work_interval(s)) for r, s in zip(rollouts, scores, strict=False)
        ]
        for root in spread_evenly(levels[0], tracking.traces):
            trajectory = first_trajectory(root, levels)
            self._tracker.trace(trajectory, iteration, times[: len(trajectory.steps)])

    def _trace_evaluation(self, iteration: int, evaluation: Pointer) -> None:
        """Record the first sampled trajectory of some held-out problems, the same at every evaluation of a run."""
        path = self._store.folder(evaluation) / TRAJECTORIES
        if not self._config.tracking.traces or not path.exists():  # early versions kept no trajectories
            return
        sampled = [t for t in read_records(path, Trajectory) if (t.split, t.mode) == ("test", "sampled")]
        interval = self._store.work_interval(evaluation)
        for trajectory in spread_evenly(sampled, self._config.tracking.traces):
            self._tracker.trace(trajectory, iteration, [TurnTimes(interval, interval)] * len(trajectory.steps))


def spread_evenly(items: Sequence[ItemT], count: int) -> Sequence[ItemT]:
    """At most ``count`` of the items, evenly spaced, starting with the first."""
    return items[:: max(1, len(items) // count)][:count]


def first_trajectory(root: RolloutGroup[ScoredTurn], levels: Sequence[TreeLevel]) -> Trajectory:
    """The trajectory from ``root`` along the first joint action that was continued, to its end."""
    nodes = [root]
    for level in levels[1:]:
        child = next(_children(nodes[-1], level), None)
        if child is None:
            break
        nodes.append(child)
    path = (*nodes[-1].path, 0)
    taken = tuple(TrajectoryStep.of(node, index) for node, index in zip(nodes, path, strict=True))
    return Trajectory(root.problem, "train", "sampled", path, taken)


def _children(node: RolloutGroup[ScoredTurn], level: TreeLevel) -> Iterator[RolloutGroup[ScoredTurn]]:
    """The nodes of the next turn that continue ``node``, in their order."""
    for other in level:
        if other.problem.task_id == node.problem.task_id and other.path[:-1] == node.path:
            yield other
