"""Every option of the algorithm in a small run: what it adds is there, all figures are finite, the weights move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.plugins import Plugin
from magrpo.types import Execution, ExecutionReport, JointReward, Problem
from tests.pipelines.micro import run_locally, write_config

SHORT = ["train.num_iterations=2", "eval.max_problems=1", "eval.num_samples=1"]


class PassAlone(Plugin):
    """1 for a program that passes."""

    maxima: Mapping[str, float] = {"tests": 1.0}

    def executions(
        self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]
    ) -> Mapping[str, Execution]:
        return {} if reports else {"program": Execution(texts["solo"], "f", problem.test)}

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        value = float(reports["program"].status == "pass")
        return JointReward(value, {"tests": value})

    def fraction(self, total: float) -> float:
        return total

    def passed(self, reports: Mapping[str, ExecutionReport]) -> bool:
        return reports["program"].status == "pass"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("variants"))


def metrics_of(config: Path, *overrides: str) -> dict[str, float]:
    """What the last iteration of a run reports; the run is checked."""
    resolved = load_config(config, [*SHORT, *overrides])
    store, tracker, _ = run_locally(resolved)
    assert all(math.isfinite(value) for _, metrics in tracker.history for value in metrics.values())
    for agent in resolved.agents:
        weights = [
            store.path / f"stages/{i:05d}/update/weights/{agent.name}/adapter_model.safetensors" for i in (0, 1, 2)
        ]
        assert len({path.read_bytes() for path in weights}) > 1, f"the weights of {agent.name} stayed as they were"
    return {key: value for step, metrics in tracker.history for key, value in metrics.items() if step == 2}


@pytest.mark.parametrize(
    ("estimator", "norm"),
    [("marloo", "token_mean"), ("maremax", "dr_grpo"), ("mareinforce", "sequence_sum")],
)
def test_estimators_and_loss_norms(config: Path, estimator: str, norm: str) -> None:
    metrics = metrics_of(config, f"algo.estimator={estimator}", f"algo.loss_norm={norm}")
    assert metrics["credit/main/advantage_std"] > 0
    assert "update/main/clip_frac" not in metrics
    assert "credit/main/influence" not in metrics


def test_normalize(config: Path) -> None:
    assert metrics_of(config, "algo.normalize=std")["credit/main/advantage_std"] <= 1 + 1e-6


def test_gamma_over_two_turns(config: Path) -> None:
    metrics = metrics_of(config, "env.num_turns=2", "rollout.tree=full", "rollout.branching=2", "algo.gamma=0.5")
    first, second = metrics["reward/joint_turn_1"], metrics["reward/joint_turn_2"]
    assert first < metrics["reward/return"] <= first + 0.5 * 2.0
    assert second > 0


@pytest.mark.parametrize(("pairs", "joint_actions"), [("", 16), ("rollout.crossed_pairs=8", 8)])
def test_crossed(config: Path, pairs: str, joint_actions: int) -> None:
    metrics = metrics_of(config, "rollout.joint_mode=crossed", *filter(None, [pairs]))
    assert metrics["rollout/joint_actions"] == 2 * joint_actions  # two problems
    assert 0 <= metrics["credit/main/influence"] <= 1


def test_beta_and_the_importance_cap(config: Path) -> None:
    assert metrics_of(config, "algo.beta=0.1", "algo.importance_cap=2.0")["update/main/kl"] > 0


def test_a_kept_support_leaves_no_gap_between_engine_and_trainer(config: Path) -> None:
    assert metrics_of(config, "rollout.top_p=0.7", "rollout.keep_support=true")["update/main/sampling_gap"] < 1e-4


def test_one_adapter_for_both_agents(config: Path) -> None:
    metrics = metrics_of(config, "agents.0.weights=shared", "agents.1.weights=shared")
    first, second = (agent.name for agent in load_config(config).agents)
    assert metrics[f"update/{first}/tokens"] > 0
    assert f"update/{second}/tokens" not in metrics


def test_several_epochs_clip(config: Path) -> None:
    metrics = metrics_of(config, "algo.update_epochs=3", "algo.clip_low=0.01", "algo.clip_high=0.01", "optim.lr=0.05")
    assert metrics["update/main/clip_frac"] > 0


def test_several_epochs_clip_whole_completions(config: Path) -> None:
    clip = ["algo.ratio=sequence", "algo.clip_low=0.001", "algo.clip_high=0.001"]
    metrics = metrics_of(config, "algo.update_epochs=3", *clip, "algo.loss_norm=sequence_mean", "optim.lr=0.05")
    assert metrics["update/main/clip_frac"] > 0


def test_one_agent_is_trained_by_the_same_code(config: Path) -> None:
    text = config.read_text()
    first, second = text.index("[[agents]]"), text.rindex("[[agents]]")
    alone = config.with_name("alone.toml")
    text = text[:first] + text[second:].replace('"main"', '"solo"')
    text = text.replace('tests.plugins:Env"', 'solo"\nprompt = "bare"').replace(
        "tests.plugins:Reward", f"{__name__}:PassAlone"
    )
    alone.write_text(text)
    metrics = metrics_of(alone)
    assert metrics["rollout/joint_actions"] == 2 * 4
    assert metrics["update/solo/grad_norm"] >= 0
