"""Folders of trained weights that agents start from: an accepted one computes the same, others are refused by key."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from magrpo.config.agents import LoraConfig, ModelConfig
from magrpo.errors import ConfigError
from magrpo.model.policy import Policy
from tests.model.test_policy import IDS, LORA, agents, change_json, logits, open_policy, shake
from tests.tiny import tiny_base, tiny_config

ADAPTER = {"r": 4, "lora_alpha": 32, "target_modules": list(LORA.target_modules), "task_type": "CAUSAL_LM"}
"""peft's options of the adapter that ``LORA`` makes."""


def make_adapter(base: Path, folder: Path, **options: Any) -> Path:
    """An adapter that peft made elsewhere, with weights that differ from those at its initialisation."""
    generator = torch.Generator().manual_seed(2)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), PeftLoraConfig(**ADAPTER | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("plain") / "adapter")


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    """An adapter that is taken."""
    return shutil.copytree(plain, tmp_path / "adapter")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_dropout": 0.3},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"use_rslora": True, "lora_alpha": 16},  # 16 / sqrt(4) = 32 / 4
        {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"},
    ],
    ids=str,
)
def test_an_adapter_of_peft_that_is_taken_computes_what_peft_computes(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = make_adapter(base, tmp_path / "adapter", **options)
    policy = open_policy(base, main="lora")
    policy.load(1, {"main": folder})
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=IDS).logits, logits(policy, "main"), rtol=1e-5, atol=1e-5)


def refuse_adapter(base: Path, folder: Path) -> str:
    """The error about the adapter in ``folder``, which names its configuration and the agent."""
    with pytest.raises(ConfigError, match=re.escape(f"{folder}/adapter_config.json: ")) as caught:
        open_policy(base, main="lora").load(1, {"main": folder})
    assert "agent 'main'" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_alpha": 64}, "set lora.alpha = 64.0 (now 32.0)"),
        ({"use_rslora": True}, "set lora.alpha = 64.0 (now 32.0)"),
        ({"r": 2, "lora_alpha": 8}, "set lora.rank = 2 (now 4) and lora.alpha = 8.0 (now 32.0)"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changes"),
    ],
    ids=str,
)
def test_an_adapter_of_another_function_is_refused_by_key(
    base: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """Most of them have the names and shapes of the agent's own: their log-probabilities would be off by 2 to 13."""
    folder = make_adapter(base, tmp_path / "adapter", **options)
    assert message in refuse_adapter(base, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 2}, "set lora.rank = 2 (now 4)"),
        ({"alpha_pattern": {"q_proj": 64}}, "alpha_pattern = {'q_proj': 64} changes"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern = {'q_proj': 2} changes"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4' changes"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora' changes"),
        ({"use_dora": True}, "use_dora = True changes"),
        ({"bias": "all"}, "bias = 'all' changes"),
        ({"modules_to_save": ["norm"]}, "modules_to_save = ['norm'] changes"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices = [3] changes"),
        ({"layers_to_transform": [0]}, "layers_to_transform = [0] changes"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens = [5] changes"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True changes"),
        ({"lora_bias": True}, "lora_bias = True changes"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' changes"),
        ({"of_a_later_peft": "variant"}, "of_a_later_peft = 'variant' changes"),
        ({"init_lora_weights": ["pissa"]}, "init_lora_weights = ['pissa'] changes"),
    ],
    ids=str,
)
def test_what_only_a_configuration_says_is_refused(
    base: Path, adapter: Path, change: dict[str, Any], message: str
) -> None:
    change_json(adapter / "adapter_config.json", **change)
    assert message in refuse_adapter(base, adapter)


def test_agents_of_another_scale_are_refused_when_a_policy_opens(base: Path, tmp_path: Path) -> None:
    """As ``magrpo evaluate RUN lora.alpha=16`` opens it, or a run that starts from a champion."""
    policy = open_policy(base, main="lora")
    shake(policy, "main")
    [folder] = policy.save(tmp_path).values()
    [agent] = agents(base, main="lora")
    start = [agent.model_copy(update={"start_from": folder})]
    opened = Policy.open(start, ModelConfig(device="cpu"), LORA, 0)
    assert torch.equal(logits(opened, "main"), logits(policy, "main"))
    with pytest.raises(ConfigError, match=r"set lora.alpha = 32.0 \(now 16.0\)"):
        Policy.open(start, ModelConfig(device="cpu"), LoraConfig(rank=4, alpha=16), 0)


def test_tensors_that_differ_are_named_with_both_shapes_and_the_remedy(base: Path, tmp_path: Path) -> None:
    policy = open_policy(base, main="lora")
    first = "base_model.model.model.layers.0"
    few = make_adapter(base, tmp_path / "few", target_modules=["q_proj", "v_proj"])
    with pytest.raises(ConfigError) as caught:
        policy.load(1, {"main": few})
    assert str(caught.value) == (
        f"{few}: these are not weights of agent 'main': {first}.self_attn.k_proj.lora_A.weight is missing there and "
        '[4, 64] here (20 differ); set lora.target_modules = ["q_proj", "v_proj"]'
    )
    narrow = tiny_base(tmp_path / "narrow", tiny_config(hidden_size=32))
    with pytest.raises(ConfigError) as caught:
        policy.load(1, {"main": make_adapter(narrow, tmp_path / "other")})
    assert f"{first}.self_attn.q_proj.lora_A.weight is [4, 32] there and [4, 64] here (28 differ); " in str(
        caught.value
    )
    assert f"not '{base}': adapter_config.json names it" in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "value", "word"),
    [("lora", torch.nan, "NaN"), ("lora", torch.inf, "infinities"), ("full", torch.nan, "NaN")],
)
def test_weights_that_are_not_finite_are_named(
    base: Path, tmp_path: Path, weights: str, value: float, word: str
) -> None:
    policy = open_policy(base, main=weights)
    [folder] = policy.save(tmp_path).values()
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].flatten()[3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=re.escape(f"{folder}: {name} contains {word}: the training that wrote it")):
        policy.load(1, {"main": folder})


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_parameters", {"rope_type": "default", "rope_theta": 500.0}), ("rms_norm_eps", 0.1), ("hidden_act", "gelu")],
)
def test_a_full_copy_with_other_settings_is_refused_by_key(base: Path, tmp_path: Path, key: str, value: object) -> None:
    policy = open_policy(base, main="full")
    [folder] = policy.save(tmp_path).values()
    change_json(folder / "config.json", use_cache=False, attention_dropout=0.1, transformers_version="5.0.0")
    policy.load(1, {"main": folder})
    change_json(folder / "config.json", **{key: value})
    with pytest.raises(ConfigError, match=re.escape(f"{folder}/config.json: {key} = ")):
        policy.load(1, {"main": folder})


