"""Where updates leave a batch with a non-finite loss."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return tmp_path / "failed-batch"
