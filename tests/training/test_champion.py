"""Registered teams, the gate, and runs that go on from the champion; on MLflow with SQLite."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from safetensors.torch import load_file

from magrpo.config.run import load_config
from magrpo.config.services import RegistryConfig
from magrpo.errors import ConfigError
from magrpo.progress.notify import Notices
from magrpo.reports.origin import suggest_commands
from magrpo.run.files import read_evaluation
from magrpo.run.store import RunStore
from magrpo.tracking.connection import Unavailable
from magrpo.tracking.model_registry import ModelRegistry, TeamVersion
from magrpo.training import champion, gate
from magrpo.training.champion import RegistryError
from magrpo.training.execute import Result, execute
from magrpo.training.promotion import Promotion, register_team
from tests.pipelines.micro import write_config
from tests.pipelines.receiver import receiving


class World:
    """Two trained runs, ``one`` and ``two``, each with one iteration, and the MLflow that recorded them."""

    def __init__(self, folder: Path) -> None:
        self.config, self.root = write_config(folder, iterations=1), folder / "runs"
        self.finished: dict[str, Result] = {}
        for seed, name in enumerate(("one", "two")):
            RunStore.create(load_config(self.config, [f"train.seed={seed}"]), name)
            self.finished[name] = execute(self.root, name, lambda stages: stages, {})
        self.uri = f"sqlite:///{self.root / 'mlflow.db'}"
        self.client = MlflowClient(self.uri, registry_uri=self.uri)

    def configure(self, run: str, **registry: object) -> RunStore:
        """Give a run another section ``registry``."""
        store = RunStore.open(self.root, run)
        section = RegistryConfig.model_validate(registry)
        store.write_config(store.config().model_copy(update={"registry": section}))
        return store

    def finish(self, run: str, **registry: object) -> Promotion | None:
        """The end of a run again, all of its stages reused, with another section ``registry``."""
        self.configure(run, **registry)
        return execute(self.root, run, lambda stages: stages, {}, [Notices()]).promotion

    def register(self, run: str, **registry: object) -> Promotion:
        """The last step of a run alone, with another section ``registry``."""
        result = self.finished[run]
        promotion = register_team(self.configure(run, **registry), result.outcome, result.mlflow_run_id)
        assert promotion is not None
        return promotion

    def promote(self, run: str, model: str) -> Promotion:
        return self.register(run, model=model, promote=True)

    def champion(self, model: str) -> int | None:
        number = self.client.get_registered_model(model).aliases.get("champion")
        return None if number is None else int(number)

    def tags(self, model: str, version: int) -> dict[str, str]:
        return self.client.get_model_version(model, str(version)).tags

    def rewrite(self, model: str, version: int, change: Callable[[dict[str, Any]], None]) -> None:
        """Change what a registered version says of its evaluation."""
        source = self.client.get_model_version(model, str(version)).source
        path = Path(source.removeprefix("file://")) / "evaluation.json"
        facts = json.loads(path.read_text())
        change(facts)
        path.write_text(json.dumps(facts))


@pytest.fixture(autouse=True)
def _gate_of_few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MIN_PROBLEMS", 1)


@pytest.fixture(autouse=True)
def _hurried_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(champion, "PAUSES_S", (0.0,))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def set_returns(value: float) -> Callable[[dict[str, Any]], None]:
    def change(facts: dict[str, Any]) -> None:
        facts["returns"] = dict.fromkeys(facts["returns"], value)

    return change


def test_a_finished_run_is_a_version_that_its_card_says_how_to_use(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promotion = world.register("one", model="card")
    result = world.finished["one"]
    assert (promotion.version, promotion.promoted, world.champion("card")) == (1, False, None)
    assert "registry.promote is off" in str(promotion)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", world.uri)
    card = (result.store.path / "stages/00001/register/described/README.md").read_text()
    [uri] = re.findall(r"--artifact-uri (\S+) --dst-path agents", card)
    download_artifacts(artifact_uri=uri, dst_path="agents")
    assert Path("agents/README.md").read_text() == card
    assert json.loads(Path("agents/config.json").read_text())["train"]["seed"] == 0
    assert (Path("agents") / "helper" / "chat_template.jinja").exists()
    [snippet] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir("agents")
    names: dict[str, Any] = {}
    exec(snippet, names)
    loaded = names["model"].state_dict()
    for agent in ("helper", "main"):
        weights = load_file(
            result.store.folder(result.outcome.checkpoint) / "weights" / agent / "adapter_model.safetensors"
        )
        assert weights
        for name, tensor in weights.items():
            assert torch.equal(loaded[name.removesuffix(".weight") + f".agent-{agent}.weight"], tensor)
    for part in ("seed 0", "the base models", "not stated", "| test | 6 |", "Held-out problems, sampled"):
        assert part in card
    page = world.client.get_model_version("card", "1").description
    assert page is not None
    assert page.startswith("Return on held-out problems: ")
    assert snippet in page


def test_the_first_team_is_the_champion_and_is_registered_and_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("MAGRPO_NOTIFY_URLS", receiver.url)
        first, again = (world.finish("one", model="once", promote=True) for _ in range(2))
    assert first is not None
    assert again is not None
    [notice] = receiver.posted
    assert notice["title"].endswith(" is now the champion")
    assert notice["reason"] == str(first)
    assert (first.promoted, first.champion, first.fresh, world.champion("once")) == (True, None, True, 1)
    assert (again.promoted, again.reason, again.fresh) == (True, first.reason, False)
    assert str(again).startswith("version 1 of once became the champion: "), "which it need not be any more"
    assert len(world.client.search_model_versions("name = 'once'")) == 1


def assert_compared(world: World, promotion: Promotion, theirs: float) -> None:
    """Version 2 of a model, the run ``two``, was compared with version 1, whose returns are all ``theirs``."""
    promoted, model = promotion.promoted, promotion.model
    assert (promotion.version, promotion.champion) == (2, 1)
    assert f"a 99.8 % interval {'above' if promoted else 'not above'} 0" in promotion.reason
    assert world.champion(model) == (2 if promoted else 1)
    assert world.tags(model, 2)["verdict"] == ("promoted" if promoted else "not promoted")
    assert world.tags(model, 2)["reason"] == promotion.reason
    result = world.finished["two"]
    mean = read_evaluation(result.store.folder(result.outcome.evaluations[1])).summary["test/sampled"]["return"].mean
    assert f"by {100 * (mean - theirs):+.1f} [" in promotion.reason


def test_the_gate_stays_closed_below_the_champion(world: World) -> None:
    world.promote("one", "closed")
    world.rewrite("closed", 1, set_returns(1.0))
    promotion = world.promote("two", "closed")
    assert not promotion.promoted
    assert_compared(world, promotion, 1.0)


OTHER_SETTINGS = "version 1 was evaluated under other settings, so the two cannot be compared"


def test_a_champion_that_was_evaluated_otherwise_stays(world: World) -> None:
    world.promote("one", "otherwise")
    world.rewrite("otherwise", 1, lambda facts: facts.update(protocol="another"))
    promotion = world.promote("two", "otherwise")
    assert not promotion.promoted
    assert OTHER_SETTINGS in promotion.reason


def test_a_champion_that_was_asked_otherwise_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.promote("one", "prompts")
    monkeypatch.setattr("magrpo.training.promotion.read_prompts", lambda config: "edited")
    assert OTHER_SETTINGS in world.promote("two", "prompts").reason


@contextmanager
def fail_commit(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[RunStore, str], bool], error: BaseException
) -> Iterator[None]:
    """Raise ``error`` in place of the commits for which ``fails`` is true, while the block lasts."""
    commit = RunStore.commit

    def commit_or_fail(store: RunStore, name: str, *rest: object) -> object:
        if fails(store, name):
            raise error
        return commit(store, name, *rest)

    with monkeypatch.context() as block:
        block.setattr(RunStore, "commit", commit_or_fail)
        yield


def test_the_gate_opens_above_the_champion_and_a_promotion_that_fails_after_the_alias_moved_is_rolled_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "fails"
    world.promote("one", model)
    world.rewrite(model, 1, set_returns(-1.0))
    seen = []

    def is_promotion(_: RunStore, name: str) -> bool:
        if name.endswith("promote"):
            seen.append(world.champion(model))
        return name.endswith("promote")

    full = OSError("the disk is full")
    with fail_commit(monkeypatch, is_promotion, full), pytest.raises(OSError, match="the disk is full"):
        world.promote("two", model)
    assert seen == [2]
    assert world.champion(model) == 1
    assert world.tags(model, 2)["verdict"] == "undone"
    promotion = world.promote("two", model)
    assert promotion.promoted
    assert_compared(world, promotion, -1.0)


def test_a_kill_after_the_alias_moved_loses_and_repeats_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.promote("one", "killed")
    world.rewrite("killed", 1, set_returns(-1.0))

    def is_promotion(_: RunStore, name: str) -> bool:
        return name.endswith("promote")

    monkeypatch.setattr("magrpo.training.promotion._Candidate._put_back", lambda *_: None)
    with fail_commit(monkeypatch, is_promotion, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        world.promote("two", "killed")
    assert world.champion("killed") == 2
    promotion = world.promote("two", "killed")
    assert (promotion.version, promotion.promoted, promotion.champion) == (2, True, 1)
    assert "by +" in promotion.reason


def test_a_registry_that_is_away_is_waited_for(world: World, caplog: pytest.LogCaptureFixture) -> None:
    store = RunStore.open(world.root, "one")
    config = store.config()
    away = config.tracking.model_copy(update={"uri": "http://127.0.0.1:9"})
    store.write_config(config.model_copy(update={"tracking": away}))
    assert world.finish("one", model="away") is None
    assert f"to register later: {store.format_command('resume')}" in caplog.text
    store.write_config(config)
    assert world.finish("one", model="away") is not None


# ------------------------------------------------------------------------------------------ starting from the champion
def begun(world: World, name: str, *overrides: str) -> Result:
    """A run of no iterations that starts from a champion."""
    run = ["train.num_iterations=0", "eval.max_problems=1", "registry.continue_from_champion=true"]
    RunStore.create(load_config(world.config, [*run, *overrides]), name)
    return execute(world.root, name, lambda stages: stages, {})


def adapter(folder: Path) -> bytes:
    return (folder / "main" / "adapter_model.safetensors").read_bytes()


def test_a_run_starts_from_the_champion_and_stays_with_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.promote("one", "start")
    result = begun(world, "from-champion", "registry.model=start")
    assert "the agents start from version 1 of start, the champion at that time" in capsys.readouterr().out
    weights = result.store.folder(result.outcome.checkpoint) / "weights"
    one = RunStore.open(world.root, "one").path / "stages/00001/update/weights"
    assert adapter(weights) == adapter(one)
    assert result.promotion is None
    assert not any("evaluate" in command for _, command in suggest_commands(result.store, result.store.config())), (
        "it evaluates already"
    )
    world.rewrite("start", 1, set_returns(-1.0))
    assert world.promote("two", "start").promoted
    again = execute(world.root, "from-champion", lambda stages: stages, {})
    assert again.outcome == result.outcome
    assert json.loads((result.store.path / "start.json").read_text()) == {"model": "start", "version": 1}
    start_from = [agent.start_from for agent in result.store.config().agents]
    assert start_from == [result.store.path / "champions" / "1" / name for name in ("helper", "main")]


def test_a_kill_while_a_run_takes_the_champion_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.promote("one", "killed-start")
    overrides = ["registry.continue_from_champion=true", "registry.model=killed-start"]
    store = RunStore.create(load_config(world.config, overrides), "killed-start")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(champion, "_note_start", killed)
        with pytest.raises(KeyboardInterrupt):
            champion.start_from_champion(store)
    assert "version 1 of killed-start" in champion.start_from_champion(store)


def test_a_registry_that_is_away_for_a_moment_costs_no_run(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.promote("one", "restarted")
    faults = [Unavailable("MLflow restarts")]
    download = ModelRegistry.download_version

    def fail_once(self: ModelRegistry, version: TeamVersion, target: Path) -> None:
        if faults:
            raise faults.pop()
        download(self, version, target)

    monkeypatch.setattr(ModelRegistry, "download_version", fail_once)
    store = RunStore.create(
        load_config(world.config, ["registry.continue_from_champion=true", "registry.model=restarted"]), "restarted"
    )
    assert "version 1 of restarted" in champion.start_from_champion(store)
    assert "registry.continue_from_champion: MLflow restarts; trying again in 0 s" in caplog.text


def test_without_a_champion_a_run_starts_untrained_and_says_so(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    result = begun(world, "no-champion", "registry.model=nobody")
    assert "the agents start from the base models: nobody had no champion" in capsys.readouterr().out
    assert [agent.start_from for agent in result.store.config().agents] == [None, None]


def test_what_cannot_start_from_the_champion_says_why(world: World, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"agent 'main': start_from cannot be combined with registry.continue_from_champion"
    ):
        begun(world, "both", "registry.model=others", f"agents.1.start_from={tmp_path}")
    world.promote("one", "others")
    with pytest.raises(
        ConfigError, match="version 1 of others has the agents helper, main, but this run has helper, second"
    ):
        begun(world, "others", "registry.model=others", "agents.1.name=second")
    model = re.escape(json.loads((world.root / "one" / "config.json").read_bytes())["agents"][0]["model"])
    for change, ours in (
        ("model=coopcode-base", 'coopcode-base with weights = "lora"'),
        ("weights=full", f'{model} with weights = "full"'),
    ):
        message = rf"agent 'helper' on model {model} with weights = \"lora\", but this run on {ours}; use the same, or"
        with pytest.raises(ConfigError, match=message):
            begun(world, change.replace("=", "-"), "registry.model=others", f"agents.0.{change}")
    with pytest.raises(ConfigError, match=r"champions/1/helper/adapter_config.json: .* set lora.alpha = 4.0 \(now 5"):
        begun(world, "scaled", "registry.model=others", "lora.alpha=5")
    with pytest.raises(RegistryError, match=r"registry.continue_from_champion: MLflow at http://127.0.0.1:9"):
        begun(world, "away", "registry.model=others", "tracking.uri=http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"registry: promote needs the name of a registered model"):
        load_config(world.config, ["registry.promote=true"])
