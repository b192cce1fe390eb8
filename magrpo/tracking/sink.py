"""Delivery of a run's records to MLflow.

Importing MLflow and creating its SQLite file take seconds; both happen in the delivering thread
(:mod:`magrpo.tracking.spool`) while the run starts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from magrpo.config import TrackingConfig
from magrpo.tracking.connection import (
    make_database,
    mlflow_page,
    quieten_mlflow,
    tracking_uri,
    translate_errors,
    translate_to_unavailable,
)
from magrpo.tracking.spool import FINAL, Record, Spool, SpooledTracker
from magrpo.tracking.system import PREFIX, SystemMonitor
from magrpo.tracking.traces import deliver_traces, trace_record
from magrpo.types import Trajectory, TurnTimes

if TYPE_CHECKING:
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

RUN_TAG = "magrpo.run_id"
"""The MLflow tag by which a resumed run finds its MLflow run."""
SWEEP_TAG = "magrpo.sweep"
"""The tag of the MLflow run that stands for a sweep."""
PARENT_TAG = "magrpo.parent"
"""The tag with the name of the run's sweep; MLflow shows the run below that of the sweep."""
_PARAM_LENGTH = 6000  # MLflow's limits, like those that follow
_BATCH_METRICS = 1000
_BATCH_STRINGS = 100
_DIGEST_LENGTH = 36


class MlflowSink:
    """One MLflow run, found by its tag ``magrpo.run_id`` or created.

    Args:
        uri: tracking URI; not a file store, which MLflow no longer supports.
        artifacts: folder for the artifacts of an experiment created here; None: the server chooses.
        tag: the tag that holds ``run_id``.
    """

    def __init__(
        self, uri: str, experiment: str, run_id: str, run_name: str, artifacts: Path | None, tag: str = RUN_TAG
    ) -> None:
        self.uri, self.experiment, self.run_id, self.run_name = uri, experiment, run_id, run_name
        self._artifacts, self._tag = artifacts, tag
        self.mlflow_run_id = ""
        self.experiment_id = ""

    def connect(self) -> None:
        quieten_mlflow()
        from mlflow import MlflowClient  # takes seconds

        with translate_to_unavailable(self.uri):
            make_database(self.uri)
            self._client = MlflowClient(self.uri)
            self.experiment_id = self._find_experiment()
            self.mlflow_run_id = self._find_run(self._tag, self.run_id, self.run_name)

    def deliver(self, records: Sequence[Record]) -> None:
        kind = records[0]["kind"]
        with translate_errors(self.uri):
            getattr(self, f"_deliver_{kind}")(records)

    def _find_experiment(self) -> str:
        """The id of the experiment, created if there is none; another run may create it at the same moment."""
        from mlflow.exceptions import MlflowException  # takes seconds

        location = None if self._artifacts is None else (self._artifacts.absolute() / self.experiment).as_uri()
        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self.experiment, artifact_location=location))
            except MlflowException as error:
                found = self._client.get_experiment_by_name(self.experiment)
                if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                    raise
        return str(found.experiment_id)

    def _find_run(self, tag: str, value: str, name: str) -> str:
        """The id of the run with this tag, created if there is none."""
        found = self._client.search_runs([self.experiment_id], f"tags.`{tag}` = '{value}'", max_results=1)
        run = found[0] if found else self._client.create_run(self.experiment_id, tags={tag: value}, run_name=name)
        return str(run.info.run_id)

    def _deliver_metrics(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric  # takes seconds

        points: list[Metric] = [
            Metric(key, value, record["time_ms"], record["step"])
            for record in records
            for key, value in record["values"].items()
        ]
        for start in range(0, len(points), _BATCH_METRICS):
            self._client.log_batch(self.mlflow_run_id, metrics=points[start : start + _BATCH_METRICS])

    def _deliver_params(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Param  # takes seconds

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
        from mlflow.entities import RunTag  # takes seconds

        values: dict[str, str] = {}
        for record in records:
            values |= record["values"]
        if PARENT_TAG in values:
            values["mlflow.parentRunId"] = self._find_run(SWEEP_TAG, values[PARENT_TAG], values[PARENT_TAG])
        tags = [RunTag(key, value) for key, value in values.items()]
        for start in range(0, len(tags), _BATCH_STRINGS):
            self._client.log_batch(self.mlflow_run_id, tags=tags[start : start + _BATCH_STRINGS])

    def _deliver_dataset(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag  # takes seconds

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

    def _deliver_trace(self, records: Sequence[Record]) -> None:
        deliver_traces(self.uri, self.experiment_id, self.mlflow_run_id, records)

    def _deliver_status(self, records: Sequence[Record]) -> None:
        status, time_ms = records[-1]["value"], records[-1]["time_ms"]
        if status in FINAL:
            self._client.set_terminated(self.mlflow_run_id, status, time_ms)
        else:
            self._client.update_run(self.mlflow_run_id, status=status)


class MlflowTracker(SpooledTracker):
    """Records a run in MLflow: see :class:`SpooledTracker` and :class:`MlflowSink`."""

    def __init__(
        self, config: TrackingConfig, root: Path, run_id: str, run_name: str, folder: Path, tag: str = RUN_TAG
    ) -> None:
        self.uri = tracking_uri(config, root)
        local = self.uri.startswith("sqlite:")  # MLflow would store artifacts in the working directory
        self._mlflow = MlflowSink(
            self.uri, config.experiment, run_id, run_name, root / "mlartifacts" if local else None, tag
        )
        super().__init__(Spool(folder), self._mlflow)

    def trace(self, trajectory: Trajectory, step: int, times: Sequence[TurnTimes]) -> None:
        """Record a trajectory for delivery as an MLflow trace (:mod:`magrpo.tracking.traces`)."""
        self.append_record(trace_record(trajectory, step, times))

    def watch_system(self) -> SystemMonitor:
        """Sample the use of processors, memory and GPUs while the block lasts, numbered after earlier samples."""
        return SystemMonitor(self.metrics, self.next_step(PREFIX))

    def mlflow_page(self) -> tuple[str, str]:
        """The command that serves the run's page (empty for a server), and the page's address."""
        return mlflow_page(self.uri, self._mlflow.experiment_id, self._mlflow.mlflow_run_id)

    @property
    def mlflow_run_id(self) -> str:
        """The id of the MLflow run; empty until MLflow was reached."""
        return self._mlflow.mlflow_run_id
