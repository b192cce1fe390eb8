"""Training runs in MLflow: delivering their records.

Importing MLflow and creating its SQLite file take seconds, so both happen in the thread that delivers records
(:mod:`magrpo.tracking.outbox`) while the run starts.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from magrpo.config.services import TrackingConfig, hide_password
from magrpo.tracking.connection import (
    RecordRefused,
    Unavailable,
    check_tracking,
    make_database,
    mlflow_page,
    quieten_mlflow,
    translate_errors,
    translate_store_errors,
)
from magrpo.tracking.experiment_view import missing_tags, view_link
from magrpo.tracking.outbox import FINAL, FOLDER_TAG, Outbox, OutboxTracker, Record, find_beginning, find_folder_id
from magrpo.tracking.traces import deliver_traces, trace_record
from magrpo.types import Trajectory

if TYPE_CHECKING:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

log = logging.getLogger(__name__)

RUN_TAG = "magrpo.run_id"
"""The MLflow tag by which a resumed run finds its MLflow run."""
STUDY_TAG = "magrpo.study"
"""The tag of the MLflow run that stands for a study."""
PARENT_TAG = "magrpo.parent"
"""The tag with the name of the run's study, below whose own run MLflow shows the run."""
PARENT_FOLDER_TAG = "magrpo.parent_folder"
"""The tag with the :data:`FOLDER_TAG` of the run's study, which distinguishes studies of the same name."""
SYSTEM_PREFIX = "system/"
"""Prefix of the metrics under which MLflow records the use of the machine."""
# Limits of MLflow: lengths in characters, and records in one request.
_PARAM_LENGTH = 6000
_BATCH = {"metrics": 1000, "params": 100, "tags": 100}
_DIGEST_LENGTH = 36
_FOLDER_LENGTH = 100
_RUN_DELETED = "the run {} was deleted in MLflow; a new one will hold its records"


