from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from magrpo.config.run import RunConfig, load_config
from magrpo.config.validate import SYNONYMS, validate_config, walk_fields
from magrpo.errors import ConfigError, check_name, quote_value
from magrpo.planning.warnings import list_config_warnings
from magrpo.plugins import Section, build_plugin, import_plugin
from magrpo.rewards.coding import SoloReward
from magrpo.run.config_diff import flatten_config, format_changed_values, read_flat_config
from magrpo.run.store import RunStore
from tests import plugins

CONFIGS = sorted((Path(__file__).parents[2] / "pipelines" / "configs").glob("*.toml"))


def read_back(resolved: str) -> RunConfig:
    return validate_config(RunConfig, json.loads(resolved), (), "resolved")


@pytest.mark.parametrize("example", CONFIGS, ids=lambda path: path.stem)
def test_every_example_asks_for_the_gpu_that_it_needs_and_each_of_its_options_has_an_effect(example: Path) -> None:
    """With ``auto`` models of billions of parameters would train in float32 on a CPU."""
    config = load_config(example)
    assert read_back(config.resolved(secrets=True)) == config
    needs_gpu = "# Needs a CUDA GPU" in example.read_text(encoding="utf-8")
    assert config.model.device == ("cuda" if needs_gpu else "cpu")
    assert not [warning for warning in list_config_warnings(config) if "no effect" in warning]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(plugins.CONFIG)
    return path


def test_overrides_are_toml_or_text(path: Path) -> None:
    config = load_config(
        path, ["optim.lr=2e-4", "agents.1.model=other", "lora.target_modules=['q_proj']", "eval.max_problems=3"]
    )
    assert config.optim.lr == 2e-4
    assert config.agents[1].model == "other"
    assert config.lora.target_modules == ("q_proj",)
    assert config.eval.max_problems == 3
    assert config.train.seed == 0


@pytest.mark.parametrize(
    ("before", "override", "value"),
    [
        ("rollout.probe_size=2", "rollout.probe_size=none", None),
        ("agents.1.lr=1e-3", "agents.m.lr=none", None),
        ("agents.0.start_from=x", "agents.0.start_from=none", None),
        ("registry.model=x", "registry.model=none", None),
        ("registry.model=x", "registry.model='none'", "none"),
        ("algo.normalize=std", "algo.normalize=none", "none"),
        ("problems={kind='humanevalplus', source='x', max_tests=3}", "problems.max_tests=none", None),
    ],
)
def test_none_unsets_a_key_that_may_have_no_value(path: Path, before: str, override: str, value: str | None) -> None:
    section, *middle, key = override.partition("=")[0].split(".")
    config = load_config(path, [before, override]).model_dump()
    node = config[section][int(before.split(".")[1])] if middle else config[section]
    assert node[key] == value


@pytest.mark.parametrize(
    ("example", "changes", "method"),
    [
        ("embedded", [], "MAGRPO"),
        ("embedded", ["algo.estimator=maac"], "MAAC"),
        ("embedded", ["agents.main.estimator=iac"], "IAC + MAGRPO"),
        ("embedded", ["algo.loss=madpo", "algo.update_epochs=2"], "MADPO"),
        ("embedded_grpo", [], "GRPO"),
        ("embedded_grpo", ["algo.estimator=iac"], "IAC"),
    ],
)
def test_a_run_is_called_by_its_method(example: str, changes: list[str], method: str) -> None:
    [path] = [path for path in CONFIGS if path.stem == example]
    assert load_config(path, changes).method == method


def test_a_tilde_is_the_home_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    overrides = ["root=~/runs", "agents.0.model=~/base", "agents.0.start_from=~/w", "agents.1.model=./b"]
    config = load_config(path, overrides)
    assert config.root == Path("/home/me/runs")
    assert (config.agents[0].model, config.agents[0].start_from) == ("/home/me/base", Path("/home/me/w"))
    assert config.agents[1].model == "./b", "any other name stays as it is written"
    assert load_config(path, ["root=~nobody-here/runs"]).root == Path("~nobody-here/runs")


def test_an_agent_is_numbered_or_named(path: Path) -> None:
    config = load_config(
        path, ["agents.m.model=of main", "agents.0.model=of helper", "agents.h.name=x", "agents.1.lr=2"]
    )
    assert [(agent.name, agent.model, agent.lr) for agent in config.agents] == [
        ("x", "of helper", None),
        ("m", "of main", 2),
    ]


