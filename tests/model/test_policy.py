from __future__ import annotations

import ctypes
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import is_progress_bar_enabled

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.errors import ConfigError
from magrpo.model.collate import collate
from magrpo.model.forward import LogitMap, can_share_prompts, find_logit_map, head_weights, hidden_states
from magrpo.model.lineup import Lineup, load_pretrained, trim_heap
from magrpo.model.policy import Policy
from magrpo.types import Message, Observation, Sample
from tests.tiny import BOS, EOS, tiny_base, tiny_config

IDS = torch.tensor([[5, 6, 7, 8]])
LORA = LoraConfig(rank=4)


def agents(base: Path, **weights: str) -> list[AgentConfig]:
    return [
        AgentConfig.model_validate({"name": name, "role": name, "model": str(base), "weights": kind})
        for name, kind in weights.items()
    ]


def open_policy(base: Path, seed: int = 0, model: ModelConfig | None = None, **weights: str) -> Policy:
    return Policy.open(agents(base, **weights), model or ModelConfig(device="cpu"), LORA, seed)


def logits(policy: Policy, agent: str) -> torch.Tensor:
    with policy.active(agent) as model, torch.no_grad():
        return model(input_ids=IDS).logits


def shake(policy: Policy, agent: str) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters(agent).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_agents_share_a_base_and_differ_by_their_adapters(base: Path) -> None:
    policy = open_policy(base, helper="lora", main="lora")
    with policy.active("helper") as one, policy.active("main") as other:
        assert not set(one.modules()) & set(other.modules()), "they can be run at the same time"
        tensors = [dict(model.named_parameters()) for model in (one, other)]
    frozen = [{name: p.data_ptr() for name, p in own.items() if ".lora_" not in name} for own in tensors]
    assert frozen[0] == frozen[1], "they hold one base"
    untrained = logits(policy, "main")
    assert torch.equal(untrained, logits(policy, "helper"))  # B = 0
    shake(policy, "main")
    assert not torch.equal(untrained, logits(policy, "main"))
    assert torch.equal(untrained, logits(policy, "helper"))
    with policy.reference("main") as model, torch.no_grad():
        assert torch.equal(untrained, model(input_ids=IDS).logits)
    assert not torch.equal(untrained, logits(policy, "main"))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("precision", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "head_dtype": "float32"}])
def test_full_copies_are_separate_and_keep_an_untrained_reference(
    tmp_path: Path, precision: dict[str, str], tie: bool
) -> None:
    base = tiny_base(tmp_path, tiny_config("qwen2", tie=tie))
    policy = open_policy(
        base, model=ModelConfig.model_validate({"device": "cpu", **precision}), helper="full", main="full"
    )
    untrained = logits(policy, "main")
    shake(policy, "main")
    assert torch.equal(untrained, logits(policy, "helper"))
    assert not torch.equal(untrained, logits(policy, "main"))
    with policy.reference("main") as model, torch.no_grad():
        assert torch.equal(untrained, model(input_ids=IDS).logits)


def test_agents_may_share_one_adapter(base: Path, tmp_path: Path) -> None:
    policy = open_policy(base, apart="lora", helper="shared", main="shared")
    assert [policy.lineup.holder(agent) for agent in policy.agents] == ["apart", "helper", "helper"]
    untrained = logits(policy, "main")
    shake(policy, "main")
    assert not torch.equal(untrained, logits(policy, "helper"))
    assert torch.equal(logits(policy, "main"), logits(policy, "helper"))
    assert torch.equal(untrained, logits(policy, "apart"))
    folders = policy.save(tmp_path)
    alone = open_policy(base, seed=5, helper="lora", main="lora")  # each folder stands on its own
    alone.load(1, {agent: folders[agent] for agent in ("helper", "main")})
    for agent in alone.agents:
        assert torch.equal(logits(alone, agent), logits(policy, "main"))
    with pytest.raises(ConfigError, match=r"differs from .*helper.* start from equal weights"):
        policy.load(2, {"helper": folders["helper"], "main": folders["apart"]})