@dataclass
class MlflowSink:
    """One MLflow run, found by its tag or created."""

    uri: str
    """Tracking URI. Not a file store, which MLflow no longer supports."""
    experiment: str
    run_id: str
    """Value of the tag, and the name of the MLflow run if it is created here."""
    artifacts: Path | None
    """Folder for the artifacts of an experiment that is created here; None: the server chooses."""
    tag: str
    began_s: float | None = None
    """Beginning of a run that is created here, in seconds since 1970; None: the time of creation."""
    folder_id: str = ""
    """The :data:`FOLDER_TAG` of the run; empty: the run is found by its name alone."""
    watches_system: bool = False
    """Whether MLflow samples the use of CPUs, memory, disk, network and GPUs during the run."""
    mlflow_run_id: str = ""
    experiment_id: str = ""
    _monitor: SystemMetricsMonitor | None = None

    def connect(self) -> str:
        quieten_mlflow()
        from mlflow import MlflowClient  # takes seconds

        with translate_errors(self.uri):
            make_database(self.uri)
            self._client = MlflowClient(self.uri)
            self.experiment_id = self._find_experiment()
            self.mlflow_run_id = self._find_run(self.tag, self.run_id, self.folder_id)
        return self.mlflow_run_id

    def deliver(self, records: Sequence[Record]) -> None:
        from mlflow.exceptions import MlflowException  # loaded by connect

        deliver_kind = {
            "metrics": self._deliver_metrics,
            "params": self._deliver_params,
            "tags": self._deliver_tags,
            "dataset": self._deliver_dataset,
            "artifact": self._deliver_artifact,
            "trace": self._deliver_trace,
            "status": self._deliver_status,
        }
        with translate_errors(self.uri, may_refuse=True):
            try:
                deliver_kind[records[0]["kind"]](records)  # records are of one kind
            except (MlflowException, RecordRefused):
                # MLflow refuses every record of a deleted experiment. They must wait, not be skipped as refused.
                if self._client.get_experiment(self.experiment_id).lifecycle_stage == "deleted":
                    raise Unavailable(self._describe_deleted(self.experiment_id)) from None
                if self._client.get_run(self.mlflow_run_id).info.lifecycle_stage == "deleted":
                    raise Unavailable(_RUN_DELETED.format(self.mlflow_run_id)) from None
                raise

    def _find_experiment(self) -> str:
        """The id of the experiment, which is created if there is none. Another run may create it at the same moment."""
        from mlflow.exceptions import MlflowException  # takes seconds

        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                found = self._client.get_experiment(
                    self._client.create_experiment(self.experiment, artifact_location=self.locate_artifacts())
                )
            except MlflowException as error:
                found = self._client.get_experiment_by_name(self.experiment)
                if error.error_code != "RESOURCE_ALREADY_EXISTS" or found is None:
                    raise
        experiment_id = str(found.experiment_id)
        if found.lifecycle_stage == "deleted":
            raise Unavailable(self._describe_deleted(experiment_id))
        for key, value in missing_tags(experiment_id, found.tags).items():
            self._client.set_experiment_tag(experiment_id, key, value)
        return experiment_id

    def locate_artifacts(self) -> str | None:
        """The address for artifacts of an experiment that is created here; None: the server chooses."""
        if self.artifacts is None:
            return None
        folder = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.experiment).strip(".-")[:_FOLDER_LENGTH]
        return (self.artifacts.absolute() / (folder or "experiment")).as_uri()

    def _describe_deleted(self, experiment_id: str) -> str:
        """Explain how to restore a deleted experiment, which keeps its name until MLflow purges it."""
        uri = shlex.quote(hide_password(self.uri))
        return (
            f"the experiment {self.experiment!r} of MLflow at {hide_password(self.uri)} is deleted; to restore it: "
            f"MLFLOW_TRACKING_URI={uri} mlflow experiments restore --experiment-id {experiment_id}"
        )

    def _find_run(self, tag: str, value: str, folder_id: str = "") -> str:
        """The id of the run with this tag, and with this :data:`FOLDER_TAG` if given; created if there is none."""
        tags = {tag: value}
        if folder_id:
            tags[FOLDER_TAG] = folder_id
        query = " and ".join(f"tags.`{key}` = '{wanted}'" for key, wanted in tags.items())
        found = self._client.search_runs([self.experiment_id], query, max_results=1)
        if found:
            return str(found[0].info.run_id)
        began_ms = int((time.time() if self.began_s is None else self.began_s) * 1000)
        run = self._client.create_run(self.experiment_id, began_ms, tags=tags, run_name=value)
        return str(run.info.run_id)

    def _deliver_metrics(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric  # takes seconds

        points = []
        for record in records:
            points += [Metric(key, value, record["time_ms"], record["step"]) for key, value in record["values"].items()]
        self._log_batches("metrics", points)

    def _deliver_params(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Param  # takes seconds

        # MLflow cannot change a parameter. In reverse order, the first of several values is the one that stays.
        values = {
            _name_param(key): value[:_PARAM_LENGTH]
            for record in records[::-1]
            for key, value in record["values"].items()
        }
        known = self._client.get_run(self.mlflow_run_id).data.params
        changed = sorted(key for key, value in values.items() if known.get(key, value) != value)
        if changed:
            log.warning(
                "tracking: MLflow has other values of %s from an earlier attempt, and keeps them", ", ".join(changed)
            )
        self._log_batches("params", [Param(key, value) for key, value in values.items() if key not in known])

    def _deliver_tags(self, records: Sequence[Record]) -> None:
        from mlflow.entities import RunTag  # takes seconds

        values = {key: value for record in records for key, value in record["values"].items()}
        if PARENT_TAG in values:
            values["mlflow.parentRunId"] = self._find_run(
                STUDY_TAG, values[PARENT_TAG], values.get(PARENT_FOLDER_TAG, "")
            )
        self._log_batches("tags", [RunTag(key, value) for key, value in values.items()])

    def _log_batches(self, kind: str, entities: Sequence[Any]) -> None:
        for start in range(0, len(entities), _BATCH[kind]):
            batch: dict[str, Any] = {kind: entities[start : start + _BATCH[kind]]}
            self._client.log_batch(self.mlflow_run_id, **batch)

    def _deliver_dataset(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag  # takes seconds

        inputs = []
        for record in records:
            source = json.dumps({"uri": record["path"]})
            dataset = Dataset(record["name"], record["digest"][:_DIGEST_LENGTH], "local", source)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", record["context"])]))
        self._client.log_inputs(self.mlflow_run_id, datasets=inputs)

    def _deliver_artifact(self, records: Sequence[Record]) -> None:
        for record in records:
            path = Path(record["path"])
            if not path.exists():
                log.warning("tracking: artifact %s no longer exists and is skipped", path)
                continue
            store = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
            with translate_store_errors():
                store(self.mlflow_run_id, str(path), record["folder"] or None)

    def _deliver_trace(self, records: Sequence[Record]) -> None:
        deliver_traces(self.uri, self.experiment_id, self.mlflow_run_id, records)

    def _deliver_status(self, records: Sequence[Record]) -> None:
        status, time_ms = records[-1]["value"], records[-1]["time_ms"]
        if status in FINAL:
            if self._monitor is not None:
                self._monitor.finish()  # type: ignore[no-untyped-call]
                self._monitor = None
            self._client.set_terminated(self.mlflow_run_id, status, time_ms)
        else:
            self._client.update_run(self.mlflow_run_id, status=status)
            if self.watches_system and self._monitor is None:
                self._monitor = start_monitor(self.uri, self.mlflow_run_id)


def _name_param(key: str) -> str:
    """Return ``key`` as the name of a parameter: "_" replaces what MLflow refuses, such as ``../`` and most signs."""
    return re.sub(r"(^|/)(\.{0,2}/)+|[^\w/. :-]", "_", key)


def start_monitor(uri: str, mlflow_run_id: str) -> SystemMetricsMonitor:
    """Let MLflow sample the use of the machine, with numbers that continue those of earlier samples of the run.

    The thread of MLflow ends when the run is no longer RUNNING, or when a request fails.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor  # mlflow takes seconds

    monitor = SystemMetricsMonitor(mlflow_run_id, resume_logging=True, tracking_uri=uri)  # type: ignore[no-untyped-call]
    monitor.start()  # type: ignore[no-untyped-call]
    return monitor


class MlflowTracker(OutboxTracker):
    """Records a run in MLflow: see :class:`OutboxTracker` and :class:`MlflowSink`. ``folder`` holds the outbox.

    A run that MLflow does not have yet began with its first record, or without any at ``began_s``.
    """

    def __init__(
        self,
        config: TrackingConfig,
        root: Path,
        run_id: str,
        folder: Path,
        tag: str = RUN_TAG,
        *,
        began_s: float | None = None,
    ) -> None:
        self.uri = check_tracking(config, root)
        is_local = self.uri.startswith("sqlite:")
        artifacts = root / "mlartifacts" if is_local else None  # by default they go to the working directory
        outbox = Outbox(folder)
        folder_id = _identify(outbox)
        recorded_s = find_beginning(folder)
        began_s = began_s if recorded_s is None else recorded_s
        self._mlflow = MlflowSink(self.uri, config.experiment, run_id, artifacts, tag, began_s, folder_id)
        super().__init__(outbox, self._mlflow)

    def trace(self, trajectory: Trajectory, step: int, interval: tuple[float, float]) -> None:
        """Record a trajectory for delivery as an MLflow trace (:mod:`magrpo.tracking.traces`)."""
        self.append_record(trace_record(trajectory, step, interval))

    def watch_system(self) -> None:
        """Let MLflow sample the use of the machine from :meth:`record_start` to :meth:`record_end`."""
        self._mlflow.watches_system = True

    def mlflow_page(self) -> tuple[str, str]:
        """See :func:`magrpo.tracking.connection.mlflow_page`."""
        return mlflow_page(self.uri, self._mlflow.experiment_id, self._mlflow.mlflow_run_id)

    def runs_page(self) -> str:
        """The address of the page that compares the runs of the experiment; empty until MLflow was reached."""
        if not self._mlflow.experiment_id:
            return ""
        _, server = mlflow_page(self.uri, "", "")
        return f"{server}/{view_link(self._mlflow.experiment_id)}"

    @property
    def mlflow_run_id(self) -> str:
        """The id of the MLflow run; empty until MLflow was reached."""
        return self._mlflow.mlflow_run_id


def _identify(outbox: Outbox) -> str:
    """The id of a run directory, from its first record; made if there are no records yet.

    Empty if there are records but the id was lost: MLflow then already has a run, which is found by its name.
    """
    is_new = outbox.size == 0
    if known := find_folder_id(outbox.folder):
        return known
    made = uuid4().hex
    with suppress(OSError):  # the disk is full
        outbox.append({"kind": "tags", "values": {FOLDER_TAG: made}})
    return made if is_new else ""


def delete_empty_run(uri: str, experiment: str, folder_id: str) -> None:
    """Delete the run with this :data:`FOLDER_TAG` if it has measured nothing. Raises Unavailable."""
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return  # before MLflow creates the file
    quieten_mlflow()
    from mlflow import MlflowClient  # takes seconds

    with translate_errors(uri):
        client = MlflowClient(uri)
        if (found := client.get_experiment_by_name(experiment)) is None:
            return
        for run in client.search_runs([found.experiment_id], f"tags.`{FOLDER_TAG}` = '{folder_id}'"):
            if all(key.startswith(SYSTEM_PREFIX) for key in run.data.metrics):
                client.delete_run(run.info.run_id)