@pytest.mark.parametrize(
    ("override", "beginning"),
    [
        ("train.num_iteration=3", "on the command line: train.num_iteration: unknown key"),
        ("agents.m.lr=-1", "on the command line: agents.1.lr: "),
        ("optim.lr=inf", "on the command line: optim.lr: must be a finite number"),
        ("agents.7.name=x", "on the command line: 'agents.7.name=x': "),
        ("problems.kind=humanevil", "{path}, as changed on the command line: problems: unknown kind"),
        ("rollout.group_size=1", "{path}, as changed on the command line: rollout: a group of 1"),
        ("train.seed=1", "{path}: optim.lrr: unknown key"),
    ],
)
def test_a_mistake_is_blamed_on_the_file_or_on_the_command_line(path: Path, override: str, beginning: str) -> None:
    if override == "train.seed=1":
        path.write_text(plugins.CONFIG.replace("lr =", "lrr ="))
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert str(caught.value).startswith(beginning.format(path=path))


def test_synonyms_mean_keys_that_exist() -> None:
    tree = {"problems": {"kind": "humaneval"}, "env": {"kind": "coding"}}
    keys = {key.rpartition(".")[2] for key, _ in walk_fields(RunConfig, tree)}
    assert {name for names in SYNONYMS.values() for name in names} <= keys


