"""Tracking with MLflow: one MLflow run for each training run. The only importer of mlflow, and lazily."""

from magrpo.tracking.connection import reachable, tracking_uri, without_password
from magrpo.tracking.memory import MemoryTracker
from magrpo.tracking.provenance import provenance
from magrpo.tracking.recorded import RecordedRun, recorded_runs
from magrpo.tracking.registry import CHAMPION, ModelRegistry, Version
from magrpo.tracking.sink import PARENT_TAG, SWEEP_TAG, MlflowTracker

__all__ = [
    "CHAMPION",
    "PARENT_TAG",
    "SWEEP_TAG",
    "MemoryTracker",
    "MlflowTracker",
    "ModelRegistry",
    "RecordedRun",
    "Version",
    "provenance",
    "reachable",
    "recorded_runs",
    "tracking_uri",
    "without_password",
]
