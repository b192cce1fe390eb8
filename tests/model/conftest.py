"""The base model of tests that change no file of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))
