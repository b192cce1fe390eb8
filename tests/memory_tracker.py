"""A tracker that keeps everything in lists, for tests of what is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from magrpo.tracking.outbox import FINAL, check_keys
from magrpo.types import Trajectory


class MemoryTracker:
    """Keeps all it is given for tests to read, and asserts what MLflow demands of metric keys and final statuses."""

    def __init__(self) -> None:
        self.logged_params: dict[str, object] = {}
        self.logged_tags: dict[str, str] = {}
        self.datasets: list[tuple[str, Path, str, str]] = []
        self.history: list[tuple[int, dict[str, float]]] = []
        self.artifacts: list[tuple[Path, str]] = []
        self.traces: list[tuple[int, Trajectory]] = []
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

    def trace(self, trajectory: Trajectory, step: int, interval: tuple[float, float]) -> None:
        assert interval[0] <= interval[1]
        self.traces.append((step, trajectory))

    def close(self, status: str) -> None:
        assert status in FINAL, status
        self.status = status
