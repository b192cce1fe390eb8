"""Mixed precision: linear layers of a frozen base multiply in bfloat16, all else is float32."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from magrpo.config.run import load_config
from magrpo.engines.local.decoding import decoding_model, make_step
from magrpo.engines.local.llama_steps import LlamaStep
from magrpo.engines.local.steps import Prompts
from magrpo.engines.transformers import LocalEngine
from magrpo.model import rounding
from magrpo.model.forward import can_share_prompts
from magrpo.model.lora import FusedLoraLinear
from magrpo.model.policy import Policy
from magrpo.model.rounding import RoundedLinear
from magrpo.planning.sizes import MERGED, estimate_memory, read_base_model
from magrpo.types import Request, SamplingParams
from pipelines.arguments import locate_config
from tests.tiny import tiny_base, tiny_config, tiny_policy

GAP = 0.1
"""Largest difference between log-probabilities of one token: rounding to bfloat16."""
TEXT = tuple(range(3, 23))


def open_policy(
    folder: Path, dtype: Literal["float32", "mixed"], family: Literal["llama", "qwen2"] = "qwen2"
) -> Policy:
    return tiny_policy(folder, tiny_config(family, tie=False), scale=0.02, dtype=dtype)


def compute_logps(model: PreTrainedModel, text: tuple[int, ...]) -> Tensor:
    """The log-probability of each token of a text after the first."""
    ids = torch.tensor([text])
    logps: Tensor = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logps.gather(-1, ids[0, 1:, None]).squeeze(-1)


def compute_gradient(policy: Policy) -> Tensor:
    policy.clear_gradients("main")
    with policy.active("main") as model:
        compute_logps(model, TEXT).sum().backward()
    gradients = [parameter.grad for parameter in policy.parameters("main").values()]
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def test_only_linear_layers_of_the_base_are_rounded(tmp_path: Path) -> None:
    policy = open_policy(tmp_path, "mixed")
    with policy.active("main") as model:
        halves = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
        assert halves == {f"{name}.weight" for name, m in model.named_modules() if type(m) is RoundedLinear}
        assert len(halves) == 7 * model.config.num_hidden_layers
        assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if name not in halves)
        assert model(input_ids=torch.tensor([TEXT])).logits.dtype == torch.float32


def test_a_layer_rounds_its_factors_and_its_product() -> None:
    exact = nn.Linear(48, 16)
    layer = RoundedLinear(48, 16)
    layer.weight, layer.bias = nn.Parameter(exact.weight.bfloat16(), requires_grad=False), exact.bias
    inputs = torch.randn(5, 48, requires_grad=True)
    with torch.no_grad():
        layer.bias.fill_(1000.0)  # lost in bfloat16, whose next number is 1,004
    found = layer(inputs)
    wanted = inputs.bfloat16().double() @ layer.weight.double().T
    torch.testing.assert_close(found.double() - 1000, wanted, rtol=2**-8, atol=1e-3)
    found.sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad[0], layer.weight.float().sum(0), rtol=2**-8, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_engine_and_trainer_compute_nearly_what_float32_does(tmp_path: Path, family: Literal["llama", "qwen2"]) -> None:
    exact, mixed = (open_policy(tmp_path, dtype, family) for dtype in ("float32", "mixed"))
    mixed.load(0, exact.save(tmp_path / "weights"))  # the same adapter
    served = LocalEngine(mixed, 8).serve(0, mixed.sources or {})
    requests = [Request("main", TEXT[:n], SamplingParams(max_new_tokens=8), seed=n) for n in (3, 9, 9, 20)]
    gaps = []
    for request, action in zip(requests, served.generate(requests), strict=True):
        text = (*request.prompt_ids, *action.token_ids)
        start = len(request.prompt_ids) - 1
        found = []
        for policy in (mixed, exact):
            with policy.active("main") as model:
                found.append(compute_logps(model, text)[start:])
        torch.testing.assert_close(torch.tensor(action.sampling_logps), found[0], rtol=0, atol=GAP)
        gaps.append((found[0] - found[1]).abs().max().item())
    assert 1e-5 < max(gaps) < GAP, "rounded, but not much"


def test_gradients_are_those_of_the_layers_of_peft_and_near_those_of_float32(tmp_path: Path) -> None:
    exact, mixed = (open_policy(tmp_path, dtype) for dtype in ("float32", "mixed"))
    mixed.load(0, exact.save(tmp_path / "weights"))
    fused, wanted = compute_gradient(mixed), compute_gradient(exact)
    with mixed.active("main") as model:
        for layer in model.modules():
            if type(layer) is FusedLoraLinear:
                layer.__class__ = LoraLinear  # type: ignore[assignment]
    plain = compute_gradient(mixed)
    assert (fused - plain).norm() < 0.02 * plain.norm()
    assert 1e-6 < (fused - wanted).norm() / wanted.norm() < 0.05


def test_the_fast_ways_are_taken(tmp_path: Path) -> None:
    policy = open_policy(tmp_path, "mixed")
    no_states = Prompts([], mask=torch.ones(1, 1, dtype=torch.bool), parents=torch.zeros(1, dtype=torch.long))
    with decoding_model(policy, "main") as model:
        assert isinstance(make_step(model, no_states, room=1), LlamaStep)
    with policy.active("main") as model:
        assert can_share_prompts(model, torch.float32)


def test_the_speed_up_is_measured() -> None:
    assert 0.001 < rounding.measure_speed_up() < 1000


def test_the_plan_counts_rounded_layers_and_no_merged_copies(tmp_path: Path) -> None:
    base = str(tiny_base(tmp_path / "base", tiny_config(tie=False)))
    agents = [f"agents.{i}.model={base}" for i in (0, 1)]
    configs = [load_config(locate_config("embedded"), [*agents, f"model.dtype={d}"]) for d in ("float32", "mixed")]
    exact, mixed = (estimate_memory(config, 4, 8) for config in configs)
    size = read_base_model(configs[0].agents[0], configs[0])
    layers = size.num_parameters - size.outer_parameters
    assert exact["frozen parameters"] - mixed["frozen parameters"] == 2 * layers
    assert exact.keys() - mixed.keys() == {MERGED}
    rest = exact.keys() & mixed.keys() - {"frozen parameters"}
    assert {key: exact[key] for key in rest} == {key: mixed[key] for key in rest}