def test_the_resolved_tree_reads_back_with_its_plugins(path: Path) -> None:
    config = load_config(path, ["problems.size=9", "engine.text=bad"])
    again = read_back(config.resolved())
    assert again == config
    assert isinstance(again.problems, plugins.ListedProblems)
    assert again.problems.size == 9
    assert isinstance(again.engine, plugins.Engine)
    assert again.engine.text == "bad"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean 'lr'"),
        ("num_iterations=3", "num_iterations: unknown key; did you mean 'train.num_iterations'[?]"),
        ("num_iteration=3", "num_iteration: unknown key; did you mean 'train.num_iterations'[?]"),
        ("seed=3", "seed: unknown key; did you mean 'train.seed' or 'eval.seed'[?]"),
        ("lr=3", "lr: unknown key; did you mean 'optim.lr' or 'critic.lr' or 'agents.0.lr'[?]"),
        ("train.lr=3", "train.lr: unknown key; did you mean 'optim.lr' or 'critic.lr' or 'agents.0.lr'[?]"),
        ("size=3", "size: unknown key; did you mean 'problems.size'[?]"),
        ("optim.learning_rate=3", "optim.learning_rate: unknown key; did you mean 'lr'[?]"),
        ("learning_rate=3", "learning_rate: unknown key; did you mean 'optim.lr' or 'critic.lr' or 'agents.0.lr'[?]"),
        ("train.epochs=3", "train.epochs: unknown key; did you mean 'num_iterations'[?]"),
        ("train.batch_size=3", "unknown key; did you mean 'rollout.problems_per_iteration'[?]"),
        ("rollout.n=3", "rollout.n: unknown key; did you mean 'group_size'[?]"),
        ("engine.memory_frac=0.5", "engine.memory_frac: unknown key; it is a key of engine.kind = 'vllm'$"),
        ("rollout.memory_frac=0.5", "unknown key; it is a key of engine.kind = 'vllm'$"),
        ("problems.test_frac=0.3", "unknown key; it is a key of problems.kind = 'humaneval' or 'coophumaneval' or "),
        ("env.max_calls=3", "env.max_calls: unknown key; it is a key of env.kind = 'program'$"),
        ("reward.num_helpers=2", "reward.num_helpers: unknown key; it is a key of reward.kind = 'team'$"),
        ("problems.dataset=x", "problems.dataset: unknown key; 'source' is a key of problems.kind = 'humaneval' or "),
        ("dataset=x", "dataset: unknown key; 'source' is a key of problems.kind = 'humaneval' or "),
        ("trian.seed=3", "trian: unknown key; did you mean 'train'"),
        ("algo.estimator=margpo", "algo.estimator: unknown value 'margpo'; did you mean 'magrpo'[?] choices: "),
        ("train.lag=one", "train.lag: Input should be 0, 1 or 2, got 'one'$"),
        ("optim.lr=-1", "optim.lr: .*greater than 0, got -1"),
        ("optim.lr=fast", "optim.lr: .*got 'fast'"),
        ("optim", "an override is written section.key=value"),
        ("agents.7.name=x", r"agents has no '7'; there are 2 agents: agents.0 \(h\), agents.1 \(m\)"),
        ("agents.x.model=x", r"agents has no 'x'; there are 2 agents: agents.0 \(h\), agents.1 \(m\)"),
        ("agents.-1.model=x", "agents has no '-1'"),
        ("agents.0.name=m", "agents: names must differ"),
        ("agents.0.role=boss", r"needs one agent for each role \['helper', 'main'\], got \['boss', 'main'\]"),
        ("problems.kind=coopcod", "problems: unknown kind 'coopcod': did you mean 'coopcode'"),
        ("problems.kind=tests.plugins:Missing", "cannot load kind 'tests.plugins:Missing'"),
        ("reward.kind=returned", "kind .returned. is for programs, which return their own rewards: choose another, or"),
        (
            "env.kind=my/envs.py:Mine",
            "env: cannot load kind 'my/envs.py:Mine': name the module, 'my.envs:Mine', not its file; it must be in the "
            "current folder or in one on PYTHONPATH",
        ),
        (
            "env.kind=no_such_module:Mine",
            "No module named 'no_such_module'; a module of your own must be in the current folder or in one on PYTHON",
        ),
        ("problems.kind=tests.plugins:NotAPlugin", "is not a subclass of magrpo.plugins.Plugin"),
        ("problems.siz=3", "problems.siz: unknown key; did you mean 'size'"),
        ("rollout.crossed_pairs=3", "rollout: crossed_pairs must be a multiple of group_size"),
        ("rollout.crossed_pairs=8", "crossed_pairs needs joint_mode = \"crossed\", not 'aligned': remove it, or"),
        ("optim.lr=inf", r"optim.lr: must be a finite number, not inf"),
        ("algo.importance_cap=inf", r"algo.importance_cap: must be a finite number"),
        ("env.extra=[1.0, {a = nan}]", r"env.extra.1.a: must be a finite number, not nan"),
        ("optim.lr=1e999", r"optim.lr: must be a finite number"),
        (f"train.seed={2**63}", r"train.seed: must lie between -2.63 and 2.63"),
        (f"train.seed={'9' * 5000}", r"train.seed: .*got '9*... \(5002 characters\)"),
        (f"optim.lr={'[' * 10**5}", r"optim.lr: .*got '\[*... \(100002 characters\)"),
        (f"{'a.' * 10**4}a=1", r"a.a.a.*: nested more than 40 deep"),
        (f"{'a.' * 10**5}", r"'a\..* an override is written"),
        (f"problems.kind={'x' * 10**5}", r"unknown kind 'x*... \(100002 characters\)"),
        (f"{'x' * 10**5}=1", r"x*: unknown key"),
        ("agents.0.model=a\0b", "agents.0.model: must not contain null characters"),
        ("agents.0.model=\udcff", "agents.0.model: must not contain .* lone surrogates"),
        ("problems.kind=..:x", r"cannot load kind '..:x': TypeError"),
        ("problems.kind=:x", "cannot load kind ':x': ValueError: Empty module name"),
        ("env.kind=tests.plugins:Engine", r"cannot be used as \[env\]: it has no num_turns, roles, acting, observe"),
        ("rollout.group_size=1", "a group of 1 has no siblings, so agent 'h' with estimator 'magrpo' would never"),
    ],
)
def test_each_mistake_gets_one_line_that_names_it(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path, [override])
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agents={name='x'}", "agents: must be a list of tables: begin each of them with [[agents]]"),
        ("agents.0=x", "agents.0: must be a table of keys, such as agents.0.name"),
        ("optim=fast", "optim: must be a table of keys, such as optim.lr"),
        ("reward=coding", 'reward: must be a table of keys: write reward.kind="coding"'),
        ("reward=3", "reward: must be a table of keys, such as reward.kind"),
        ("sandbox.packages=numpy", "sandbox.packages: must be a list: write '[\"numpy\"]'"),
        ("sandbox.packages=[numpy,scipy]", 'sandbox.packages: must be a list: write \'["numpy", "scipy"]\''),
        ("notify.urls=mailto://a:b@c.org", "notify.urls: must be a list: write '[\"URL\"]'"),
        ("sandbox.packages={}", "sandbox.packages: must be a list"),
        ("optim.lr=true", "optim.lr: must be a number, not true"),
        ("agents.0.lr=false", "agents.0.lr: must be a number, not false"),
        ("train.lag=true", "train.lag: must be a number, not true"),
        ("tracking.experiment=2024", "tracking.experiment: must be a text: write '\"2024\"', with quotes"),
        ("sandbox.packages=[1]", "sandbox.packages.0: must be a text: write '\"1\"', with quotes"),
        ("tracking.experiment=true", "tracking.experiment: must be a text: write '\"true\"', with quotes"),
        ("sandbox.packages=true", "sandbox.packages: must be a list: write '[true]'"),
        ("root=2024-01-01", "root: must be a text: write '\"2024-01-01\"', with quotes"),
        ("root=[]", "root: Input is not a valid path for <class 'pathlib.Path'>, got []"),
    ],
)
def test_a_value_of_the_wrong_type_is_explained_as_it_must_be_written(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["sandbox.kind=pool", override])
    assert str(caught.value) == f"on the command line: {message}"


