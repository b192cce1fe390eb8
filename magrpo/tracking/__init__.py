"""Tracking with MLflow, one MLflow run for each training run. Only this package imports mlflow, inside functions."""

from magrpo.tracking.connection import check_reachable, hide_password, tracking_uri
from magrpo.tracking.model_registry import CHAMPION, ModelRegistry, TeamVersion
from magrpo.tracking.provenance import collect_provenance
from magrpo.tracking.recorded import RecordedRun, recorded_runs
from magrpo.tracking.sink import PARENT_TAG, SWEEP_TAG, MlflowTracker

__all__ = [
    "CHAMPION",
    "PARENT_TAG",
    "SWEEP_TAG",
    "MlflowTracker",
    "ModelRegistry",
    "RecordedRun",
    "TeamVersion",
    "check_reachable",
    "collect_provenance",
    "hide_password",
    "recorded_runs",
    "tracking_uri",
]
