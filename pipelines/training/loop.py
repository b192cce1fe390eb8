"""The loop, written once: prepare, then rollout, score, credit, update and evaluate for every iteration.

``stages`` are plain callables or Prefect tasks; the loop does not know which. Between stages travel pointers to
committed outputs. Imports no prefect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from magrpo.config import RunConfig
from magrpo.interfaces import Tracker
from magrpo.store import Pointer, RunStore
from pipelines.training.traces import trace_evaluation, trace_training


class Stages(Protocol):
    """One method for each stage: pointers in, pointer out. See :class:`pipelines.training.stages.Session`."""

    def prepare(self) -> Pointer: ...

    def start(self) -> Pointer: ...

    def rollout(
        self, iteration: int, turn: int, problems: Pointer, checkpoint: Pointer, parents: Pointer | None
    ) -> Pointer: ...

    def score(self, iteration: int, turn: int, groups: Pointer) -> Pointer: ...

    def credit(self, iteration: int, scored: Sequence[Pointer]) -> Pointer: ...

    def update(self, iteration: int, samples: Pointer, checkpoint: Pointer) -> Pointer: ...

    def evaluate(self, iteration: int, problems: Pointer, checkpoint: Pointer) -> Pointer: ...

    def baseline(self, row: str, problems: Pointer, untrained: Pointer, earlier: Mapping[str, Pointer]) -> Pointer: ...

    def report(self, evaluations: Sequence[Pointer]) -> Pointer: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run leaves: problems, last checkpoint, evaluations by iteration, and the report.

    A run of baselines has no evaluations: its rows are in the report.
    """

    problems: Pointer
    checkpoint: Pointer
    evaluations: dict[int, Pointer]
    report: Pointer


def run(
    config: RunConfig,
    stages: Stages,
    store: RunStore,
    tracker: Tracker,
    evaluated: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train from the first uncommitted stage to the end and record every stage with ``tracker``.

    ``evaluated`` is called after each evaluation.
    """
    traces = config.tracking.traces
    problems = stages.prepare()
    for split in sorted(store.folder(problems).glob("*.jsonl.gz")):
        name, sha = split.name.removesuffix(".jsonl.gz"), store.file_digest(problems, split.name)
        context = "training" if name == "train" else "evaluation"
        tracker.dataset(f"{config.problems.kind} {name}", split, sha, context)
    tracker.artifact(store.folder(problems), "problems")
    checkpoint = stages.start()
    if config.baselines.rows:
        return _baselines(config, stages, store, tracker, problems, checkpoint)
    evaluations: dict[int, Pointer] = {}
    for iteration in range(config.train.num_iterations + 1):
        done: list[Pointer] = []
        if iteration > 0:
            rollouts, scored, rest = _train(iteration, config, stages, store, problems, checkpoint)
            done = [*rollouts, *scored, *rest]
            checkpoint = done[-1]
            if traces and iteration % config.tracking.trace_every == 0:
                trace_training(iteration, rollouts, scored, traces, store, tracker)
        if iteration % config.eval.every == 0 or iteration == config.train.num_iterations:
            evaluations[iteration] = stages.evaluate(iteration, problems, checkpoint)
            done.append(evaluations[iteration])
            tracker.artifact(store.folder(checkpoint) / "weights", f"checkpoints/{iteration:05d}")
            if traces:
                trace_evaluation(iteration, evaluations[iteration], traces, store, tracker)
            evaluated()
        _record(iteration, done, checkpoint, store, tracker)
    report = stages.report([evaluations[iteration] for iteration in sorted(evaluations)])
    tracker.metrics(store.metrics(report), config.train.num_iterations)
    tracker.artifact(store.folder(report), "report")
    return Outcome(problems, checkpoint, evaluations, report)


def _baselines(
    config: RunConfig, stages: Stages, store: RunStore, tracker: Tracker, problems: Pointer, untrained: Pointer
) -> Outcome:
    """Every row of the table of baselines; a row that votes is told what the others cost. The step is the row's."""
    rows: dict[str, Pointer] = {}
    others: dict[str, Pointer] = {}
    for number, row in enumerate(config.baselines.rows):
        rows[row.name] = stages.baseline(row.name, problems, untrained, others if row.votes != "none" else {})
        if row.votes == "none":
            others[row.name] = rows[row.name]
        _record(number, [rows[row.name]], untrained, store, tracker)
    report = stages.report(list(rows.values()))
    tracker.artifact(store.folder(report), "report")
    return Outcome(problems, untrained, {}, report)


def _train(
    iteration: int, config: RunConfig, stages: Stages, store: RunStore, problems: Pointer, checkpoint: Pointer
) -> tuple[list[Pointer], list[Pointer], list[Pointer]]:
    """One iteration; the pointers of its rollouts, of their scores, and of what follows, the new checkpoint last."""
    scored: list[Pointer] = []
    rollouts: list[Pointer] = []
    for turn in range(config.env.num_turns):
        parents = scored[-1] if scored else None
        rollouts.append(stages.rollout(iteration, turn, problems, checkpoint, parents))
        if not store.metrics(rollouts[-1])["rollout/groups"]:
            break  # every node terminated
        scored.append(stages.score(iteration, turn, rollouts[-1]))
    samples = stages.credit(iteration, scored)
    return rollouts, scored, [samples, stages.update(iteration, samples, checkpoint)]


def _record(iteration: int, done: Sequence[Pointer], checkpoint: Pointer, store: RunStore, tracker: Tracker) -> None:
    metrics: dict[str, float] = {}
    for pointer in done:
        for key, value in store.metrics(pointer).items():
            # Turns of one iteration add up their seconds; of any other quantity the last turn speaks.
            metrics[key] = metrics.get(key, 0.0) + value if key.startswith("time/") else value
        if pointer != checkpoint:
            tracker.artifact(store.folder(pointer), pointer["dir"])
    tracker.metrics(metrics, iteration)