def test_a_value_in_a_file_is_explained_without_the_quotes_of_a_shell(path: Path) -> None:
    path.write_text(plugins.CONFIG.replace("[[agents]]", "[agents]", 1).partition("[[agents]]")[0])
    with pytest.raises(ConfigError, match=r"agents: must be a list of tables: begin each of them with \[\[agents\]\]"):
        load_config(path)
    path.write_text(f'root = 2024\nmodel = "x"\n{plugins.CONFIG}')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f'{path}: root: must be a text: write "2024", with quotes\n' in f"{caught.value}\n"


@pytest.mark.parametrize(
    "override",
    [
        "notify.urls=slack://hunter2",
        "notify.urls.0=slack://hunter2",
        "notify.urls=[['slack://hunter2']]",
        "notify.urls={a='slack://hunter2'}",
        "notify=slack://hunter2",
        "notify=['slack://hunter2']",
        "notify.urls=[{a=[inf, 'slack://hunter2']}]",
        "tracking.uri=['https://alice:hunter2@example.org']",
        "tracking=https://alice:hunter2@example.org",
        "tracking.uri.x.y=https://alice:hunter2@example.org",
        "agents.7.notify=https://alice:hunter2@example.org",
        "notify.urls.9=slack://hunter2",
        "notify.urls.0.x=slack://hunter2",
    ],
)
def test_no_mistake_shows_a_secret(path: Path, override: str) -> None:
    path.write_text(f"{plugins.CONFIG}\n[notify]\nurls = ['json://example.org']")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    assert "hunter2" not in str(caught.value)


class Level(Section):
    """A table inside a plug-in's own."""

    weight: float = 1.0


class RewardWithLevels(plugins.Reward):
    """A plug-in with tables of sections, by name, in a list, and by name in lists."""

    levels: dict[str, Level] = Field(default_factory=dict)
    steps: tuple[Level, ...] = ()
    last: Level | None = None
    groups: dict[str, tuple[Level, ...]] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("levels={easy={wight=1}}", "levels.easy.wight: unknown key; did you mean 'weight'? choices: weight"),
        ("steps=[{wight=1}]", "steps.0.wight: unknown key; did you mean 'weight'? choices: weight"),
        ("last={wight=1}", "last.wight: unknown key; did you mean 'weight'? choices: weight"),
        ("groups={easy=[{wight=1}]}", "groups.easy.0.wight: unknown key"),
    ],
)
def test_a_misspelt_key_in_a_table_of_a_plugin_is_named(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"reward.kind={__name__}:RewardWithLevels", f"reward.{override}"])
    assert str(caught.value) == f"on the command line: reward.{message}"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("len(1)", "TypeError: object of type 'int' has no len"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(): f()\nf()", "RecursionError"),
        ("from magrpo.plugins import Plugin\nclass Mine(Plugin):\n    x: undefined", "NameError: name 'undefined'"),
        ("import torch.no_such_module", "ModuleNotFoundError: No module named 'torch.no_such_module'"),
    ],
)
def test_a_plugin_whose_module_fails_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    name = f"failing_plugin_{abs(hash(code))}"
    (path.parent / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(ConfigError, match=f"problems: cannot load kind '{name}:Mine': {message}") as caught:
        load_config(path, [f"problems.kind={name}:Mine"])
    assert len(str(caught.value).splitlines()) == 1


def test_a_reward_that_runs_programs_needs_a_sandbox() -> None:
    embedded = next(path for path in CONFIGS if path.stem == "embedded")
    message = (
        'sandbox: kind "none" runs no programs, but the reward \'coding\' needs them run: set sandbox.kind = "pool"'
    )
    with pytest.raises(ConfigError, match=message):
        load_config(embedded, ["sandbox={kind='none'}"])


@pytest.mark.parametrize("scale", ["0", "-1", "inf", "nan", "1e999"])
def test_a_reward_has_a_scale_that_can_be_divided_by(path: Path, scale: str) -> None:
    with pytest.raises(ConfigError, match=r"reward.scale: (must be a finite number|.* greater than 0)"):
        load_config(path, ["reward.kind=coding", f"reward.scale={scale}"])


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ("embedded", ["reward.kind=solo"], "'solo' prices the roles solo; env 'coding' has helper, main: choose "),
        ("embedded", ["reward.kind=relay"], "'relay' prices the roles first, second; env 'coding' has helper, main: "),
        ("relay", ["reward.kind=relay_solo"], "'relay_solo' prices the roles solo; env 'relay' has first, second: "),
        ("relay_solo", ["reward.kind=writing"], "'writing' prices the roles summary, elaboration; env 'relay_solo' "),
        ("tldr", ["reward.kind=writing_solo"], "'writing_solo' prices the roles solo; env 'writing' has summary, "),
        ("tldr", ["reward.task=arxiv"], "'writing' prices the roles background, methods; env 'writing' has summary, "),
        ("team", ["reward.num_helpers=1"], "'team' prices the roles helper1, main; env 'team' has helper1, helper2, "),
        ("team", ["reward.num_helpers=3"], "'team' prices the roles helper1, helper2, helper3, main; env 'team' has "),
        ("embedded_program", ["env.writes=['main']"], "'coding' prices the roles helper, main; env 'program' has main"),
    ],
)
def test_a_reward_of_other_roles_than_the_environment_is_refused(
    config: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"reward: {message}"):
        load_config(f"pipelines/configs/{config}.toml", overrides)


