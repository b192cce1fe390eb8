"""The parts of a run: what their actors are opened with."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.run.store import RunStore
from magrpo.training.resources import RunResources
from tests.pipelines.micro import write_config


def test_the_folders_of_models_and_weights_are_found_from_wherever_an_actor_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    changes = ["agents.0.model=base", "agents.1.model=coopcode-base", "agents.0.start_from=trained"]
    config = load_config(path, changes)
    resources = RunResources(config, RunStore.create(config), print, lambda _: nullcontext())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    helper, main = resources.lineup.configs
    assert (helper.model, helper.start_from) == (str(tmp_path / "base"), tmp_path / "trained")
    assert Path(main.model).name == "coopcode-base"
    assert main.start_from is None