def test_adapters_start_from_their_seed_and_name_alone(base: Path) -> None:
    first = open_policy(base, helper="lora", main="lora")
    torch.manual_seed(123)
    state = torch.get_rng_state()
    second = open_policy(base, main="lora", helper="lora")
    assert torch.equal(state, torch.get_rng_state())
    third = open_policy(base, seed=1, helper="lora", main="lora")
    for agent in first.agents:
        one, two, three = (p.parameters(agent) for p in (first, second, third))
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert any(not torch.equal(one[name], three[name]) for name in one)
        assert all(not p.any() for name, p in one.items() if "lora_B" in name)
    names = [name for name in first.parameters("main") if "lora_A" in name]
    assert not torch.equal(first.parameters("main")[names[0]], first.parameters("helper")[names[0]])


def test_any_agent_name_is_the_name_of_an_adapter(base: Path, tmp_path: Path) -> None:
    names = ("main", "eval", "keys", "forward", "type", "lora", "a", "x-1")
    policy = open_policy(base, **dict.fromkeys(names, "lora"))
    for name in names:
        assert policy.parameters(name).keys() == policy.parameters("main").keys(), name
    policy.load(1, policy.save(tmp_path))


def test_agents_whose_names_contain_each_other_do_not_mix(base: Path) -> None:
    policy = open_policy(base, main="lora", main2="lora", domain="lora")
    counts = {agent: len(policy.parameters(agent)) for agent in policy.agents}
    assert set(counts.values()) == {2 * 7 * 2}  # A and B of seven layers in two blocks
    ids = [{id(p) for p in policy.parameters(agent).values()} for agent in policy.agents]
    assert not ids[0] & ids[1]
    assert not ids[0] & ids[2]


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_what_trains_is_float32_on_a_bfloat16_base(base: Path, weights: str) -> None:
    policy = open_policy(base, model=ModelConfig(device="cpu", dtype="bfloat16"), main=weights)
    assert {p.dtype for p in policy.parameters("main").values()} == {torch.float32}
    assert logits(policy, "main").dtype == torch.bfloat16
    with policy.reference("main") as model:
        frozen = {name: p.dtype for name, p in model.named_parameters() if "_proj." in name and ".lora_" not in name}
        assert set(frozen.values()) == {torch.bfloat16}


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_saved_weights_come_back_bit_for_bit(base: Path, tmp_path: Path, weights: str) -> None:
    policy = open_policy(base, helper=weights, main=weights)
    shake(policy, "main")
    folders = policy.save(tmp_path / "saved")
    assert folders == {agent: tmp_path / "saved" / agent for agent in ("helper", "main")}
    other = open_policy(base, seed=5, helper=weights, main=weights)
    before = other.parameters("main")
    other.load(7, folders)
    assert other.version == 7
    for agent in policy.agents:
        mine, theirs = policy.parameters(agent), other.parameters(agent)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert all(before[name] is p for name, p in other.parameters("main").items())  # optimizers hold on to them
    again = other.save(tmp_path / "again")
    files = [path.relative_to(folders["main"]) for path in folders["main"].iterdir()]
    assert all((folders["main"] / f).read_bytes() == (again["main"] / f).read_bytes() for f in files)


def test_an_adapter_folder_loads_in_peft(base: Path, tmp_path: Path) -> None:
    policy = open_policy(base, helper="lora", main="lora")
    shake(policy, "main")
    folder = policy.save(tmp_path)["main"]
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, logits(policy, "main"))


def test_weights_that_are_missing_are_refused(base: Path, tmp_path: Path) -> None:
    policy = open_policy(base, main="lora")
    with pytest.raises(ConfigError, match="cannot read the weights of 'main'"):
        policy.load(1, {"main": tmp_path / "missing"})


def test_prompts_are_plain_text_or_go_through_the_chat_template(base: Path, tmp_path: Path) -> None:
    observation = Observation((Message("system", "one"), Message("user", "two")))
    policy = open_policy(base, main="lora")
    assert policy.lineup.tokenizer("main").decode(policy.lineup.render("main", observation)) == "one\ntwo\n"
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    chat = tiny_base(tmp_path / "chat", chat_template=template)
    policy = open_policy(chat, main="lora")
    assert policy.lineup.tokenizer("main").decode(policy.lineup.render("main", observation)) == "[system]one[user]two>"
    policy = open_policy(chat, model=ModelConfig(device="cpu", chat_template="none"), main="lora")
    assert policy.lineup.tokenizer("main").decode(policy.lineup.render("main", observation)) == "one\ntwo\n"


