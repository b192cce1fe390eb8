"""The folder of a run, empty, for the tests of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.run.store import RunStore


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    (tmp_path / "run").mkdir()
    return RunStore(tmp_path, "run")