def test_a_full_copy_of_another_width_is_refused(base: Path, tmp_path: Path) -> None:
    other = open_policy(tiny_base(tmp_path / "narrow", tiny_config(hidden_size=32)), main="full")
    [folder] = other.save(tmp_path / "saved").values()
    with pytest.raises(
        ConfigError, match=r"hidden_size = 32, but 64 in .*: these weights were trained from another model"
    ):
        open_policy(base, main="full").load(1, {"main": folder})


def take_parent(adapter: Path, whole: Path) -> Path:
    del whole
    return shutil.copytree(adapter, adapter.parent / "team" / "main").parent


def take_cut(adapter: Path, whole: Path) -> Path:
    del whole
    (adapter / "adapter_config.json").write_text('{"r":')
    return adapter


def take_list(adapter: Path, whole: Path) -> Path:
    del whole
    (adapter / "adapter_config.json").write_text("[]")
    return adapter


def take_word(adapter: Path, whole: Path) -> Path:
    del whole
    change_json(adapter / "adapter_config.json", r="four")
    return adapter


KINDS: dict[str, tuple[str, Callable[[Path, Path], Path], str]] = {
    "whole model": ("lora", lambda _, whole: whole, 'it contains a whole model: .* weights = "full"'),
    "folder of a team": ("lora", take_parent, r"no adapter_config.json; use .*/team/main"),
    "nothing": (
        "lora",
        lambda a, _: a.parent / "none",
        "no adapter_config.json; start_from of agent 'main' must be a folder",
    ),
    "cut": ("lora", take_cut, "adapter_config.json: cannot be read: JSONDecodeError"),
    "list": ("lora", take_list, "adapter_config.json: is not an adapter configuration"),
    "word": ("lora", take_word, "adapter_config.json: r and lora_alpha must be numbers, not 'four' and 32"),
    "adapter": ("full", lambda adapter, _: adapter, "contains an adapter, but agent 'main' has weights = \"full\""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_another_kind_says_what_it_is(base: Path, adapter: Path, kind: str) -> None:
    weights, take, message = KINDS[kind]
    folder = take(adapter, base)
    with pytest.raises(ConfigError, match=message) as caught:
        open_policy(base, main=weights).load(1, {"main": folder})
    assert "\n" not in str(caught.value)


def test_an_adapter_of_an_earlier_peft_needs_no_keys_of_later_ones(base: Path, adapter: Path) -> None:
    old = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "bias", "task_type")
    facts = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({key: facts[key] for key in old}))
    open_policy(base, main="lora").load(1, {"main": adapter})