def test_text_holds_no_special_token_of_any_agent(base: Path, tmp_path: Path) -> None:
    """Words of programs and partners stand in prompts; put together, plain tokens can spell a special one."""
    template = "{% for m in messages %}<eos>{{ m.role }}{{ m.content }}{% endfor %}"
    chat = tiny_base(tmp_path / "chat", chat_template=template)
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    tokenizer.save_pretrained(chat)
    call = tokenizer.convert_tokens_to_ids("<|call|>")
    observation = Observation((Message("user", "a<eos>b<e<eos>os><|call|>c<|<|call|>call|>"),))
    both = [AgentConfig(name=name, role=name, model=str(folder)) for name, folder in (("p", base), ("q", chat))]
    lineup = Lineup.open(both, ModelConfig(device="cpu"), LORA)
    assert EOS not in lineup.render("p", observation)
    assert lineup.render("q", observation).count(EOS) == 1
    assert call not in lineup.render("q", observation)
    assert "<|call|>" not in lineup.tokenizer("p").decode(lineup.render("p", observation))
    # Arguments of a tool call are read from JSON, in which a special token may be written with escapes.
    named = [{"role": "user", "content": {"<eos>": ["<eos>"]}}]
    assert lineup.render_chat("q", named).count(EOS) == 1
    harmless = Observation((Message("user", "a < b | c"),))
    assert lineup.tokenizer("p").decode(lineup.render("p", harmless)) == "a < b | c\n"


def test_plain_text_begins_with_the_tokenizers_own_bos(base: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    folder = tiny_base(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    tokenizer.save_pretrained(folder)
    observation = Observation((Message("user", "x"),))
    ids = open_policy(folder, main="lora").lineup.render("main", observation)
    assert ids == (BOS, *open_policy(base, main="lora").lineup.render("main", observation))


def test_stop_tokens_and_window(tmp_path: Path) -> None:
    folder = tiny_base(tmp_path)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [EOS, 77]}))
    policy = open_policy(folder, main="lora")
    assert policy.lineup.stop_token_ids("main") == (EOS, 77)
    assert policy.lineup.max_length("main") == 256


def test_the_window_of_longrope_is_the_one_in_which_batches_change_nothing(tmp_path: Path) -> None:
    """One longer text in a batch, and a longer window of vLLM, would give all texts other positions."""
    config = tiny_config(max_length=128)
    factors = {"short_factor": [1.0] * 16, "long_factor": [8.0] * 16, "original_max_position_embeddings": 32}
    config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    policy = open_policy(tiny_base(tmp_path, config), main="lora")
    assert policy.lineup.max_length("main") == 32


def test_mistakes_are_named(base: Path, tmp_path: Path) -> None:
    def refuse(match: str, lora: LoraConfig = LORA, **fields: str) -> None:
        config = AgentConfig.model_validate({"name": "main", "role": "main", "model": str(base), **fields})
        with pytest.raises(ConfigError, match=match):
            Policy.open([config], ModelConfig(device="cpu"), lora, 0)

    refuse("'/no/such/model': no such folder", model="/no/such/model")
    refuse("cannot load the tokenizer", model=str(tmp_path))
    refuse("did you mean 'q_proj'", LoraConfig(target_modules=("q_prj",)))
    refuse("'lm_head' is tied to the embeddings", LoraConfig(target_modules=("lm_head",)))
    folder = tiny_base(tmp_path / "no-eos")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": None}))
    refuse("no end-of-sequence token", model=str(folder))


def test_an_adapter_on_the_head_needs_float32(tmp_path: Path) -> None:
    untied = tiny_config()
    untied.tie_word_embeddings = False
    config = AgentConfig(name="main", model=str(tiny_base(tmp_path, untied)))
    lora = LoraConfig(target_modules=("q_proj", "lm_head"))
    Policy.open([config], ModelConfig(device="cpu"), lora, 0)
    with pytest.raises(ConfigError, match=r"'lm_head' computes the logits, .* or set model\.dtype = \"float32\""):
        Policy.open([config], ModelConfig(device="cpu", dtype="bfloat16"), lora, 0)


def drop_weights(folder: Path, dropped: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if dropped not in name}, folder / "model.safetensors")


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("malice-was-run"),)


def plant_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": Malice()}, folder / "pytorch_model.bin")


