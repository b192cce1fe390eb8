"""MLflow databases for tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow import MlflowClient


@cache
def empty_database() -> bytes:
    """MLflow's database before the first run: making its tables takes a second of each folder's first run."""
    with TemporaryDirectory() as folder:
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
        return Path(folder, "mlflow.db").read_bytes()


def write_database(path: Path) -> str:
    """Write an empty database to ``path`` unless there is one; its URI."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(empty_database())
    return f"sqlite:///{path}"
