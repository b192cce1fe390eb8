"""Training runs as recorded in a tracking store."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magrpo.tracking.connection import mlflow_page, quieten_mlflow, translate_to_unavailable
from magrpo.tracking.sink import RUN_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run  # takes seconds


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A training run as recorded in a tracking store. Times are milliseconds since 1970."""

    run_id: str
    status: str
    started_ms: int
    ended_ms: int | None
    params: dict[str, str]
    returns: tuple[float, ...]
    """Held-out returns of its evaluations in their order, sampled; fractions of the maximum."""
    iterations: int
    mlflow_page: tuple[str, str]
    """As :meth:`magrpo.tracking.sink.MlflowTracker.mlflow_page`."""


def recorded_runs(uri: str, *, only: str | None = None, leave_out: Container[str] = ()) -> list[RecordedRun]:
    """The training runs in a tracking store, of every experiment: one request, and two more for each run.

    Args:
        only: id of the only run to read.
        leave_out: ids of runs to skip.

    Raises:
        Unavailable: the store does not answer, or answers with an error.
    """
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return []  # MLflow would create the file
    quieten_mlflow()
    from mlflow import MlflowClient  # takes seconds

    with translate_to_unavailable(uri):
        client = MlflowClient(uri)
        experiments = [experiment.experiment_id for experiment in _pages(client.search_experiments)]
        query = f"tags.`{RUN_TAG}` LIKE '%'" if only is None else f"tags.`{RUN_TAG}` = '{only}'"
        runs = _pages(partial(client.search_runs, experiments, query))
        return [_recorded(client, uri, run) for run in runs if run.data.tags[RUN_TAG] not in leave_out]


def _pages(search: Callable[..., Any]) -> Iterator[Any]:
    """Every result of a paged search of MLflow."""
    token = None
    while token is None or token:
        page = search(page_token=token)
        yield from page
        token = page.token or ""


def newest_by_step(history: Iterable[Metric]) -> dict[int, float]:
    """The value recorded last for each step; steps that were repeated have several."""
    return {metric.step: metric.value for metric in sorted(history, key=lambda metric: metric.timestamp)}


def _recorded(client: MlflowClient, uri: str, run: Run) -> RecordedRun:
    evaluated = newest_by_step(client.get_metric_history(run.info.run_id, "eval/return"))
    updated = newest_by_step(client.get_metric_history(run.info.run_id, "update/lr"))
    return RecordedRun(
        run_id=run.data.tags[RUN_TAG],
        status=run.info.status,
        started_ms=run.info.start_time,
        ended_ms=run.info.end_time,
        params=dict(run.data.params),
        returns=tuple(evaluated[step] for step in sorted(evaluated)),
        iterations=max(updated, default=0),
        mlflow_page=mlflow_page(uri, run.info.experiment_id, run.info.run_id),
    )