FOREIGN = {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None]}
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "layer": (
        lambda f: drop_weights(f, ".layers.1."),
        r"lack weights .*model.layers.1.* and 1 more",
    ),
    "shape": (
        lambda f: change_json(f / "config.json", vocab_size=300),
        r"embed_tokens.weight \(of shape \[259, 64\]",
    ),
    "cut": (lambda f: os.truncate(f / "model.safetensors", 1000), "cannot load model .*SafetensorError"),
    "pickle": (plant_pickle, "cannot load model .*UnpicklingError"),
    "heads": (lambda f: change_json(f / "config.json", num_attention_heads=3), "64.* is not a multiple of .*heads"),
    "negative": (lambda f: change_json(f / "config.json", hidden_size=-4), "cannot load model"),
    "activation": (lambda f: change_json(f / "config.json", hidden_act="boo"), "cannot load model .*KeyError: 'boo'"),
    "no object": (lambda f: (f / "config.json").write_text("[1]"), "cannot load the tokenizer"),
    "no window": (
        lambda f: (f / "config.json").write_text('{"model_type": "mamba"}'),
        "does not state max_position_embeddings",
    ),
    "code": (
        lambda f: change_json(f / "config.json", model_type="evil", auto_map=FOREIGN),
        "cannot load .* custom",
    ),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "cannot load the tokenizer .*KeyError"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "cannot load the tokenizer .*serialization file"),
    "template": (lambda f: (f / "chat_template.jinja").write_text("{% for %}"), 'set model.chat_template = "none"'),
    "silence": (lambda f: (f / "chat_template.jinja").write_text("hello"), "renders every message to the same tokens"),
    "stop": (lambda f: (f / "generation_config.json").write_text("{"), "cannot load the generation_config.json"),
    "stops": (lambda f: change_json(f / "generation_config.json", eos_token_id="x"), "must be token ids"),
}


@pytest.mark.parametrize(("damage", "weights"), [*((damage, "lora") for damage in DAMAGES), ("layer", "full")])
def test_a_damaged_base_is_refused_in_one_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, weights: str
) -> None:
    """Without its weights a base would train from random layers, drawn anew in each process."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(base, tmp_path / "copy")
    damage_base, message = DAMAGES[damage]
    damage_base(folder)
    with pytest.raises(ConfigError, match=f"agent 'main': .*{message}") as caught:
        open_policy(folder, main=weights)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "malice-was-run").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_base(tmp_path, tiny_config(vocab_size=100))
    lineup = Lineup.open(agents(folder, main="lora"), ModelConfig(device="cpu"), LORA)
    with pytest.raises(
        ConfigError, match=r"agent 'main': the tokenizer of .* produces token id 201, but the model has only 100"
    ):
        lineup.render("main", Observation((Message("user", "x"),)))


def test_trained_weights_without_a_layer_are_refused(base: Path, tmp_path: Path) -> None:
    policy = open_policy(base, main="full")
    [folder] = policy.save(tmp_path).values()
    drop_weights(folder, ".layers.1.")
    with pytest.raises(ConfigError, match=r"lack weights .*model.layers.1"):
        policy.load(1, {"main": folder})
    adapters = open_policy(base, main="lora")
    [folder] = adapters.save(tmp_path / "lora").values()
    os.truncate(folder / "adapter_model.safetensors", 100)
    with pytest.raises(ConfigError, match=r"cannot read the weights of 'main': SafetensorError"):
        adapters.load(1, {"main": folder})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_cuda_without_cuda_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        open_policy(base, model=ModelConfig(device="cuda"), main="lora")


SIBLINGS = [Sample((5, 6, 7), ids, (0.0,) * len(ids), 0.0, 1.0, 0, 0) for ids in ((8, 9, 10), (11,), (12, 13))]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_siblings_in_one_row_are_computed_as_if_alone(tmp_path: Path, architecture: str) -> None:
    folder = tiny_base(tmp_path, tiny_config(architecture))
    policy = open_policy(folder, main="lora")
    with policy.active("main") as model, torch.no_grad():
        assert can_share_prompts(model, torch.float32)
        together = hidden_states(model, collate(SIBLINGS, [(0, 1, 2)]))
        apart = torch.cat([hidden_states(model, collate([s], [(0,)])) for s in SIBLINGS])
        torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
        weight, bias = head_weights(model)
        logits = model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:]
        assert bias is None
        torch.testing.assert_close(nn.functional.linear(together[:3], weight), logits, rtol=1e-5, atol=1e-5)


def test_a_sliding_window_keeps_completions_apart(tmp_path: Path) -> None:
    folder = tiny_base(tmp_path, tiny_config("qwen2"))
    config = json.loads((folder / "config.json").read_text())
    windowed = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": None}
    (folder / "config.json").write_text(json.dumps({**config, **windowed}))
    with open_policy(folder, main="full").active("main") as model:
        assert not can_share_prompts(model, torch.float32)


def test_attention_of_a_models_own_keeps_completions_apart(base: Path) -> None:
    """GPT-Neo's has windows of its own, for one, which are longer than a probe."""
    with open_policy(base, main="full").active("main") as model:
        assert can_share_prompts(model, torch.float32)
        model.set_attn_implementation("eager")
        assert not can_share_prompts(model, torch.float32)


