"""Which team a name means, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from magrpo.asking.teams import UNTRAINED, find_asked_team
from magrpo.errors import ConfigError
from magrpo.run.store import RunStore
from magrpo.tracking.model_registry import ModelRegistry


def weights(run: RunStore, iteration: int) -> dict[str, Path]:
    return {name: run.path / f"stages/{iteration:05d}/update/weights/{name}" for name in ("helper", "main")}


def test_a_run_is_named_by_its_id_or_its_folder(run: RunStore) -> None:
    for name, root in (("run", run.path.parent), (str(run.path), Path("elsewhere"))):
        asked = find_asked_team(name, root)
        assert asked.weights == weights(run, 1)
        assert asked.title == "run run after 1 iteration"
        assert asked.store is not None
        assert asked.store.path == run.path


def test_a_checkpoint_is_one_of_the_run(run: RunStore) -> None:
    asked = find_asked_team("run", run.path.parent, checkpoint=0)
    assert (asked.weights, asked.title) == ({}, "run run before training")
    with pytest.raises(ConfigError, match="run run has no weights of checkpoint 7; choose one of 0 to 1"):
        find_asked_team("run", run.path.parent, checkpoint=7)


def test_the_untrained_agents_have_names_and_adapters_of_their_own(run: RunStore) -> None:
    asked = find_asked_team("run", run.path.parent, overrides=["agents.0.weights=shared", "agents.1.weights=shared"])
    assert [agent.start_from for agent in asked.trained_agents().agents] == list(asked.weights.values())
    before = asked.untrained_agents().agents
    assert [agent.name for agent in before] == [f"{UNTRAINED}helper", f"{UNTRAINED}main"]
    assert {(agent.start_from, agent.weights) for agent in before} == {(None, "lora")}


def test_the_configuration_is_changed_for_asking(run: RunStore) -> None:
    tree = json.loads((run.path / "config.json").read_text())
    tree["engine"] = {"kind": "vllm"}
    tree["model"]["device"] = "cuda"
    other = RunStore(run.path.parent, "gpu")
    shutil.copytree(run.path, other.path)
    (other.path / "config.json").write_text(json.dumps(tree))
    config = find_asked_team("gpu", run.path.parent).config
    assert (config.engine.kind, config.model.device) == ("transformers", "auto")
    config = find_asked_team("gpu", run.path.parent, overrides=["engine.kind=vllm"]).config
    assert config.engine.kind == "vllm"
    with pytest.raises(ConfigError, match=r"rollout\.max_new_token: unknown key; did you mean 'max_new_tokens'"):
        find_asked_team("gpu", run.path.parent, overrides=["rollout.max_new_token=3"])


def test_a_folder_of_agents_needs_no_run(run: RunStore, tmp_path: Path) -> None:
    given = tmp_path / "given"
    shutil.copytree(run.path / "stages/00001/update/weights", given)
    with pytest.raises(ConfigError, match="neither a run nor a folder of agents; a folder of agents holds "):
        find_asked_team(str(given), Path("runs"))
    shutil.copy(run.path / "config.json", given)
    asked = find_asked_team(str(given), Path("runs"))
    assert asked.weights == {"helper": given / "helper", "main": given / "main"}
    assert asked.title == f"the agents in {given}"
    assert asked.store is None
    with pytest.raises(ConfigError, match="--checkpoint needs a run, not a folder of agents"):
        find_asked_team(str(given), Path("runs"), checkpoint=1)
    with pytest.raises(ConfigError, match=f"has no folder for agent 'helper'; it needs helper and main; ask {given}"):
        find_asked_team(str(given / "main"), Path("runs"))


def test_agents_at_the_top_of_a_run_take_its_configuration(run: RunStore, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(run.path, copied)
    shutil.copytree(run.path / "stages/00001/update/weights", copied / "agents")
    asked = find_asked_team(str(copied / "agents"), Path("runs"))
    assert asked.weights["main"] == copied / "agents" / "main"
    shutil.copy(run.path / "config.json", copied / "agents")
    for found in (asked, find_asked_team(str(copied / "agents"), Path("runs"))):
        assert found.store is not None
        assert found.store.path == copied


def register_champion(uri: str, run: RunStore, folder: Path) -> str:
    """Make the agents of ``run`` the champion of the model ``team`` in the store at ``uri``; returns the MLflow run."""
    client = MlflowClient(uri)
    recorded = client.create_run(client.create_experiment("e", artifact_location=str(folder / "artifacts")))
    registry = ModelRegistry(uri, "team")
    version = registry.register_team(recorded.info.run_id, run.path / "stages/00001/update/weights", "label")
    described = folder / "described"
    described.mkdir(parents=True)
    shutil.copy(run.path / "config.json", described)
    registry.describe_version(version, described, "text", {})
    registry.set_champion(version.number)
    return str(recorded.info.run_id)


def test_the_champion_is_downloaded_once(run: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run.path.parent
    with pytest.raises(ConfigError, match="model 'team' has no champion"):
        find_asked_team("team@champion", root)
    mlflow_run_id = register_champion(f"sqlite:///{root / 'mlflow.db'}", run, tmp_path / "one")
    asked = find_asked_team("team@champion", root)
    assert asked.title == "version 1 of team, the champion"
    assert asked.weights["main"] == root / "champions" / "team" / f"1-{mlflow_run_id[:8]}" / "main"
    assert (asked.weights["main"] / "adapter_config.json").is_file()
    assert find_asked_team("team@champion", root).weights == asked.weights
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    register_champion(f"sqlite:///{tmp_path / 'other.db'}", run, tmp_path / "other")
    other = find_asked_team("team@champion", root)
    assert other.title == "version 1 of team, the champion"
    assert other.weights["main"] != asked.weights["main"], "the champion of another store"
    with pytest.raises(ConfigError, match="--checkpoint needs a run, not the champion"):
        find_asked_team("team@champion", root, checkpoint=1)


def test_a_name_like_a_run_is_hinted_at(run: RunStore) -> None:
    with pytest.raises(ConfigError, match=r"no run 'rum' in .*; did you mean run"):
        find_asked_team("rum", run.path.parent)
    with pytest.raises(ConfigError, match="~nobody-here"):
        find_asked_team("~nobody-here", run.path.parent)
    RunStore.create(run.config(), "new")
    with pytest.raises(ConfigError, match=r"run new has no checkpoint yet; resume it: .*magrpo resume new"):
        find_asked_team("new", run.path.parent)
