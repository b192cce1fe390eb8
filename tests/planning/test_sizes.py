"""Memory and disk of a run, against what models, updates and engines hold."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest
import torch

from magrpo.config.run import RunConfig, load_config
from magrpo.engines.local.decoding import decoding_model
from magrpo.model.collate import count_padded
from magrpo.model.policy import Policy
from magrpo.planning.sizes import (
    MERGED,
    ROUNDED,
    ROUNDED_SAMPLING,
    count_micro_batch_tokens,
    estimate_disk,
    estimate_memory,
)
from magrpo.types import Sample
from magrpo.updates.lanes import OneRank
from magrpo.updates.memory_fitting import MemoryFitter
from pipelines.arguments import locate_config
from tests.tiny import tiny_base, tiny_config
from tests.updates.updating import make, saved_sizes


def embedded(base: Path, *overrides: str, weights: tuple[str, str] = ("lora", "lora")) -> RunConfig:
    """The embedded run on a CPU with this base model and these weights of its two agents."""
    agents = [f"agents.{i}.{value}" for i in (0, 1) for value in (f"model={base}", f"weights={weights[i]}")]
    return load_config(locate_config("embedded"), [*agents, "model.device=cpu", *overrides])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [True, False])
def test_references_of_full_copies_are_as_large_as_estimated(tmp_path: Path, tie: bool, dtype: str) -> None:
    base = tiny_base(tmp_path, tiny_config("qwen2", tie=tie))
    config = embedded(base, "algo.beta=0.1", f"model.dtype={dtype}", weights=("full", "full"))
    policy = Policy.open(config.agents, config.model, config.lora, seed=0)
    with policy.reference("main") as model:
        held = sum(parameter.nbytes for parameter in model.parameters())
    assert estimate_memory(config, policy.dtype.itemsize, None)["frozen parameters"] == held


@pytest.mark.parametrize("weights", [("lora", "full"), ("full", "lora")])
def test_an_adapter_beside_a_full_copy_of_its_base_is_counted(base: Path, weights: tuple[str, str]) -> None:
    config = embedded(base, weights=weights)
    policy = Policy.open(config.agents, config.model, config.lora, seed=0)
    own = {
        policy.lineup.weights(agent): sum(p.numel() for p in policy.parameters(agent).values())
        for agent in policy.agents
    }
    sizes = estimate_memory(config, 4, None)
    assert sizes["adapters"] == 4 * own["lora"]
    assert sizes["full copies"] == 4 * own["full"]
    assert sizes["optimizer"] == 8 * sum(own.values())
    checkpoints = config.train.num_iterations + 1
    assert (
        estimate_disk(config, copies=False)[f"weights of {checkpoints} checkpoints"]
        == 4 * sum(own.values()) * checkpoints
    )


@pytest.mark.parametrize("tie", [True, False])
def test_half_precision_weights_that_autocast_keeps_are_counted(tmp_path: Path, tie: bool) -> None:
    base = tiny_base(tmp_path / "base", tiny_config(tie=tie))
    updater = make(base, tmp_path, "full", "bfloat16")
    kept = []
    for length in (16, 32):
        with saved_sizes(updater, "main") as saved, updater.policy.active("main") as model:
            logits = model(input_ids=torch.arange(length)[None], use_cache=False).logits
        assert logits.requires_grad
        kept.append(sum(saved.values()))
    at_length_0 = 2 * kept[0] - kept[1]
    sizes = estimate_memory(embedded(base, weights=("full", "full")), 2, 8)
    assert sizes[ROUNDED] == pytest.approx(at_length_0, rel=0.02)
    assert sizes[ROUNDED_SAMPLING] == 2 * sizes[ROUNDED], "a CPU samples both agents side by side"
    mixed = estimate_memory(embedded(base, weights=("lora", "full")), 2, 8)
    assert mixed[ROUNDED_SAMPLING] == mixed[ROUNDED] == sizes[ROUNDED]
    for others in (
        estimate_memory(embedded(base), 2, 8),
        estimate_memory(embedded(base, weights=("full", "full")), 4, 8),
    ):
        assert not {ROUNDED, ROUNDED_SAMPLING} & others.keys()


@pytest.mark.parametrize("weights", ["lora", "shared"])
def test_merged_copies_are_counted_for_each_agent_that_is_decoded(
    base: Path, weights: Literal["lora", "shared"]
) -> None:
    config = embedded(base, weights=(weights, weights))
    policy = Policy.open(config.agents, config.model, config.lora, seed=0)
    with ExitStack() as models:
        entered = [models.enter_context(decoding_model(policy, agent)) for agent in policy.agents]
        tensors = {p.data_ptr(): p.nbytes for model in entered for p in model.parameters()}
        with policy.active("main") as model:
            shared = {p.data_ptr() for p in model.parameters()}
        held = sum(nbytes for address, nbytes in tensors.items() if address not in shared)
    assert estimate_memory(config, 4, 8)[MERGED] == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(("prompt", "completion", "micro_batch_tokens"), [(100, 4, 1024), (5, 40, 256), (300, 16, 128)])
def test_micro_batches_are_no_larger_than_counted(
    base: Path, prompt: int, completion: int, micro_batch_tokens: int, lanes: int, share: bool
) -> None:
    given = [f"rollout.max_new_tokens={completion}", f"optim.micro_batch_tokens={micro_batch_tokens}"]
    config = embedded(base, "rollout.problems_per_iteration=2", "rollout.group_size=4", f"optim.lanes={lanes}", *given)
    samples = [
        Sample((3 + group,) * prompt, (3,) * completion, (0.0,) * completion, 1.0, 1.0, group, 0)
        for group in range(2)
        for _ in range(4)
    ]
    policy = Policy.open(config.agents, config.model, config.lora, seed=0)
    batches = MemoryFitter(policy, config.optim, OneRank(), {"main": share}).plan_micro_batches("main", samples)
    counted = count_micro_batch_tokens(config, prompt)
    largest = max(count_padded(samples, rows) for rows in batches)
    assert largest <= counted <= max(micro_batch_tokens, prompt + completion)
    if not share:
        assert counted < 2 * largest


@pytest.mark.parametrize(("device", "rows"), [("cpu", 2**24 // 32_000), ("cuda", 4096)])
def test_logits_are_counted_in_the_chunks_of_the_device(tmp_path: Path, device: str, rows: int) -> None:
    base = tiny_base(tmp_path, tiny_config(vocab_size=32_000))
    config = embedded(base, f"model.device={device}", "optim.micro_batch_tokens=4096")
    assert count_micro_batch_tokens(config) == 4096
    at_once = min(2, torch.get_num_threads()) if device == "cpu" else 1
    assert estimate_memory(config, 4, None)["logits"] == at_once * rows * 32_000 * 4
