"""What tests of MLflow have in common."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.databases import write_database


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """The URI of an empty MLflow database, ``mlflow.db`` in the folder of the test."""
    return write_database(tmp_path / "mlflow.db")
