"""Prefect's artifacts of a run: their keys, and a server that is away. What they hold is in test_train.py."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from magrpo.config.run import load_config
from magrpo.process.ports import find_free_ports
from magrpo.progress.state import Attempt, RunState, observe_attempt
from magrpo.rewards.coding import CodingReward
from magrpo.run.store import RunStore
from pipelines.flows.progress_page import ProgressPage, artifact_key
from tests.pipelines.micro import write_config


def test_a_server_that_is_away_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(write_config(tmp_path))
    attempt = Attempt(RunStore.create(config, "run"), config.notify, RunState(3, CodingReward()))
    (attempt.store.path / "place.json").write_text("{")  # the loop raises the error, an observer must not
    nobody = f"http://127.0.0.1:{find_free_ports(1)[0]}/api"
    with temporary_settings({PREFECT_API_URL: nobody}), observe_attempt(attempt, [ProgressPage("run", uuid4())]):
        pass
    warnings = [record.getMessage() for record in caplog.records if record.name == "pipelines.flows.progress_page"]
    assert warnings == ["Prefect's page of the run is not up to date: ConnectError"]


@pytest.mark.parametrize(
    ("state", "percent"),
    [
        (RunState(4, CodingReward(), trained_iterations=1), 25.0),
        (RunState(0, CodingReward(), num_rows=4, finished_rows=3), 75.0),
        (RunState(0, CodingReward()), 0.0),
    ],
)
def test_the_page_shows_the_share_that_is_done(tmp_path: Path, state: RunState, percent: float) -> None:
    config = load_config(write_config(tmp_path))
    page, client = ProgressPage("run", uuid4()), MagicMock()
    page._attempt = Attempt(RunStore.create(config, "run"), config.notify, state)
    page._update_progress(client)
    assert client.create_artifact.call_args.args[0].data == percent


def test_keys_are_those_that_prefect_allows() -> None:
    assert artifact_key("nightly") == "magrpo-nightly"
    assert artifact_key("Seed_1.b-") == "magrpo-seed-1-b"
