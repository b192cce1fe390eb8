"""Fast decoding steps, without modules or captured, against the model's own forward pass: the same but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, PreTrainedConfig, PreTrainedModel

from magrpo.engines.local.captured_steps import CapturedStep, can_capture
from magrpo.engines.local.decoding import decode_batch, decoding_model, make_step, start_padded
from magrpo.engines.local.llama_steps import LlamaStep
from magrpo.engines.local.steps import DecodingStep, ModuleStep, Prompts
from magrpo.model.policy import Policy
from magrpo.types import Request, SamplingParams
from tests.memory_meter import MemoryMeter
from tests.tiny import VOCAB_SIZE, tiny_config, tiny_policy

NO_STATES = Prompts([], mask=torch.ones(1, 1, dtype=torch.bool), parents=torch.zeros(1, dtype=torch.long))
PADDED, EQUAL = (3, 9, 17, 30), (9, 9, 9, 9)
"""Lengths of prompts."""


def with_biases(config: PreTrainedConfig) -> PreTrainedConfig:
    config.attention_bias = config.mlp_bias = True
    return config


def with_window(config: PreTrainedConfig) -> PreTrainedConfig:
    config.use_sliding_window, config.sliding_window = True, 8
    config.layer_types = ["full_attention", "sliding_attention"]
    return config


class BothSteps(DecodingStep):
    """Takes a fast step and the model's own, compares what they say, and goes on with the model's own."""

    def __init__(self, fast: DecodingStep, model: PreTrainedModel, prompts: Prompts, room: int) -> None:
        self.fast, self.own = fast, ModuleStep(model, prompts, room)
        rounds = model.dtype != torch.float32 or torch.is_autocast_enabled(model.device.type)
        self.tolerance = 0.1 if rounds else 1e-4

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = self.own(tokens, positions)
        torch.testing.assert_close(self.fast(tokens, positions), logits, rtol=1e-3, atol=self.tolerance)
        return logits

    def drop_rows(self, over: Tensor) -> Tensor:
        rows = self.own.drop_rows(over)
        assert torch.equal(self.fast.drop_rows(over), rows)
        return rows


def make_lean_and_own(model: PreTrainedModel, prompts: Prompts, room: int) -> BothSteps:
    fast = make_step(model, prompts, room)
    assert isinstance(fast, LlamaStep)
    return BothSteps(fast, model, prompts, room)


@pytest.mark.parametrize(("rope", "captured"), [("default", True), ("dynamic", False), ("longrope", False)])
def test_embeddings_that_wait_for_the_gpu_are_not_captured(
    rope: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(tmp_path)
    with policy.active("main") as model:
        monkeypatch.setattr(type(model), "device", torch.device("cuda"))
        model.base_model.rotary_emb.rope_type = rope
        assert can_capture(model) == captured


def make_captured_and_own(model: PreTrainedModel, prompts: Prompts, room: int) -> BothSteps:
    """The captured step runs uncaptured on a CPU: with fixed shapes, masks and all that a capture needs."""
    assert can_capture(model) == (model.device.type == "cuda")
    return BothSteps(CapturedStep(model, prompts, room), model, prompts, room)


def ask(lengths: Sequence[int]) -> list[Request]:
    """Siblings of random prompts, fewer of the later ones; the second prompt ends first, then the first."""
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in lengths]
    limits = 12, 4, 28, 20
    return [
        Request("main", prompts[i], SamplingParams(max_new_tokens=limits[i] + j), seed=10 * i + j)
        for j in range(5)
        for i in range(4)
        if i + j < 5
    ]


def compare_steps(
    policy: Policy, make_both: Callable[[PreTrainedModel, Prompts, int], BothSteps], lengths: Sequence[int]
) -> None:
    """Decode prompts of these lengths with both steps, until rows were dropped at several lengths."""
    start = partial(start_padded, make_step=make_both)
    with decoding_model(policy, "main") as model:
        completions = decode_batch(model, ask(lengths), [2, 7, 8], None, start=start)
    assert len({len(completion.token_ids) for completion in completions}) > 4, "rows were dropped"


def test_prompts_are_held_once(tmp_path: Path) -> None:
    """When their chunks are joined, only those of one layer are there twice."""
    policy = tiny_policy(tmp_path, tiny_config("llama", num_layers=12))
    prompts = [tuple(range(3, 3 + length)) for length in range(40, 48)]
    requests = [Request("main", prompt, SamplingParams(max_new_tokens=1), seed=0) for prompt in prompts]
    held: list[Prompts] = []

    def keep(model: PreTrainedModel, prompts: Prompts, room: int) -> DecodingStep:
        held.append(prompts)
        return ModuleStep(model, NO_STATES, room)

    with decoding_model(policy, "main") as model, MemoryMeter() as meter, torch.no_grad():
        start_padded(model, requests, 1, make_step=keep)
    size = sum(states.nbytes for layer in held[0].states for states in layer)
    assert size < meter.peak < 1.5 * size


GROUPED = tiny_config("qwen2", hidden_size=128, num_kv_heads=2)
BIASES = with_biases(tiny_config("llama", hidden_size=128, num_kv_heads=1, num_layers=3))


@pytest.mark.parametrize(
    ("config", "weights", "lengths"),
    [
        (tiny_config("llama"), "lora", PADDED),
        (tiny_config("llama", hidden_size=128, num_kv_heads=2, tie=False), "lora", PADDED),
        (BIASES, "lora", PADDED),
        (BIASES, "full", PADDED),
        (tiny_config("qwen2", tie=False), "lora", PADDED),
        (GROUPED, "lora", PADDED),
        (GROUPED, "lora", EQUAL),
    ],
    ids=["llama", "llama-untied", "llama-biases", "llama-full", "qwen2-untied", "qwen2-grouped", "qwen2-equal"],
)
def test_logits_are_those_of_the_model(
    tmp_path: Path, config: PreTrainedConfig, weights: Literal["lora", "full"], lengths: Sequence[int]
) -> None:
    policy = tiny_policy(tmp_path, config, weights=weights)
    compare_steps(policy, make_lean_and_own, lengths)


@pytest.mark.parametrize(
    ("config", "options", "lengths"),
    [
        (tiny_config("llama"), {"dtype": "float32"}, PADDED),
        (tiny_config("llama"), {"dtype": "float32"}, EQUAL),
        (GROUPED, {"dtype": "float32"}, PADDED),
        (tiny_config("qwen3"), {"dtype": "float32"}, PADDED),
        (GROUPED, {"dtype": "bfloat16"}, PADDED),
        (GROUPED, {"dtype": "bfloat16", "weights": "full"}, PADDED),  # copies in float32, under autocast
    ],
    ids=["llama", "llama-equal", "qwen2-grouped", "qwen3", "adapters-in-bfloat16", "autocast"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_captured_step_gives_the_logits_of_the_model(
    tmp_path: Path, device: str, config: PreTrainedConfig, options: dict[str, Any], lengths: Sequence[int]
) -> None:
    policy = tiny_policy(tmp_path, config, device=device, **options)
    compare_steps(policy, make_captured_and_own, lengths)


@pytest.mark.gpu
def test_a_captured_step_reads_no_weights_that_another_thread_may_free(tmp_path: Path) -> None:
    """An update on another thread clears the copies of weights that autocast keeps; others take their memory."""
    policy = tiny_policy(tmp_path, GROUPED, device="cuda", dtype="bfloat16", weights="full")
    requests = ask(EQUAL)
    with decoding_model(policy, "main") as model, torch.no_grad():
        _, step = start_padded(model, requests, 2, make_step=make_captured_and_own)
        tokens = torch.full((len(requests),), 5, device=model.device)
        step(tokens, torch.full_like(tokens, 9))
        torch.clear_autocast_cache()
        taken = [torch.full_like(weight, torch.nan, dtype=torch.bfloat16) for weight in model.parameters()]
        step(tokens, torch.full_like(tokens, 10))
        assert taken[0].isnan().all()


def other_activation(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def eager_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [other_activation, eager_attention])
def test_models_that_were_changed_run_as_they_are(tmp_path: Path, change: Callable[[PreTrainedModel], None]) -> None:
    with decoding_model(tiny_policy(tmp_path), "main") as model:
        change(model)
        assert isinstance(make_step(model, NO_STATES, room=1), ModuleStep)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (tiny_config(), {"dtype": "bfloat16"}),
        (tiny_config(), {"dtype": "bfloat16", "weights": "full"}),
        (MistralConfig(**tiny_config().to_diff_dict() | {"head_dim": 32}), {}),
        (with_window(tiny_config("qwen2")), {}),
    ],
    ids=["adapters-in-bfloat16", "autocast", "mistral", "sliding-window"],
)
def test_other_models_run_their_modules(tmp_path: Path, config: PreTrainedConfig, options: dict[str, Any]) -> None:
    with decoding_model(tiny_policy(tmp_path, config, **options), "main") as model:
        assert isinstance(make_step(model, NO_STATES, room=1), ModuleStep)
