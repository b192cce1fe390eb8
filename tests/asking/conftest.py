"""A run of scripted parts, shared by the tests of a module."""

from __future__ import annotations

import pytest

from magrpo.run.store import RunStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """See :func:`tests.asking.runs.make_run`."""
    from tests.asking.runs import make_run  # imports torch
    from tests.pipelines.micro import write_config  # imports mlflow

    folder = tmp_path_factory.mktemp("asking")
    return make_run(write_config(folder), folder / "runs")
