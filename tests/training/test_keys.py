"""Keys of steps: what changes them, and what a run does with outputs whose key has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.envs.prompts import PROMPTS
from magrpo.run.manifest import digest
from magrpo.run.steps import STAGES, Step, steps
from magrpo.run.store import RunStore
from magrpo.training.keys import list_changes, make_key
from pipelines.cli import main
from tests import plugins
from tests.pipelines.micro import write_config

CONFIG = "pipelines/configs/embedded.toml"
PROMPTING = {"rollout", "evaluate", "baseline"}


class Env(plugins.Env):
    """The environment of the tests, with one more option."""

    greeting: str = "hello"


def all_keys(config: RunConfig) -> dict[str, str]:
    """A key for each stage."""
    return {name: make_key(config, Step(name, 1), []) for name in STAGES}


def test_an_option_at_its_default_is_in_no_key() -> None:
    config = load_config(CONFIG)
    explicit = load_config(
        CONFIG,
        [
            "optim.lanes=1",
            "train.lag=0",
            "rollout.leave_out_long=false",
            "rollout.old_partners=0",
            "env.feedback_tests=3",
            "penalty.copied=0",
        ],
    )
    assert all_keys(explicit) == all_keys(config)
    without = {name: list_changes(getattr(config, name)) for name in ("reward", "sandbox")}
    assert all_keys(config)["score"] == digest("score", 1, without, []), "nor is a whole section"
    assert "leave_out_long" not in list_changes(config.rollout)


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("rollout.temperature=0.5", {"prepare", "rollout", "partners", "critic", "credit", "evaluate", "baseline"}),
        ("algo.gamma=0.5", {"start", "partners", "critic", "credit", "update"}),
        ("env.feedback_tests=1", {"rollout", "partners", "critic", "credit", "evaluate"}),
        ("sandbox.workers=3", {"score", "partners", "evaluate", "baseline"}),
        ("penalty.copied=0.5", {"score", "partners", "evaluate"}),
        ("train.num_iterations=7", {"start", "rollout", "update"}),
        ("train.seed=7", {"start", "rollout", "update"}),
        ("critic.gae_lambda=0.5", {"critic"}),
        ("tracking.traces=0", set()),
    ],
)
def test_an_option_changes_the_keys_of_the_stages_that_depend_on_it(override: str, changed: set[str]) -> None:
    before, after = all_keys(load_config(CONFIG)), all_keys(load_config(CONFIG, [override]))
    assert {name for name in STAGES if before[name] != after[name]} == changed


def test_the_number_of_iterations_is_in_no_key_if_the_learning_rate_is_constant() -> None:
    constant = ["optim.schedule=constant", "train.num_iterations=7"]
    assert all_keys(load_config(CONFIG, constant)) == all_keys(load_config(CONFIG, constant[:1]))


def test_plugins_without_options_differ_by_their_kind() -> None:
    one, other = plugins.Env(kind="tests.plugins:Env"), Env(kind="tests.training.test_keys:Env")
    assert list_changes(one) == {"kind": "tests.plugins:Env"}
    assert list_changes(other) == {"kind": "tests.training.test_keys:Env"}


def test_the_text_of_prompts_is_in_the_keys_of_the_stages_that_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(CONFIG)
    before = all_keys(config)
    monkeypatch.setitem(PROMPTS["coding"], "helper", "another prompt")
    assert {name for name, key in all_keys(config).items() if key != before[name]} == PROMPTING


def test_outputs_from_before_an_edit_of_the_prompts_are_not_mixed_with_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, root = write_config(tmp_path, iterations=1), tmp_path / "runs"
    assert main(["train", str(path), "--name", "run", "--local"]) == 0
    store = RunStore.open(root, "run")
    committed = {step.folder: store.manifest_of(step.folder)["key"] for step in steps(store.config())}
    monkeypatch.setitem(PROMPTS["coding"], "helper", "another prompt")
    assert main(["resume", "run", "--root", str(root), "--local"]) == 0
    aside = {path.parent.name + "/" + path.name for path in (store.path / "set-aside" / "1").glob("*/*")}
    assert aside == committed.keys() - {"00000/prepare", "00000/update"}, "everything since the first prompt"
    again = {step.folder: store.manifest_of(step.folder)["key"] for step in steps(store.config())}
    assert {folder for folder, key in again.items() if key != committed[folder]} == aside
    assert "evaluate:0 was computed with other prompts or by another version: set aside in" in caplog.text
    assert main(["resume", "run", "--root", str(root), "--local"]) == 0
    assert not (store.path / "set-aside" / "2").exists()
