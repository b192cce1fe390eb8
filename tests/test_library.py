"""The library for notebooks: what it refuses, and what it reads from a run. The notebook's test runs the rest."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from types import MappingProxyType

import pytest

import magrpo
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.types import Problem
from tests.asking.runs import make_run
from tests.pipelines.micro import blank_pictures, write_config


@pytest.fixture
def config(tmp_path: Path) -> magrpo.RunConfig:
    return magrpo.load_config(write_config(tmp_path))


def test_every_name_of_the_package_is_one_of_the_library() -> None:
    from magrpo import library

    assert all(getattr(magrpo, name) is getattr(library, name) for name in magrpo.__all__)
    assert set(magrpo.__all__) <= set(dir(magrpo))
    with pytest.raises(AttributeError, match="has no attribute 'train_runs'"):
        magrpo.train_runs  # noqa: B018


def test_the_example_of_build_config_builds_one() -> None:
    names: dict[str, object] = {"build_config": magrpo.build_config}
    for example in doctest.DocTestParser().get_examples(magrpo.build_config.__doc__ or ""):
        exec(example.source, names)
    assert isinstance(names["config"], magrpo.RunConfig)


def test_overrides_leave_the_dictionaries_of_the_caller_alone(config: magrpo.RunConfig) -> None:
    sections = json.loads(config.resolved(secrets=True))
    sections |= {"agents": tuple(sections["agents"]), "train": MappingProxyType(sections["train"])}
    changed = magrpo.build_config(sections, ["agents.helper.lr=0.5", "agents.1.lr=0.25", "train.num_iterations=77"])
    assert [agent.lr for agent in changed.agents] == [0.5, 0.25]
    assert changed.train.num_iterations == 77
    assert magrpo.build_config(sections) == config


def test_a_joint_action_has_a_price_and_needs_every_role(config: magrpo.RunConfig) -> None:
    problem = Problem("t", "p", "f", "test")
    scored = magrpo.price_joint_action(config, problem, {"helper": "a", "main": "b"})
    assert not scored.masked
    with pytest.raises(magrpo.ConfigError, match="needs one for each role helper, main; got helper"):
        magrpo.price_joint_action(config, problem, {"helper": "a"})


def test_the_agents_of_a_run_are_asked(tmp_path: Path) -> None:
    store = make_run(write_config(tmp_path), tmp_path / "runs")
    run = magrpo.open_run(store.path)
    answer = run.ask_agents("p1", iteration=0, seed=2)
    assert list(answer.texts) == ["helper", "main"]
    assert answer.problem.prompt == "p1"
    assert run.ask_agents(answer.problem, seed=2).texts != answer.texts
    with pytest.raises(magrpo.ConfigError, match="run run has no weights of checkpoint 5; choose one of 0 to 1"):
        run.ask_agents("p", iteration=5)


def test_metrics_are_one_row_for_each_iteration_with_times_summed_over_turns(config: magrpo.RunConfig) -> None:
    store = RunStore.create(config, "run")

    def commit_turn(turn: int, seconds: float, tokens: float) -> None:
        metrics = {"time/rollout_s": seconds, "rollout/tokens": tokens}
        store.commit(Step("rollout", 1, str(turn)).output, "key", lambda _: metrics)

    for turn in range(9):
        commit_turn(turn, 0.0, 5.0)
    commit_turn(9, 1.0, 5.0)
    commit_turn(10, 2.0, 7.0)
    metrics = magrpo.open_run(store.path).read_metrics()
    assert metrics.index.tolist() == [1]
    assert metrics.loc[1].to_dict() == {"time/rollout_s": 3.0, "rollout/tokens": 7.0}


def test_what_is_not_there_is_refused(config: magrpo.RunConfig, tmp_path: Path) -> None:
    with pytest.raises(magrpo.ConfigError, match="no run 'none'"):
        magrpo.open_run(tmp_path / "none")
    run = magrpo.open_run(RunStore.create(config, "run").path)
    with pytest.raises(magrpo.ConfigError, match="no evaluation after iteration None; there are: none"):
        run.read_answers()
    with pytest.raises(magrpo.ConfigError, match="iteration 3 has not been trained"):
        run.read_joint_actions(3)
    other = config.model_copy(update={"train": config.train.model_copy(update={"seed": 9})})
    with pytest.raises(magrpo.ConfigError, match="run run has another configuration"):
        magrpo.train_run(other, "run")


def test_an_engine_needs_the_weights_of_the_whole_team(config: magrpo.RunConfig, tmp_path: Path) -> None:
    """Engines differ in the weights of an agent that is left out, and some ignore a name that they do not know."""
    refused = pytest.raises(magrpo.ConfigError, match="a folder for each agent helper, main; got mian, helper")
    with refused, magrpo.open_engine(config, {"mian": tmp_path, "helper": tmp_path}):
        pass


def test_a_new_run_that_is_refused_leaves_its_name_free(config: magrpo.RunConfig) -> None:
    rollout = config.rollout.model_copy(update={"max_new_tokens": 500})
    for _ in range(2):
        with pytest.raises(magrpo.ConfigError, match="max_new_tokens"):
            magrpo.train_run(config.model_copy(update={"rollout": rollout}), "refused")
        assert not (config.root / "refused").exists()


def test_a_run_goes_on_although_it_settled_values_itself(config: magrpo.RunConfig) -> None:
    """It ended early, because its tokens were spent; training it again resumes it, so nothing is left to do."""
    limited = config.model_copy(update={"train": config.train.model_copy(update={"max_tokens": 1})})
    with blank_pictures():
        run = magrpo.train_run(limited, "limited")
        assert run.config.train.num_iterations == 1 < limited.train.num_iterations
        assert magrpo.train_run(limited, "limited").config == run.config
    with pytest.raises(magrpo.ConfigError, match="run new has no checkpoint yet"):
        magrpo.open_run(RunStore.create(config, "new").path).find_weights()


def test_no_name_of_an_agent_hides_a_column(tmp_path: Path) -> None:
    names = ["agents.0.name=return", "agents.1.name=reward"]
    with blank_pictures():
        run = magrpo.train_run(magrpo.load_config(write_config(tmp_path, iterations=1), names), "named")
    answers = run.read_answers()
    assert list(answers.columns) == ["task_id", "split", "mode", "return", "passed", "text/return", "text/reward"]
    assert answers["return"].between(0, 1).all()
    joint_actions = run.read_joint_actions(1)
    assert joint_actions["reward"].map(type).eq(float).all()
    assert joint_actions["text/reward"].map(type).eq(str).all()