def test_one_author_is_priced_for_the_task_that_the_environment_sets() -> None:
    """Its role has the same name in both tasks; the late form of arxiv is a reward of the same task."""
    alone = ["env={kind='writing_solo', task='arxiv'}", "agents=[{name='solo', model='writing-base'}]"]
    for task in ("arxiv", "arxiv_late"):
        load_config("pipelines/configs/tldr.toml", [*alone, f"reward={{kind='writing_solo', task='{task}'}}"])
    with pytest.raises(ConfigError, match=r"reward.task = 'tldr', but env.task = 'arxiv': set both to the same task"):
        load_config("pipelines/configs/tldr.toml", [*alone, "reward.kind=writing_solo"])


class PlannedEnv(plugins.Env):
    """An environment with a role that no reward of the project prices."""

    coder: str = "main"

    def roles(self) -> tuple[str, ...]:
        return ("planner", self.coder)


class MainReward(SoloReward):
    """Prices another role than its base class."""


def test_own_environments_have_further_roles_and_own_rewards_price_any(path: Path) -> None:
    planned = [f"env.kind={__name__}:PlannedEnv", "agents.0.role=planner"]
    load_config(path, [*planned, f"reward.kind={__name__}:MainReward"])
    with pytest.raises(ConfigError, match=r"'solo' prices the roles solo; env '.*:PlannedEnv' has planner, main: "):
        load_config(path, [*planned, "reward.kind=solo"])
    load_config(path, [*planned, "agents.1.role=solo", "reward.kind=solo", "env.coder=solo"])


def test_a_line_much_too_long_loses_its_middle() -> None:
    beginning, end = (
        str(ConfigError(f"first{'x' * 10**5}last\nnext")).splitlines()[0].split(" ... (98409 characters) ... ")
    )
    assert (beginning[:6], end[-5:], len(beginning)) == ("firstx", "xlast", 800)


def test_a_derived_seed_is_a_number_that_a_configuration_holds(path: Path) -> None:
    largest = 2**63 - 1  # magrpo.seeds.derive_seed gives 63 bits
    config = load_config(path, [f"eval.seed={largest}"])
    assert read_back(config.resolved()).eval.seed == largest


def test_a_thousand_mistakes_are_twenty_lines(path: Path) -> None:
    with pytest.raises(ConfigError, match="and 981 more mistakes") as caught:
        load_config(path, [f"a{i}=1" for i in range(1001)])
    assert len(str(caught.value).splitlines()) == 21


@pytest.mark.parametrize("name", ["", "../../x", "x" * 101])
def test_names_of_agents_fit_files_and_metrics(path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"agents.0.name: name .* cannot be used: a name consists of letters"
    ) as caught:
        load_config(path, [f"agents.0.name={json.dumps(name)}"])
    assert len(str(caught.value).splitlines()) == 1
    assert len(load_config(path, [f"agents.0.name={'x' * 100}"]).resolved()) > 0


def test_no_agent_has_the_name_of_a_shipped_base(path: Path) -> None:
    """Both would be folders beside each other in the folder of trained agents."""
    with pytest.raises(ConfigError, match=r"agents.0.name: 'coopcode-base' is the name of a base model .* another"):
        load_config(path, ["agents.0.name=coopcode-base"])


