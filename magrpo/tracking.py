"""Tracking with MLflow: one MLflow run for each training run. The only importer of mlflow, and lazily.

The first import of MLflow and the first use of a fresh SQLite file take seconds; both happen in the thread that
delivers (:mod:`magrpo.spool`), while the run starts.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from magrpo.config import TrackingConfig
from magrpo.spool import FINAL, Record, Refused, Spool, SpooledTracker, Unavailable, check_keys

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

log = logging.getLogger(__name__)

RUN_TAG = "magrpo.run_id"
"""The MLflow tag by which a run is found again."""
_PARAM_LENGTH = 6000  # MLflow's limits, like those that follow
_BATCH_METRICS = 1000
_BATCH_STRINGS = 100
_DIGEST_LENGTH = 36


class MemoryTracker:
    """A Tracker that keeps everything in lists, for tests and for runs without MLflow."""

    def __init__(self) -> None:
        self.logged_params: dict[str, object] = {}
        self.logged_tags: dict[str, str] = {}
        self.datasets: list[tuple[str, Path, str, str]] = []
        self.history: list[tuple[int, dict[str, float]]] = []
        self.artifacts: list[tuple[Path, str]] = []
        self.status = "RUNNING"

    def params(self, params: Mapping[str, object]) -> None:
        self.logged_params |= params

    def tags(self, tags: Mapping[str, str]) -> None:
        self.logged_tags |= tags

    def dataset(self, name: str, path: Path, digest: str, context: str) -> None:
        self.datasets.append((name, path, digest, context))

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        check_keys(metrics)
        self.history.append((step, dict(metrics)))

    def artifact(self, path: Path, folder: str) -> None:
        self.artifacts.append((path, folder))

    def close(self, status: str) -> None:
        assert status in FINAL, status
        self.status = status


class MlflowSink:
    """One MLflow run, found by its tag ``magrpo.run_id`` or created.

    Args:
        uri: tracking URI, without a file store (MLflow has given that up).
        artifacts: folder for the artifacts of an experiment created here; None leaves it to the server.
    """

    def __init__(self, uri: str, experiment: str, run_id: str, run_name: str, artifacts: Path | None) -> None:
        self.uri, self.experiment, self.run_id, self.run_name = uri, experiment, run_id, run_name
        self._artifacts = artifacts
        self.mlflow_run_id = ""
        self.experiment_id = ""

    def connect(self) -> None:
        quieten_mlflow()
        try:
            self._connect()
        except Refused as error:
            raise Unavailable(f"MLflow at {without_password(self.uri)} cannot be used ({error})") from error

    def _connect(self) -> None:
        from mlflow import MlflowClient

        with _translated(self.uri):
            self._client = MlflowClient(self.uri)
            self.experiment_id = self._find_experiment()
            query = f"tags.`{RUN_TAG}` = '{self.run_id}'"
            found = self._client.search_runs([self.experiment_id], query, max_results=1)
            if found:
                self.mlflow_run_id = found[0].info.run_id
            else:
                tags = {RUN_TAG: self.run_id}
                run = self._client.create_run(self.experiment_id, tags=tags, run_name=self.run_name)
                self.mlflow_run_id = run.info.run_id

    def deliver(self, records: Sequence[Record]) -> None:
        kind = records[0]["kind"]
        with _translated(self.uri):
            getattr(self, f"_deliver_{kind}")(records)

    def _find_experiment(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        location = None if self._artifacts is None else (self._artifacts.absolute() / self.experiment).as_uri()
        return str(self._client.create_experiment(self.experiment, artifact_location=location))

    def _deliver_metrics(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        points: list[Metric] = [
            Metric(key, value, record["time_ms"], record["step"])
            for record in records
            for key, value in record["values"].items()
        ]
        for start in range(0, len(points), _BATCH_METRICS):
            self._client.log_batch(self.mlflow_run_id, metrics=points[start : start + _BATCH_METRICS])

    def _deliver_params(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Param

        values: dict[str, str] = {}
        for record in records:
            values = {key: value[:_PARAM_LENGTH] for key, value in record["values"].items()} | values
        known = self._client.get_run(self.mlflow_run_id).data.params
        changed = sorted(key for key, value in values.items() if known.get(key, value) != value)
        if changed:
            log.warning("tracking: the run was first recorded with other values of %s; those stay", ", ".join(changed))
        fresh = [Param(key, value) for key, value in values.items() if key not in known]
        for start in range(0, len(fresh), _BATCH_STRINGS):
            self._client.log_batch(self.mlflow_run_id, params=fresh[start : start + _BATCH_STRINGS])

    def _deliver_tags(self, records: Sequence[Record]) -> None:
        from mlflow.entities import RunTag

        values: dict[str, str] = {}
        for record in records:
            values |= record["values"]
        tags = [RunTag(key, value) for key, value in values.items()]
        for start in range(0, len(tags), _BATCH_STRINGS):
            self._client.log_batch(self.mlflow_run_id, tags=tags[start : start + _BATCH_STRINGS])

    def _deliver_dataset(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(
                    record["name"], record["digest"][:_DIGEST_LENGTH], "local", json.dumps({"uri": record["path"]})
                ),
                [InputTag("mlflow.data.context", record["context"])],
            )
            for record in records
        ]
        self._client.log_inputs(self.mlflow_run_id, datasets=inputs)

    def _deliver_artifact(self, records: Sequence[Record]) -> None:
        for record in records:
            path = Path(record["path"])
            if not path.exists():
                log.warning("tracking: artifact %s is gone and left out", path)
            elif path.is_dir():
                self._client.log_artifacts(self.mlflow_run_id, str(path), f"{record['folder']}/{path.name}")
            else:
                self._client.log_artifact(self.mlflow_run_id, str(path), record["folder"])

    def _deliver_status(self, records: Sequence[Record]) -> None:
        status, time_ms = records[-1]["value"], records[-1]["time_ms"]
        if status in FINAL:
            self._client.set_terminated(self.mlflow_run_id, status, time_ms)
        else:
            self._client.update_run(self.mlflow_run_id, status=status)


class MlflowTracker(SpooledTracker):
    """Records a run in MLflow: see :class:`SpooledTracker` and :class:`MlflowSink`."""

    def __init__(self, config: TrackingConfig, root: Path, run_id: str, run_name: str, folder: Path) -> None:
        self.uri = tracking_uri(config, root)
        local = self.uri.startswith("sqlite:")  # MLflow would put artifacts below the current folder
        self._mlflow = MlflowSink(
            self.uri, config.experiment, run_id, run_name, root / "mlartifacts" if local else None
        )
        super().__init__(Spool(folder), self._mlflow)

    def how_to_look(self) -> tuple[str, str]:
        """The command that shows the run (empty for a server) and the address of its page."""
        return how_to_look(self.uri, self._mlflow.experiment_id, self._mlflow.mlflow_run_id)


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
    """As :meth:`MlflowTracker.how_to_look`."""


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

    try:
        with _translated(uri):
            client = MlflowClient(uri)
            experiments = [experiment.experiment_id for experiment in _pages(client.search_experiments)]
            query = f"tags.`{RUN_TAG}` LIKE '%'" if only is None else f"tags.`{RUN_TAG}` = '{only}'"
            runs = _pages(partial(client.search_runs, experiments, query))
            return [_recorded(client, uri, run) for run in runs if run.data.tags[RUN_TAG] not in leave_out]
    except Refused as error:
        raise Unavailable(f"MLflow at {without_password(uri)} cannot be used ({error})") from error


def _pages(search: Callable[..., Any]) -> Iterator[Any]:
    """Everything that a paged search of MLflow finds."""
    token = None
    while token is None or token:
        page = search(page_token=token)
        yield from page
        token = page.token or ""


def _recorded(client: MlflowClient, uri: str, run: Run) -> RecordedRun:
    evaluated = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "eval/return")}
    updated = [m.step for m in client.get_metric_history(run.info.run_id, "update/lr")]
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


def how_to_look(uri: str, experiment_id: str, mlflow_run_id: str) -> tuple[str, str]:
    """The command that shows a run of MLflow (empty for a server) and the address of its page."""
    page = f"/#/experiments/{experiment_id}/runs/{mlflow_run_id}" if mlflow_run_id else ""
    if uri.startswith(("http://", "https://")):
        return "", without_password(uri).rstrip("/") + page
    return f"mlflow ui --backend-store-uri {without_password(uri)}", "http://127.0.0.1:5000" + page


def tracking_uri(config: TrackingConfig, root: Path) -> str:
    """The configuration's URI, else MLFLOW_TRACKING_URI, else a SQLite file in the run root."""
    return config.uri or os.environ.get("MLFLOW_TRACKING_URI") or _default_uri(root)