@pytest.mark.parametrize(("dtype", "noise"), [("bfloat16", 0.02), ("float32", 1e-3)])
@pytest.mark.parametrize(("dropped", "shares"), [(None, True), ("attention_mask", False), ("position_ids", False)])
def test_rounding_is_told_from_an_ignored_mask(
    base: Path, dropped: str | None, shares: bool, dtype: Literal["bfloat16", "float32"], noise: float
) -> None:
    """An H100 moved the states of a model of 36 layers by 2 %, and a CPU some of SmolLM2's by 0.1 % in float32."""
    policy = open_policy(base, model=ModelConfig(device="cpu", dtype=dtype), main="lora")
    with policy.active("main") as model:
        generator = torch.Generator().manual_seed(0)

        def drop(_: nn.Module, arguments: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
            return arguments, inputs | ({dropped: None} if dropped else {})

        def round_states(_: nn.Module, inputs: object, output: Any) -> None:
            errors = noise * torch.randn(output.last_hidden_state.shape, generator=generator)
            output.last_hidden_state = output.last_hidden_state * (1 + errors)

        model.base_model.register_forward_pre_hook(drop, with_kwargs=True)
        model.base_model.register_forward_hook(round_states)
        assert can_share_prompts(model, policy.dtype) == shares


def test_logits_changed_in_a_way_that_no_configuration_says_are_not_known(base: Path) -> None:
    with open_policy(base, main="full").active("main") as model:
        assert find_logit_map(model, torch.float32) == LogitMap()

        def cap_logits(_: nn.Module, inputs: object, output: Any) -> None:
            output.logits = output.logits.tanh()

        model.register_forward_hook(cap_logits)
        assert find_logit_map(model, torch.float32) is None


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_large_logits_in_half_precision_are_known(tmp_path: Path, weights: str) -> None:
    base = tiny_base(tmp_path, tiny_config(hidden_size=256, vocab_size=8000, tie=False))
    loaded = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        loaded.lm_head.weight.mul_(10)
    loaded.save_pretrained(base)
    policy = open_policy(base, model=ModelConfig(device="cpu", dtype="bfloat16"), main=weights)
    assert logits(policy, "main").abs().max() > 50
    with policy.active("main") as model:
        assert find_logit_map(model, policy.dtype) == LogitMap()


class BarsSeen:
    """Loads nothing, but keeps whether transformers and the hub would show bars."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def from_pretrained(self, *_: object, **__: object) -> None:
        self.seen.append((is_progress_bar_enabled(), not are_progress_bars_disabled()))


def test_weights_load_without_a_bar_and_downloads_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    hub = sys.modules[are_progress_bars_disabled.__module__]
    monkeypatch.setattr(hub, "HF_HUB_DISABLE_PROGRESS_BARS", None)
    bars = BarsSeen()
    for shows_downloads in (True, False):
        monkeypatch.setattr(hub, "progress_bar_states", {"_global": shows_downloads})
        load_pretrained(bars, "model", AgentConfig(name="helper", role="helper", model="owner/name"))
        assert are_progress_bars_disabled() != shows_downloads
    assert bars.seen == [(False, True), (False, False)]


# Frees large blocks between small ones that live on, as after an update.
HEAP = """
import psutil

freed, kept = [], []
for _ in range(6400):
    freed.append(b"x" * 2**16)  # 64 KiB, which glibc takes from its heap
    kept.append(bytes(2**10))  # no constant, which would be one object
freed.clear()
print(psutil.Process().memory_info().rss)
trim_heap()
print(psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_goes_back_to_the_system() -> None:
    """In a process of its own: in the heap of this one, holes of earlier tests would take the small blocks."""
    source = f"import ctypes\n{inspect.getsource(trim_heap)}{HEAP}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    before, after = (int(line) / 2**20 for line in done.stdout.split())
    assert after < before - 300
