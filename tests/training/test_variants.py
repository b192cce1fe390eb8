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


def metrics_of_one_step(config: Path, estimator: str, norm: str, *overrides: str) -> dict[str, float]:
    """As :func:`metrics_of`; without the metrics of several epochs, of crossing and of a lag."""
    metrics = metrics_of(config, f"algo.estimator={estimator}", f"algo.loss_norm={norm}", *overrides)
    assert metrics["credit/main/advantage_std"] > 0
    absent = ("clip_frac", "influence", "lag", "importance")
    assert [key for key in metrics if any(part in key for part in absent)] == []
    return metrics


def test_marloo_and_a_mean_over_tokens(config: Path) -> None:
    assert "update/main/kl" not in metrics_of_one_step(config, "marloo", "token_mean")


def test_maremax_and_dr_grpo_with_beta_and_the_importance_cap(config: Path) -> None:
    options = ["algo.beta=0.1", "algo.importance_cap=2.0"]
    assert metrics_of_one_step(config, "maremax", "dr_grpo", *options)["update/main/kl"] > 0


def test_mareinforce_and_sums_with_a_kept_support_which_leaves_no_gap_between_engine_and_trainer(config: Path) -> None:
    options = ["rollout.top_p=0.7", "rollout.keep_support=true"]
    assert metrics_of_one_step(config, "mareinforce", "sequence_sum", *options)["update/main/sampling_gap"] < 1e-4


def test_normalize_with_one_adapter_for_both_agents(config: Path) -> None:
    metrics = metrics_of(config, "algo.normalize=std", "agents.0.weights=shared", "agents.1.weights=shared")
    assert metrics["credit/main/advantage_std"] <= 1 + 1e-6
    first, second = (agent.name for agent in load_config(config).agents)
    assert metrics[f"update/{first}/tokens"] > 0
    assert f"update/{second}/tokens" not in metrics


def test_crossed_pairs(config: Path) -> None:
    metrics = metrics_of(config, "rollout.joint_mode=crossed", "rollout.crossed_pairs=8")
    assert metrics["rollout/joint_actions"] == 2 * 8  # two problems
    assert 0 <= metrics["credit/main/influence"] <= 1


def test_several_epochs_clip_and_gamma_over_two_turns(config: Path) -> None:
    clip = ["algo.update_epochs=3", "algo.clip_low=0.01", "algo.clip_high=0.01", "optim.lr=0.05"]
    tree = ["env.num_turns=2", "rollout.tree=full", "algo.gamma=0.5"]
    metrics = metrics_of(config, *clip, *tree)
    assert metrics["update/main/clip_frac"] > 0
    first, second = metrics["reward/joint_turn_1"], metrics["reward/joint_turn_2"]
    assert first < metrics["reward/return"] <= first + 0.5 * 2.0
    assert second > 0


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
