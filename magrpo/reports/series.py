"""Series of training metrics, read from the stages that a run has committed, and the ends of a series."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from magrpo.run.steps import TRAINING_STAGES
from magrpo.run.store import merge_metrics, sort_stages

StageMetrics = Sequence[tuple[int, str, Mapping[str, float]]]
"""Iteration, stage and metrics of every committed stage, in any order."""
ValueT = TypeVar("ValueT")


def metrics_by_iteration(
    metrics: StageMetrics, stages: Collection[str] = TRAINING_STAGES
) -> dict[int, dict[str, float]]:
    """Return the metrics of some training stages, by default all, by iteration in ascending order.

    With several turns, times are summed, and every other metric is that of the last turn.
    """
    merged: dict[int, dict[str, float]] = defaultdict(dict)
    for iteration, stage, values in sort_stages(metrics):
        if iteration > 0 and stage.partition(".")[0] in stages:
            merge_metrics(merged[iteration], values)
    return dict(merged)


def metric_series(metrics: StageMetrics, key: str) -> list[tuple[int, float]]:
    """Return iteration and value of a training metric wherever it was reported."""
    by_iteration = metrics_by_iteration(metrics)
    return [(iteration, values[key]) for iteration, values in by_iteration.items() if key in values]


def first_and_last(values: Sequence[ValueT]) -> list[ValueT]:
    """Return the first and the last of ``values``; a single value is returned once."""
    return [*values] if len(values) < 2 else [values[0], values[-1]]