def test_experiments_have_the_names_that_mlflow_takes(path: Path) -> None:
    for name in ("a.b", "a b", "/Users/me@example.org/magrpo", "../../x", "Jürgen", "x" * 500):
        assert load_config(path, [f"tracking.experiment={json.dumps(name)}"]).tracking.experiment == name
    for name in ("", "  ", "x\n", "x" * 501):
        with pytest.raises(ConfigError, match=r"tracking.experiment: an experiment's name has 1 to 500 printable"):
            load_config(path, [f"tracking.experiment={json.dumps(name)}"])


def test_a_reserved_name_is_refused_in_upper_case_too() -> None:
    assert check_name("Study-1", "--name", {"studies"}) == "Study-1"
    with pytest.raises(ConfigError, match="--name 'Studies' is reserved"):
        check_name("Studies", "--name", {"studies"})


def test_a_long_value_is_quoted_by_its_beginning() -> None:
    assert quote_value("x") == "'x'"
    assert quote_value("x" * 10**5) == f"'{'x' * 199}... (100002 characters)"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.num_turns=1000000000"], "env.num_turns = 1,000,000,000: an episode has at most 1,000"),
        (["rollout.group_size=1000000"], "an iteration has 32,000,000 completions and 16,000,000 joint actions"),
        (["rollout.problems_per_iteration=10000000"], "an iteration has 160,000,000 completions and 80,000,000 joint"),
        (["env.num_turns=9", "rollout.tree=full"], "up to turn 7 an iteration has 76,695,808 completions"),
        (["rollout.joint_mode=crossed", "rollout.group_size=1000"], "has 32,000 completions and 16,000,000 joint"),
    ],
)
def test_absurd_sizes_are_refused_with_the_number(path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path, overrides)
    assert len(str(caught.value).splitlines()) == 1


def test_a_large_tree_with_limits_is_accepted(path: Path) -> None:
    load_config(path, ["rollout.joint_mode=crossed", "rollout.group_size=1000", "rollout.crossed_pairs=2000"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.joint_mode=aligned"], "of 1 joint actions with a completion it leaves out none"),
        (["algo.lenience=0.2"], "of 4 joint actions with a completion it leaves out none: set it to 1/4 or more"),
        (["rollout.crossed_pairs=4"], "of 1 joint actions with a completion it leaves out none"),
        (["rollout.crossed_pairs=400", "algo.lenience=0.2"], "of 4 joint actions with a completion it leaves out none"),
        (["algo.loss=madpo"], "algo.loss must be"),
        (["agents.0.estimator=iac"], "algo.estimator must have siblings as baseline"),
        (["algo.lenience=1"], "algo.lenience"),
    ],
)
def test_what_does_not_fit_lenience_is_refused(path: Path, overrides: list[str], message: str) -> None:
    fits = ["algo.lenience=0.5", "rollout.joint_mode=crossed", "rollout.group_size=4"]
    load_config(path, fits)
    with pytest.raises(ConfigError, match=message):
        load_config(path, [*fits, *overrides])


def test_lenience_needs_agents_that_act_at_once() -> None:
    overrides = ["algo.lenience=0.75", "rollout.joint_mode=crossed"]
    with pytest.raises(ConfigError, match=r"of 1 joint actions .* of agents that act at once"):
        load_config("pipelines/configs/sequential.toml", overrides)


def test_a_group_of_one_trains_without_a_baseline_only(path: Path) -> None:
    load_config(path, ["rollout.group_size=1", "algo.estimator=mareinforce"])
    mixed = ["rollout.group_size=1", "agents.0.estimator=mareinforce"]
    with pytest.raises(ConfigError, match="agent 'm' with estimator 'magrpo' would never train"):
        load_config(path, mixed)
    load_config(path, [*mixed, "agents.1.trained=false"])
    with pytest.raises(ConfigError, match="agent 'h' with estimator 'mareinforce' would never train"):
        load_config(path, ["rollout.group_size=1", "algo.estimator=mareinforce", "algo.normalize=std"])


