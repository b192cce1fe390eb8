"""Keys of steps: what changes them, and what a run does with outputs whose key has changed."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from magrpo.config.run import BaselinesConfig, RunConfig, load_config
from magrpo.envs.program import AgentProgram
from magrpo.envs.prompts import PROMPTS
from magrpo.errors import ConfigError
from magrpo.plugins import TABLES, build_plugin
from magrpo.run.manifest import digest
from magrpo.run.steps import STAGES, Step, steps
from magrpo.run.store import Pointer, RunStore
from magrpo.training import keys
from magrpo.training.keys import list_changes, make_key, set_aside_stale
from pipelines.cli import main
from tests import plugins
from tests.pipelines.micro import run_locally, write_config

CONFIG = "pipelines/configs/embedded.toml"
PROMPTING = {"rollout", "evaluate", "baseline"}


class Env(plugins.Env):
    """The environment of the tests, with one more option."""

    greeting: str = "hello"


def all_keys(config: RunConfig) -> dict[str, str]:
    """A key for each stage."""
    return {name: make_key(config, Step(name, 1), []) for name in STAGES}


def commit_steps(store: RunStore, config: RunConfig, *skipped: str) -> None:
    """Commit an output with the right key for each step but the ``skipped`` ones, before which all episodes ended."""
    pointers: dict[str, Pointer] = {}
    for step in steps(config):
        if str(step) not in skipped:
            key = make_key(config, step, [pointers[name] for name in step.inputs if name in pointers])
            is_empty = f"score.{step.part}:{step.iteration}" in skipped
            metrics = Mock(return_value={"rollout/groups": not is_empty})
            pointers[step.output] = store.commit(step.output, key, metrics)


def test_an_option_at_its_default_is_in_no_key() -> None:
    config = load_config(CONFIG)
    explicit = load_config(
        CONFIG,
        ["optim.lanes=1", "train.lag=0", "rollout.leave_out_long=false", "env.feedback_tests=3", "penalty.copied=0"],
    )
    assert all_keys(explicit) == all_keys(config)
    assert "leave_out_long" not in list_changes(config.rollout)


@pytest.mark.parametrize(("stage", "section"), [("score", "penalty"), ("critic", "critic"), ("tables", "baselines")])
def test_a_section_at_its_defaults_is_in_no_key(stage: str, section: str) -> None:
    config = load_config(CONFIG)
    others = {name: list_changes(getattr(config, name)) for name in STAGES[stage].sections if name != section}
    assert all_keys(config)[stage] == digest(Path(Step(stage, 1).output).name, 1, others, [])


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("rollout.temperature=0.5", {"prepare", "rollout", "critic", "credit", "evaluate", "baseline"}),
        ("algo.gamma=0.5", {"start", "critic", "credit", "update"}),
        ("env.feedback_tests=1", {"rollout", "critic", "credit", "evaluate"}),
        ("sandbox.workers=3", {"score", "evaluate", "baseline"}),
        ("penalty.copied=0.5", {"score", "evaluate"}),
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


ENV_SECTIONS = {
    "coding": {"coding", "coding_task", "program_feedback"},
    "solo": {"solo", "program", "program_feedback"},
    "sequential": {"sequential", "program", "program_feedback"},
    "team": {"team"},
    "writing": {"writing", "writing_feedback"},
    "writing_solo": {"writing_solo", "writing_solo_feedback"},
    "writing_sequential": {"writing_sequential", "writing_feedback"},
    "relay": {"relay"},
    "relay_in_turn": {"relay"},
    "relay_solo": {"relay"},
}
"""The sections of ``prompts.toml`` that each environment can show, with its default prompt."""


@pytest.mark.parametrize(
    ("env", "sections"),
    [
        *((f"kind={kind}", sections) for kind, sections in ENV_SECTIONS.items()),
        ("kind=coding prompt=list", {"coding_list", "coding_list_task", "program_feedback"}),
        ("kind=coding prompt=paper", {"paper", "program_feedback"}),
        ("kind=tests.plugins:Env", set()),
    ],
)
def test_the_texts_of_the_own_environment_are_in_the_keys_of_the_stages_that_prompt(
    monkeypatch: pytest.MonkeyPatch, env: str, sections: set[str]
) -> None:
    plugin = build_plugin("env", dict(option.split("=") for option in env.split()))
    config = load_config(CONFIG).model_copy(update={"env": plugin})
    before = all_keys(config)
    noticed = set()
    for section, texts in PROMPTS.items():
        with monkeypatch.context() as edit:
            for name in texts:
                edit.setitem(texts, name, "another text")
            changed = {name for name, key in all_keys(config).items() if key != before[name]}
        assert changed in (set(), PROMPTING)
        noticed |= {section} if changed else set()
    assert noticed == sections


@pytest.mark.parametrize("leaves_out", [False, True])
def test_prompts_decide_which_problems_are_left_out(monkeypatch: pytest.MonkeyPatch, leaves_out: bool) -> None:
    config = load_config(CONFIG, [f"rollout.leave_out_long={str(leaves_out).lower()}"])
    prepare = next(step for step in steps(config) if step.stage == "prepare")
    before = make_key(config, prepare, [])
    monkeypatch.setattr("magrpo.training.keys.read_prompts", lambda config: "longer")
    assert (make_key(config, prepare, []) != before) == leaves_out


def test_every_text_is_in_the_keys_of_an_environment() -> None:
    assert set(ENV_SECTIONS) == set(TABLES["env"]) - {"program"}
    assert set().union(*ENV_SECTIONS.values()) == set(PROMPTS) - {"coding_list", "coding_list_task", "paper"}


def test_the_keys_of_a_table_hold_the_texts_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config, solo = load_config(CONFIG), {"kind": "solo"}
    row = {"name": "one", "title": "One", "env": solo, "reward": solo, "agents": config.agents, "max_new_tokens": 8}
    table = config.model_copy(update={"baselines": BaselinesConfig.model_validate({"rows": [row]})})
    before = all_keys(table)["baseline"]
    with monkeypatch.context() as edit:
        edit.setitem(PROMPTS["coding"], "helper", "another prompt")
        assert all_keys(table)["baseline"] == before
    monkeypatch.setitem(PROMPTS["solo"], "solo", "another prompt")
    assert all_keys(table)["baseline"] != before


def test_outputs_from_before_an_edit_of_the_prompts_are_not_mixed_with_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, root = write_config(tmp_path, iterations=1), tmp_path / "runs"
    store, _, _ = run_locally(load_config(path, ["env.kind=coding", "env.prompt=bare"]), "run")
    committed = {step.output: store.manifest_of(step.output)["key"] for step in steps(store.config())}
    monkeypatch.setitem(PROMPTS["coding"], "helper", "another prompt")
    assert main(["resume", "run", "--root", str(root), "--local"]) == 0
    aside = {path.parent.name + "/" + path.name for path in (store.path / "set-aside" / "1").glob("*/*")}
    assert aside == committed.keys() - {"00000/prepare", "00000/update"}, "everything since the first prompt"
    again = {step.output: store.manifest_of(step.output)["key"] for step in steps(store.config())}
    assert {folder for folder, key in again.items() if key != committed[folder]} == aside
    assert "evaluate:0 was computed with other prompts or by another version: set aside in" in caplog.text
    assert main(["resume", "run", "--root", str(root), "--local"]) == 0
    assert not (store.path / "set-aside" / "2").exists()


@pytest.mark.parametrize("skipped", [[], ["score.1:1"]], ids=["whole", "ended early"])
def test_stale_outputs_are_found_after_an_iteration_whose_episodes_ended_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[str]
) -> None:
    config = load_config(write_config(tmp_path, iterations=2), ["eval.every=9", "env.num_turns=2"])
    store = RunStore.create(config)
    commit_steps(store, config, *skipped)
    set_aside_stale(store, config)
    assert not (store.path / "set-aside").exists()
    every = [step for step in steps(config) if str(step) not in skipped]
    first = every.index(next(step for step in every if str(step) == "update:2"))

    def make_changed_key(_: RunConfig, step: Step, inputs: list[Pointer]) -> str:
        key = make_key(config, step, inputs)
        return f"{key}x" if str(step) == "update:2" else key

    monkeypatch.setattr(keys, "make_key", make_changed_key)
    set_aside_stale(store, config)
    aside = {str(path.relative_to(store.path / "set-aside" / "1")) for path in store.path.glob("set-aside/1/*/*")}
    assert aside == {step.output for step in every[first:]}


@pytest.mark.parametrize(
    ("run", "missing"),
    [
        ("my_program:solve", "module my_program"),
        ("my_package.my_program:solve", "module my_package.my_program"),
        ("python -u my_program.py {problem_file}", "my_program.py"),
        ("sh my_program.sh", "my_program.sh"),
        ("uv run my_program.py", "my_program.py"),
    ],
)
def test_a_run_of_a_program_stays_as_it_is_in_a_folder_without_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, missing: str
) -> None:
    folder, elsewhere = tmp_path / "programs", tmp_path / "elsewhere"
    (folder / "my_package").mkdir(parents=True)
    elsewhere.mkdir()
    for name in ("my_program.py", "my_program.sh", "my_package/my_program.py"):
        (folder / name).write_text(f"print('{name}')\n")
    program = f'env={{kind = "program", run = "{run}", writes = ["helper", "main"]}}'
    config = load_config(write_config(tmp_path, iterations=1), [program, "rollout.joint_mode=aligned"])
    monkeypatch.chdir(folder)
    store = RunStore.create(config)
    set_aside_stale(store, config)
    commit_steps(store, config)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ConfigError, match=rf"env\.run = .*: {missing} is not found .* in the folder of the program"):
        set_aside_stale(store, config)
    monkeypatch.chdir(folder)
    set_aside_stale(store, config)
    assert not (store.path / "set-aside").exists()


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("def plai(): ...\n", True),
        ("def play(): ...\n", False),
        ("from elsewhere import play\n", False),
        ("import sys\nsetattr(sys.modules[__name__], 'play', print)\n", False),
        ("exec(open('other.py').read())\n", False),
        ("def play(:\n", False),
    ],
)
def test_a_function_is_missed_only_where_its_module_cannot_define_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_refused: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_module.py").write_text(text)
    program = AgentProgram(run="my_module:play")
    with pytest.raises(ConfigError, match="my_module defines no 'play'") if is_refused else nullcontext():
        program.check_found()
    Path("my_module").mkdir()
    Path("my_module/__init__.py").write_text("def play(): ...\n")
    program.check_found()  # Python imports the package


def test_an_edit_of_a_response_template_changes_the_keys_of_the_stages_that_prompt(tmp_path: Path) -> None:
    path = tmp_path / "template.json"
    env = AgentProgram(run="tests.gateway.programs:ask_both", response_template=path)
    config = load_config(CONFIG).model_copy(update={"env": env})
    path.write_text('{"fields": {}}')
    before = all_keys(config)
    path.write_text('{"fields": {"content": {}}}')
    assert {name for name, key in all_keys(config).items() if key != before[name]} == PROMPTING
    path.unlink()
    with pytest.raises(ConfigError, match=r"env\.response_template = '.*template\.json' is not found from "):
        all_keys(config)


@pytest.mark.parametrize(
    ("run", "sources"),
    [
        ("tests.gateway.programs:ask_both", [Path("tests/gateway/programs.py")]),
        ("json:loads", [Path(json.__file__)]),
        ("time:sleep", []),
        ("my_package:solve", [Path("my_package/__init__.py")]),
        ("docker run image python app.py", []),
        ("bash -c 'cd app; python app.py'", []),
        (f"bash -c 'echo {'long ' * 100}'", []),
        ("python -m json data.json other.json", [Path("data.json")]),
    ],
    ids=["in the folder", "installed", "built in", "package", "container", "shell code", "long code", "arguments"],
)
def test_the_sources_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, sources: list[Path]
) -> None:
    (tmp_path / "my_package").mkdir()
    for name in ("my_package/__init__.py", "data.json"):
        (tmp_path / name).write_text(name)
    expected = [(tmp_path / path if (tmp_path / path).exists() else path).read_text() for path in sources]
    if not run.startswith("tests."):
        monkeypatch.chdir(tmp_path)
    assert AgentProgram(run=run).read_sources() == expected
