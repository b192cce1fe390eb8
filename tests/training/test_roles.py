"""Runs in which agents differ: in when they act, in what they start from, and in whether and how fast they train."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.planning.sizes import estimate_memory, estimate_work
from magrpo.run.files import read_scored
from magrpo.run.store import RunStore, read_records
from magrpo.types import RolloutGroup, Sample, ScoredTurn
from tests.memory_tracker import MemoryTracker
from tests.pipelines.micro import run_locally, write_config
from tests.tiny import tiny_base, tiny_config

CONFIGS = Path(__file__).parents[2] / "pipelines" / "configs"
TURNS = "env.kind=tests.plugins:TakingTurns"
SMALL = ["train.num_iterations=1", "rollout.problems_per_iteration=2", "eval.max_problems=1", "eval.num_samples=1"]
SMALL += ["problems.num_train=3", "problems.num_test=3", "problems.num_ood=3"]
SMALL += ["sandbox.test_s=5.0", "sandbox.total_s=10.0"]


def run(config: RunConfig) -> tuple[RunStore, MemoryTracker]:
    store, tracker, _ = run_locally(config)
    return store, tracker


def scored(store: RunStore, turn: int) -> list[RolloutGroup[ScoredTurn]]:
    return read_scored(store.path / f"stages/00001/score.{turn}")


def adapter(store: RunStore, iteration: int, agent: str) -> bytes:
    return (store.path / f"stages/{iteration:05d}/update/weights/{agent}/adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("tree", "following"), [pytest.param("chains", 1, marks=pytest.mark.slow), ("full", 4)])
def test_agents_of_two_bases_take_turns(tmp_path: Path, tree: str, following: int) -> None:
    other = tiny_base(tmp_path / "other", tiny_config("qwen2", hidden_size=96, max_length=64))
    overrides = [TURNS, f"agents.0.model={other}", f"rollout.tree={tree}"]
    store, tracker = run(load_config(write_config(tmp_path, 1), overrides))
    first, second = scored(store, 0), scored(store, 1)
    assert {tuple(group.actions) for group in first} == {("helper",)}
    assert {tuple(group.actions) for group in second} == {("main",)}
    assert (len(first), len(second)) == (2, 2 * 4)
    for agent, number in (("helper", 2 * 4), ("main", 2 * 4 * following)):
        samples = read_records(store.path / f"stages/00001/credit/{agent}.jsonl.gz", Sample)
        assert len(samples) == number
        assert any(sample.advantage for sample in samples)
        assert adapter(store, 0, agent) != adapter(store, 1, agent)
    assert len(adapter(store, 0, "helper")) > len(adapter(store, 0, "main"))
    assert "naive concatenation" not in (store.path / "stages/00001/report/report.html").read_text()
    metrics = tracker.history[1][1]
    assert metrics["reward/return"] == pytest.approx(metrics["reward/joint"])  # the first turn has no price


def test_a_frozen_agent_acts_and_never_moves(tmp_path: Path) -> None:
    store, tracker = run(load_config(write_config(tmp_path, 1), ["agents.0.trained=false", "agents.1.lr=0.02"]))
    assert {tuple(group.actions) for group in scored(store, 0)} == {("helper", "main")}
    assert adapter(store, 0, "helper") == adapter(store, 1, "helper")
    assert adapter(store, 0, "main") != adapter(store, 1, "main")
    metrics = tracker.history[1][1]
    assert (metrics["update/lr"], metrics["update/main/lr"]) == (0.01, 0.02)
    assert not [key for key in metrics if key.startswith("update/helper/")]
    assert metrics["credit/helper/advantage_std"] > 0


@pytest.mark.parametrize(("name", "num_turns"), [pytest.param("sequential", 2, marks=pytest.mark.slow), ("team", 1)])
def test_a_run_of_each_example(tmp_path: Path, name: str, num_turns: int) -> None:
    config = load_config(CONFIGS / f"{name}.toml", [f"root={tmp_path}", *SMALL])
    store, tracker = run(config)
    assert config.env.num_turns == num_turns
    last = scored(store, num_turns - 1)
    reports = [report for group in last for turn in group.turns for report in turn.reports.values()]
    assert any(report.status == "pass" for report in reports), "the base writes programs that work"
    assert all(turn.reward.parts.keys() == config.reward.maxima.keys() for group in last for turn in group.turns)
    for agent in config.agents:
        assert adapter(store, 0, agent.name) != adapter(store, 1, agent.name)
    assert 0 < tracker.history[1][1]["eval/return"] <= 1


def test_the_plan_counts_those_who_act_and_those_who_train(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    work = estimate_work(load_config(path, [TURNS]))
    # 2 problems, 4 completions of the helper each; after each of them one of main, or 4
    assert (work.completions, work.joint_actions) == (2 * 4 + 8, 2 * 4 + 8)
    work = estimate_work(load_config(path, [TURNS, "rollout.tree=full"]))
    assert (work.completions, work.joint_actions) == (2 * 4 + 8 * 4, 2 * 4 + 8 * 4)
    both, one = (estimate_memory(load_config(path, extra), 4, None) for extra in ((), ["agents.0.trained=false"]))
    assert both["optimizer"] == 2 * one["optimizer"]
    assert both["adapters"] == one["adapters"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with pytest.raises(ConfigError, match="none is trained; set trained = true"):
        load_config(path, ["agents.0.trained=false", "agents.1.trained=false"])
    with pytest.raises(ConfigError, match=r"the roles that act in its 1 turns are \['helper'\]"):
        load_config(path, [TURNS, "env.num_turns=1"])
