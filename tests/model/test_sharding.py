"""Models spread over ranks, here over one: what FSDP2 does to them, and what a checkpoint of them holds."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.config.sections import AlgoConfig, OptimConfig, RolloutConfig
from magrpo.errors import ConfigError
from magrpo.model.lineup import Lineup
from magrpo.model.policy import Policy
from magrpo.model.sharding import Shards, gather_tensor
from magrpo.run.files import OPTIMIZER_SHARDS
from magrpo.updates.memory_fitting import MicroBatchTooLarge
from magrpo.updates.updater import Updater
from tests.tiny import unmarked_base
from tests.updates.updating import (
    assert_close,
    assert_equal,
    before_each_pass,
    compute_gradient,
    make_samples,
    run_out_of_memory,
)


@pytest.fixture
def shards() -> Iterator[Shards]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Shards(init_device_mesh("cpu", (1,)), torch.device("cpu"))
    dist.destroy_process_group()


def open_updater(
    base: Path,
    dump: Path,
    weights: str,
    shards: Shards | None = None,
    *,
    again: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Updater:
    """One agent with a KL term and two epochs, so that every kind of forward pass happens."""
    agent = AgentConfig.model_validate({"name": "main", "role": "main", "model": str(base), "weights": weights})
    lineup = Lineup.open([agent], ModelConfig(device="cpu", dtype=dtype), LoraConfig(rank=4))
    return Updater(
        Policy.of(lineup, 0, shards),
        AlgoConfig(beta=0.1, update_epochs=2),
        OptimConfig(lr=1e-3, micro_batch_tokens=40, gradient_checkpointing=again),
        RolloutConfig(max_new_tokens=16),
        10,
        dump,
    )


def read_state(updater: Updater) -> dict[str, torch.Tensor]:
    """Whole weights and optimizer states."""
    optimizer, found = updater.optimizers["main"], {}
    for name, parameter in updater.policy.parameters("main").items():
        found[name] = gather_tensor(parameter.detach())
        found |= {f"{name} {key}": gather_tensor(value) for key, value in optimizer.state[parameter].items()}
    return found


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_spread_models_are_trained_and_kept_like_whole_ones(
    base: Path, tmp_path: Path, shards: Shards, weights: str
) -> None:
    whole, spread = (open_updater(base, tmp_path, weights, shards=over) for over in (None, shards))
    first, second = ({"main": make_samples(seed)} for seed in (1, 2))
    expected = compute_gradient(whole, "main", first["main"])
    assert_close(compute_gradient(spread, "main", first["main"]), expected)
    for updater, name in ((whole, "whole"), (spread, "spread")):
        updater.update(first)
        updater.save(tmp_path / name)
    assert (tmp_path / "spread" / OPTIMIZER_SHARDS / "main").exists() == (weights == "full")
    assert_close(read_state(whole), read_state(spread))
    for name in ("whole", "spread"):
        whole.load(tmp_path / name)
        spread.load(tmp_path / name)
        assert_equal(read_state(whole), read_state(spread))
    assert whole.update(second) == pytest.approx(spread.update(second), rel=1e-4)
    with spread.policy.active("main") as model:
        layers = [p for name, p in model.named_parameters() if ".layers." in name and ".lora_" not in name]
    assert all(isinstance(parameter, DTensor) for parameter in layers)


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_layers_of_spread_models_are_computed_again(base: Path, tmp_path: Path, shards: Shards, weights: str) -> None:
    whole, spread = (open_updater(base, tmp_path, weights, over, again=over is not None) for over in (None, shards))
    samples = make_samples(1)
    assert_close(compute_gradient(spread, "main", samples), compute_gradient(whole, "main", samples))


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_references_of_spread_models_are_those_of_whole_ones_in_half_precision(
    base: Path, tmp_path: Path, shards: Shards, weights: str
) -> None:
    whole, spread = (open_updater(base, tmp_path, weights, over, dtype="bfloat16") for over in (None, shards))
    samples = make_samples(1)
    unmoved = [replace(sample, advantage=0.0) for sample in samples]
    for updater in (whole, spread):
        gradients = compute_gradient(updater, "main", unmoved).values()
        assert not any(gradient.any() for gradient in gradients), "the KL term is 0"
    expected, found = (compute_gradient(updater, "main", samples) for updater in (whole, spread))
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=2e-2, atol=2e-2 * float(expected[name].abs().max()))


def test_an_untrained_checkpoint_has_no_optimizer_state(base: Path, tmp_path: Path, shards: Shards) -> None:
    spread = open_updater(base, tmp_path, "full", shards)
    spread.save(tmp_path / "0")
    spread.update({"main": make_samples(1)})
    spread.load(tmp_path / "0")
    assert not spread.optimizers["main"].state


def test_a_rank_without_memory_says_which_micro_batch_to_try(base: Path, tmp_path: Path, shards: Shards) -> None:
    spread = open_updater(base, tmp_path, "lora", shards)
    with before_each_pass(spread, run_out_of_memory), pytest.raises(MicroBatchTooLarge) as caught:
        spread.update({"main": make_samples(1)})
    assert pickle.loads(pickle.dumps(caught.value)).tokens_to_try == 20, "on its way to the driver"


def test_a_model_without_known_layers_is_refused(tmp_path: Path, shards: Shards) -> None:
    model = AutoModelForCausalLM.from_pretrained(unmarked_base(tmp_path / "base"))
    with pytest.raises(ConfigError, match=r'ranks.shard = "base" finds no layers in OpenAIGPTLMHeadModel of .*base'):
        shards.spread_model(model)
