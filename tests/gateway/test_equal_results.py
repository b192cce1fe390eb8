"""The example on one page trains every agent, and the embedded task as a program gives the same bits."""

from pathlib import Path

import pytest

import magrpo
from magrpo.config.run import RunConfig, load_config
from magrpo.training.one_iteration import CONFIG, run_once
from magrpo.types import Sample

CONFIGS = CONFIG.parent
SMALL = ["engine.kind=transformers", "rollout.problems_per_iteration=6", "eval.max_problems=2"]


def load(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.toml", [*SMALL, *overrides])


def facts(sample: Sample) -> tuple[object, ...]:
    """Everything that the update reads of a sample, but for how it counts."""
    return (
        *(sample.prompt_ids, sample.completion_ids, sample.sampling_logps),
        *(sample.returns, sample.advantage, sample.group, sample.policy_version, sample.weight),
    )


def test_samples_and_first_update_are_those_of_the_built_in_environment(capsys: pytest.CaptureFixture[str]) -> None:
    built_in = run_once(load("embedded", "rollout.joint_mode=aligned"))
    moved = capsys.readouterr().out
    assert f"mean joint reward {built_in.metrics['reward/joint']:.3f}" in moved
    for agent in ("helper", "main"):
        assert built_in.metrics[f"update/{agent}/grad_norm"] > 0
        assert f"{agent}: groups without signal" in moved
    # A batch that waits a second holds all requests, also on a busy machine: log-probabilities then have the same bits.
    program = run_once(load("embedded_program", "env.batch_wait_s=1.0"))
    assert capsys.readouterr().out == moved, "the joint reward, and how far the weights moved"
    assert built_in.samples.keys() == program.samples.keys()
    for agent, samples in built_in.samples.items():
        assert list(map(facts, program.samples[agent])) == list(map(facts, samples))
        assert {sample.counts for sample in program.samples[agent]} == {1.0}
    shared = built_in.metrics.keys() & program.metrics.keys()
    assert built_in.metrics.keys() <= program.metrics.keys()
    assert {key: program.metrics[key] for key in shared} == {key: built_in.metrics[key] for key in shared}


@pytest.mark.slow
def test_returns_of_a_run_are_those_of_the_built_in_environment(tmp_path: Path) -> None:
    returns = []
    for name in ("embedded", "embedded_program"):
        config = load(name, "rollout.joint_mode=aligned", "train.num_iterations=4", f"root={tmp_path}")
        run = magrpo.train_run(config, name)
        metrics = run.read_metrics()
        returns.append((metrics["reward/joint"].dropna().tolist(), run.read_evaluations()["mean"].tolist()))
    assert returns[0] == returns[1]