def test_choices_that_bias_the_gradient_are_warned_about(path: Path) -> None:
    assert list_config_warnings(load_config(path)) == []
    [biased] = list_config_warnings(load_config(path, ["agents.1.estimator=maremax"]))
    assert biased.startswith("estimator 'maremax': the baseline, the best sibling's return, depends on the completion")
    [lenient] = list_config_warnings(load_config(path, ["rollout.joint_mode=crossed", "algo.lenience=0.75"]))
    assert "algo.lenience = 0.75: " in lenient
    [normalized] = list_config_warnings(load_config(path, ["algo.normalize=std"]))
    assert normalized.startswith("algo.normalize = 'std': groups with nearly equal returns weigh as much")
    assert list_config_warnings(load_config(path, ["algo.normalize=std", "train.num_iterations=0"])) == []
    [one_epoch] = list_config_warnings(load_config(path, ["algo.loss=madpo"]))
    assert "never leaves the margin 0" in one_epoch


def test_a_penalty_that_pulls_trained_agents_back_is_warned_about(path: Path) -> None:
    """The reference is the base model, whatever weights the agents start from."""
    start, beta = f"agents.0.start_from={path.parent}", "algo.beta=0.1"
    assert list_config_warnings(load_config(path, [start])) == list_config_warnings(load_config(path, [beta])) == []
    assert list_config_warnings(load_config(path, [start, beta, "agents.0.trained=false"])) == []
    for trained in ([start], ["registry.model=m", "registry.continue_from_champion=true"]):
        [pulled] = list_config_warnings(load_config(path, [beta, *trained]))
        assert pulled.startswith("algo.beta = 0.1 pulls agents that start from trained weights back towards their base")


@pytest.mark.parametrize(
    ("overrides", "unused", "remedy"),
    [
        (["rollout.tree=full"], "rollout.tree has", ["env.num_turns=2"]),
        (
            ["rollout.termination_threshold=1.9", "algo.gamma=0.9", "eval.stop_above=1.9"],
            "rollout.termination_threshold, algo.gamma, eval.stop_above have",
            ["env.num_turns=2"],
        ),
        (
            ["env.num_turns=2", "rollout.termination_threshold=2", "eval.stop_above=3"],
            "rollout.termination_threshold, eval.stop_above have",
            ["rollout.termination_threshold=1.9", "eval.stop_above=1.9"],
        ),
        (["critic.lr=0.1", "critic.epochs=2"], "critic.lr, critic.epochs have", ["agents.0.estimator=iac"]),
        (["algo.ratio=sequence"], "algo.ratio has", ["algo.update_epochs=2"]),
        (["algo.clip_low=0.1", "algo.clip_high=0.3"], "algo.clip_low, algo.clip_high have", ["algo.update_epochs=2"]),
        (["algo.preference_beta=0.2"], "algo.preference_beta has", ["algo.loss=madpo", "algo.update_epochs=2"]),
        (
            [
                "algo.loss=madpo",
                "algo.update_epochs=2",
                "algo.clip_low=0.1",
                "algo.estimator=maremax",
                "agents.1.estimator=marloo",
            ],
            "agents.m.estimator, algo.estimator, algo.clip_low have",
            ["algo.loss=policy_gradient", "algo.estimator=marloo"],
        ),
        (
            ["rollout.joint_mode=crossed", "rollout.group_size=2", "rollout.crossed_pairs=4"],
            "rollout.crossed_pairs has",
            ["rollout.crossed_pairs=2"],
        ),
        (["rollout.keep_support=true"], "rollout.keep_support has", ["rollout.top_p=0.9"]),
        (
            ["agents.0.weights=full", "agents.1.weights=full", "lora.rank=8", "lora.alpha=8"],
            "lora.rank, lora.alpha have",
            ["agents.0.weights=lora"],
        ),
        (["algo.estimator=iac", "critic.gae_lambda=0.5"], "critic.gae_lambda has", ["env.num_turns=2"]),
        (["rollout.max_draws=2"], "rollout.max_draws has", ["rollout.probe_size=2"]),
        (["agents.0.lr=1e-3", "agents.1.lr=1e-4"], "optim.lr has", ["agents.0.lr=none"]),
        (["agents.0.trained=false", "agents.0.lr=1e-3"], "agents.h.lr has", ["agents.0.trained=true"]),
    ],
)
def test_options_without_effect_are_warned_about_until_the_remedy(
    path: Path, overrides: list[str], unused: str, remedy: list[str]
) -> None:
    [warning] = list_config_warnings(load_config(path, overrides))
    assert warning.startswith(f"{unused} no effect, because ")
    assert list_config_warnings(load_config(path, [*overrides, *remedy])) == []