def reachable(uri: str) -> None:
    """Ask the tracking store something small.

    Raises:
        Unavailable: it does not answer, or not as it should.
    """
    quieten_mlflow()
    from mlflow import MlflowClient

    try:
        with _translated(uri):
            MlflowClient(uri).search_experiments(max_results=1)
    except Refused as error:
        raise Unavailable(f"MLflow at {without_password(uri)} cannot be used ({error})") from error


def without_password(uri: str) -> str:
    """The URI fit to be printed."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def provenance() -> dict[str, str]:
    """Tags that say what code ran: versions of Python and the libraries, and the git commit where there is one."""
    tags = {"version.python": sys.version.split()[0]}
    for name in ("magrpo", "torch", "triton", "transformers", "peft", "vllm", "prefect", "mlflow"):
        try:
            tags[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    checkout = Path(__file__).parents[1]
    if (checkout / ".git").exists() and shutil.which("git"):
        tags["mlflow.source.git.commit"] = _git(checkout, "rev-parse", "HEAD")
        tags["git.dirty"] = str(bool(_git(checkout, "status", "--porcelain", "--untracked-files=no"))).lower()
    return tags


def quieten_mlflow() -> None:
    """Set what MLflow reads when it is imported: no telemetry, no start-up messages, a short temper with servers."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def _default_uri(root: Path) -> str:
    return f"sqlite:///{root.absolute() / 'mlflow.db'}"


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Turn what MLflow raises into :class:`Unavailable` or :class:`Refused`."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        reason = str(error).partition("\n")[0].replace(uri.rstrip("/"), without_password(uri))[:300]
        if isinstance(error, MlflowException) and error.error_code in {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"}:
            raise Refused(reason) from error
        raise Unavailable(f"MLflow at {without_password(uri)} cannot be used ({reason})") from error
