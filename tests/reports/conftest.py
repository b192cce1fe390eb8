"""Evaluations that the tests of reports share."""

from __future__ import annotations

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.types import EvalReport
from tests.reports.pages import CONFIG, make_reports


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(CONFIG)


@pytest.fixture(scope="module")
def reports(config: RunConfig) -> list[EvalReport]:
    return make_reports(config)