@pytest.mark.parametrize(
    ("name", "overrides", "unused"),
    [
        ("embedded", ["algo.siblings=agent_turn"], "algo.siblings has"),
        ("sequential", ["rollout.joint_mode=crossed"], "rollout.joint_mode has"),
        (
            "sequential",
            ["rollout.termination_threshold=1.9", "eval.stop_above=1.9"],
            "rollout.termination_threshold, eval.stop_above have",
        ),
        ("embedded_program", ["rollout.leave_out_long=true"], "rollout.leave_out_long has"),
        ("embedded", ["algo.loss=madpo", "reward.local_weight=0.5"], "reward.local_weight has"),
    ],
)
def test_options_that_an_example_has_no_use_for_are_warned_about(name: str, overrides: list[str], unused: str) -> None:
    [warning] = list_config_warnings(load_config(f"pipelines/configs/{name}.toml", overrides))
    assert warning.startswith(f"{unused} no effect, because ")


def test_a_temperature_that_vllm_would_raise_is_refused(path: Path) -> None:
    """It samples at 0.01 instead, while the update would divide by the temperature given."""
    assert load_config(path, ["rollout.temperature=0.01"]).rollout.temperature == 0.01
    with pytest.raises(ConfigError, match=r"rollout.temperature: .* 0.01, got"):
        load_config(path, ["rollout.temperature=0.009"])


def test_no_discount_is_refused_where_an_agent_acts_later_only() -> None:
    with pytest.raises(ConfigError, match=r"algo\.gamma = 0 trains the first turn only .* not every agent acts"):
        load_config("pipelines/configs/sequential.toml", ["algo.gamma=0"])


def test_agents_that_share_weights_have_one_learning_rate(path: Path) -> None:
    shared = ["agents.0.weights=shared", "agents.1.weights=shared"]
    load_config(path, [*shared, "agents.0.lr=1e-3", "agents.1.lr=1e-3"])
    with pytest.raises(ConfigError, match="share weights; give both the same lr"):
        load_config(path, [*shared, "agents.0.lr=1e-3"])


def test_agents_that_share_weights_start_together(path: Path) -> None:
    """Or one would act with weights that its configuration does not name."""
    shared = ["agents.0.weights=shared", "agents.1.weights=shared"]
    for agent in ("h", "m"):
        with pytest.raises(ConfigError, match=r"'h' and 'm' share weights; give both a start_from, or neither"):
            load_config(path, [*shared, f"agents.{agent}.start_from=w/{agent}"])
    load_config(path, [*shared, "agents.h.start_from=w/h", "agents.m.start_from=w/m"])
    load_config(path, [*shared, "registry.model=m", "registry.continue_from_champion=true"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: no such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "embedded.toml").write_text("")
    with pytest.raises(ConfigError, match=r"embeded.toml: no such file; did you mean .*/embedded.toml\?"):
        load_config(tmp_path / "embeded.toml")
    (tmp_path / "bad.toml").write_text("[optim\n")
    with pytest.raises(ConfigError, match=r"bad.toml: cannot be read as TOML"):
        load_config(tmp_path / "bad.toml")
    for text in (f"a = {'[' * 10**5}", f"a = {'9' * 5000}", "a = '\xff'"):
        (tmp_path / "bad.toml").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"bad.toml: cannot be read as TOML"):
            load_config(tmp_path / "bad.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(ConfigError, match="agents: is required"):
        load_config(tmp_path / "empty.toml")


def test_registry_resolves_names_and_dotted_paths() -> None:
    table = {"listed": "tests.plugins:ListedProblems"}
    assert (
        import_plugin(table, "listed") is import_plugin(table, "tests.plugins:ListedProblems") is plugins.ListedProblems
    )
    listed = "tests.plugins:ListedProblems"
    assert build_plugin("problems", {"kind": listed, "size": 2}) == plugins.ListedProblems(kind=listed, size=2)
    with pytest.raises(ValueError, match="needs a key 'kind'"):
        build_plugin("problems", {})


def test_a_lag_needs_an_importance_cap(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.lag = 1 trains .* algo.importance_cap = 2") as caught:
        load_config(path, ["train.lag=1"])
    assert "\n" not in str(caught.value)
    assert load_config(path, ["train.lag=1", "algo.importance_cap=2"]).train.lag == 1


def test_the_password_of_mlflow_is_shown_nowhere(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["tracking.uri=https://alice:hunter2@example.org", f"root={tmp_path}"])
    store = RunStore.create(config, "mine")
    assert store.config().tracking.uri == "https://alice:hunter2@example.org"
    shown: list[Any] = [flatten_config(config), read_flat_config(store.path)]
    assert [flat["tracking.uri"] for flat in shown] == ["https://***@example.org"] * 2
    assert "tracking.uri = https://***@example.org (default None)" in format_changed_values(config)
    assert "hunter2" not in config.resolved()
