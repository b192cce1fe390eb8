"""Runs as their tracking server knows them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magrpo.tracking.connection import how_to_look, quieten_mlflow, usable
from magrpo.tracking.sink import RUN_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A training run as its tracking store knows it. Times are milliseconds since 1970."""

    run_id: str
    status: str
    started_ms: int
    ended_ms: int | None
    params: dict[str, str]
    returns: tuple[float, ...]
    """Held-out returns of its evaluations in their order, fractions of the maximum; sampled."""
    iterations: int
    look: tuple[str, str]
    """As :meth:`magrpo.tracking.sink.MlflowTracker.how_to_look`."""


def recorded_runs(uri: str, *, only: str | None = None, leave_out: Container[str] = ()) -> list[RecordedRun]:
    """The training runs in a tracking store, of every experiment; one request and two more for each run.

    Args:
        only: id of the one run that is wanted.
        leave_out: ids of runs that are not.

    Raises:
        Unavailable: the store does not answer, or not as it should.
    """
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return []  # which MLflow would create
    quieten_mlflow()
    from mlflow import MlflowClient

    with usable(uri):
        client = MlflowClient(uri)
        experiments = [experiment.experiment_id for experiment in _pages(client.search_experiments)]
        query = f"tags.`{RUN_TAG}` LIKE '%'" if only is None else f"tags.`{RUN_TAG}` = '{only}'"
        runs = _pages(partial(client.search_runs, experiments, query))
        return [_recorded(client, uri, run) for run in runs if run.data.tags[RUN_TAG] not in leave_out]


def _pages(search: Callable[..., Any]) -> Iterator[Any]:
    """Everything that a paged search of MLflow finds."""
    token = None
    while token is None or token:
        page = search(page_token=token)
        yield from page
        token = page.token or ""


def newest(history: Iterable[Metric]) -> dict[int, float]:
    """A metric's value for each step: the one recorded last, where a stage was done again."""
    return {metric.step: metric.value for metric in sorted(history, key=lambda metric: metric.timestamp)}


def _recorded(client: MlflowClient, uri: str, run: Run) -> RecordedRun:
    evaluated = newest(client.get_metric_history(run.info.run_id, "eval/return"))
    updated = newest(client.get_metric_history(run.info.run_id, "update/lr"))
    return RecordedRun(
        run_id=run.data.tags[RUN_TAG],
        status=run.info.status,
        started_ms=run.info.start_time,
        ended_ms=run.info.end_time,
        params=dict(run.data.params),
        returns=tuple(evaluated[step] for step in sorted(evaluated)),
        iterations=max(updated, default=0),
        look=how_to_look(uri, run.info.experiment_id, run.info.run_id),
    )
