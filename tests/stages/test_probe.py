"""Probes: the same for the same weights, others for others, and read back from beside the weights."""

from pathlib import Path

import pytest
import torch

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.engines.probes import NUM_TOKENS, TOLERANCES, read_probe
from magrpo.model.policy import Policy
from magrpo.stages.probe import compute_probes, write_probes
from tests.tiny import perturb, tiny_base


def open_policy(folder: Path) -> Policy:
    base = str(tiny_base(folder / "base"))
    agents = [AgentConfig(name="helper", role="helper", model=base), AgentConfig(name="main", role="main", model=base)]
    return Policy.open(agents, ModelConfig(device="cpu"), LoraConfig(rank=4), seed=0)


def test_probes_tell_versions_and_agents_apart(tmp_path: Path) -> None:
    policy = open_policy(tmp_path)
    base = compute_probes(policy)
    assert base["helper"].logps == base["main"].logps, "untrained adapters change nothing"
    perturb(policy, seed=1, scale=0.01)
    trained = compute_probes(policy)
    folders = policy.save(tmp_path / "weights")
    write_probes(tmp_path / "weights", trained)
    assert compute_probes(policy) == trained
    for agent, other in (("helper", "main"), ("main", "helper")):
        probe = read_probe(folders[agent])
        assert probe == trained[agent]
        assert probe.measure_gap(base[agent].logps) > TOLERANCES["float32"]
        assert probe.measure_gap(trained[other].logps) > TOLERANCES["float32"]


def test_log_probabilities_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    policy = open_policy(tmp_path)
    probe = compute_probes(policy)["main"]
    assert len(probe.token_ids) == len(probe.logps) == NUM_TOKENS
    with policy.active("main") as model, torch.no_grad():
        logits = model(input_ids=torch.tensor([probe.prompt_ids + probe.token_ids])).logits[0]
    for i, (token, logp) in enumerate(zip(probe.token_ids, probe.logps, strict=True)):
        row = logits[len(probe.prompt_ids) - 1 + i]
        assert logp == pytest.approx(float(row[token] - row.logsumexp(-1)), abs=1e-5)


def test_a_number_that_is_none_is_an_infinite_gap(tmp_path: Path) -> None:
    probe = compute_probes(open_policy(tmp_path))["main"]
    assert probe.measure_gap(probe.logps) == 0
    assert probe.measure_gap([float("nan"), *probe.logps[1:]]) == float("inf")


def test_weights_without_probes_have_none(tmp_path: Path) -> None:
    (tmp_path / "weights" / "main").mkdir(parents=True)
    assert read_probe(tmp_path / "weights" / "main") is None
    write_probes(tmp_path / "weights", {})
    assert read_probe(tmp_path / "weights" / "main") is None
