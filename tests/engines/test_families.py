"""Families of models: engine, update, export and plain peft agree with plain forward passes of tiny random models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BertConfig, PreTrainedModel

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.config.sections import AlgoConfig, OptimConfig, RolloutConfig
from magrpo.engines import NonFiniteLogits
from magrpo.engines.local import ways
from magrpo.engines.transformers import LocalEngine
from magrpo.errors import ConfigError
from magrpo.export.merging import merge_adapter
from magrpo.model import packed_attention
from magrpo.model.policy import Policy
from magrpo.types import Message, Observation, Request, Sample, SamplingParams
from magrpo.updates.lanes import OneRank
from magrpo.updates.updater import Updater
from tests.engines.families import CACHED, MAX_LENGTH, PADDED, WHOLE, Family, make_config
from tests.tiny import VOCAB_SIZE, perturb, tiny_base, tiny_config, tiny_policy
from tests.updates.updating import TEMPERATURE, assert_close, compute_gradient, naive_gradient, naive_logps, on_policy

FAMILIES = PADDED | CACHED | WHOLE
WAYS = dict.fromkeys(PADDED, ways.PADDED) | dict.fromkeys(CACHED, ways.CACHED) | dict.fromkeys(WHOLE, ways.WHOLE)
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ '[me]' if add_generation_prompt }}"
GAP = 1e-4
"""Largest difference between log-probabilities of one token: rounding, of logits that are several tens in size."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("llama"), tiny_config(max_length=MAX_LENGTH), chat_template=CHAT)


def open_team(base: Path, family: Family, partner: Path) -> Policy:
    """An adapter and a full copy of the family, beside a full copy of another one."""
    agents = [
        AgentConfig(name="main", role="main", model=str(base), weights="lora" if family.targets else "full"),
        AgentConfig(name="whole", role="whole", model=str(base), weights="full"),
        AgentConfig(name="partner", role="partner", model=str(partner), weights="full"),
    ]
    policy = Policy.open(
        agents, ModelConfig(device="cpu"), LoraConfig(rank=4, target_modules=family.targets or ("x",)), 0
    )
    perturb(policy, seed=1, scale=0.02)
    return policy


def ask(agent: str) -> list[Request]:
    """Siblings of prompts of three lengths; the adapter keeps the support of truncated sampling."""
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in (3, 19, 9)]
    truncation = {"top_p": 0.9, "top_k": 40, "keep_support": True} if agent == "main" else {}
    sampling = [SamplingParams(TEMPERATURE, max_new_tokens=n, **truncation) for n in (8, 5, 2)]
    return [Request(agent, prompts[i % 3], sampling[i % 2 + i // 5], seed=i) for i in range(6)]


def sample_agents(updater: Updater, way: ways.Way) -> dict[str, list[Sample]]:
    """Sample every agent, and compare each log-probability with that of a plain forward pass."""
    engine = LocalEngine(updater.policy, 256, 1)
    asked = [request for agent in updater.policy.agents for request in ask(agent)]
    samples: dict[str, list[Sample]] = {agent: [] for agent in updater.policy.agents}
    actions = engine.serve(0, {}).generate(asked)
    assert engine.find_way("main") is way
    for number, (request, action) in enumerate(zip(asked, actions, strict=True)):
        sample = Sample(
            *(request.prompt_ids, action.token_ids, action.sampling_logps, 0.0, number % 5 - 2.0, number % 3, 0),
            support=action.support,
        )
        samples[request.agent].append(sample)
        with torch.no_grad():
            expected = naive_logps(updater, request.agent, sample)
        torch.testing.assert_close(torch.tensor(action.sampling_logps), expected, rtol=0, atol=GAP)
    return samples


def assert_same_logits(model: PreTrainedModel, policy: Policy, agent: str) -> None:
    ids = torch.tensor([ask(agent)[1].prompt_ids])
    with policy.active(agent) as ours, torch.no_grad():
        expected = ours(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(model.eval()(input_ids=ids, use_cache=False).logits, expected, rtol=GAP, atol=GAP)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # gpt_bigcode
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("threads")
def test_engine_update_and_export_agree(
    name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of siblings are attended to by parts, which pays for larger models only."""
    monkeypatch.setattr(packed_attention, "WORTHWHILE", 0)
    torch.set_num_threads(1)
    family = FAMILIES[name]
    base = tiny_base(tmp_path / "base", make_config(name, family), chat_template=CHAT)
    policy = open_team(base, family, llama)
    messages = (Message("system", "Be brief."), Message("user", "Add 1 to 2."))
    rendered = policy.lineup.render("main", Observation(messages))
    plain = [{"role": message.role, "content": message.content} for message in messages]
    tokenizer = policy.lineup.tokenizer("main")
    assert list(rendered) == tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)

    rollout = RolloutConfig(temperature=TEMPERATURE, max_new_tokens=8)
    updater = Updater(policy, AlgoConfig(), OptimConfig(lr=1e-3), rollout, 10, tmp_path / "failed-batch", OneRank())
    samples = sample_agents(updater, WAYS[name])
    expected = naive_gradient(updater, "main", on_policy(updater, samples["main"], len(samples["main"])))
    assert_close(compute_gradient(updater, "main", samples["main"]), expected)
    metrics = updater.update(samples)
    gaps = [metrics[f"update/{agent}/sampling_gap"] for agent in policy.agents]
    assert max(gaps) < GAP, gaps
    sample_agents(updater, WAYS[name])  # from the new weights

    saved = policy.save(tmp_path / "saved")
    assert_same_logits(AutoModelForCausalLM.from_pretrained(saved["whole"]), policy, "whole")
    if family.targets:
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(saved["main"]))
        assert_same_logits(adapted, policy, "main")
        merge_adapter(policy.lineup.config("main"), saved["main"], tmp_path / "merged")
        assert_same_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), policy, "main")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "minimax"])
def test_a_slow_way_is_announced_once(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One family for each way; the slow test runs all of them."""
    family = FAMILIES[name]
    base = tiny_base(tmp_path / "base", make_config(name, family))
    policy = open_team(base, family, base)
    engine = LocalEngine(policy, 256, 1)
    for _ in range(2):
        actions = engine.serve(0, {}).generate(ask("main") + ask("whole"))
    way = WAYS[name]
    assert engine.ways == {str(base): way}
    messages = [record.getMessage() for record in caplog.records if record.name == "magrpo.engines.transformers"]
    assert messages == ([f"{base}: {type_name(policy)} {way.notice}"] if way.notice else [])
    alone = [LocalEngine(policy, 1, 1).serve(0, {}).generate([request])[0] for request in ask("main")]
    assert [action.token_ids for action in alone] == [action.token_ids for action in actions[:6]]
    assert {len(action.token_ids) for action in alone} >= {2, 5}, "rows end at different steps"


def type_name(policy: Policy) -> str:
    with policy.active("main") as model:
        return type(model).__name__


@pytest.mark.filterwarnings("ignore:If you want to use `BertLMHeadModel`")
def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_LENGTH, **sizes)
    policy = tiny_policy(tmp_path, config, weights="full")
    with pytest.raises(ConfigError, match=r"base': BertLMHeadModel is not a causal language model: .*docs/engines.md"):
        LocalEngine(policy, 256, 1).serve(0, {}).generate(ask("main"))


def test_weights_that_diverged_are_named_as_such(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, make_config("qwen3", PADDED["qwen3"]), weights="full")
    with torch.no_grad():
        next(iter(policy.parameters("main").values())).fill_(torch.nan)
    with pytest.raises(NonFiniteLogits, match="logits are not finite"):
        LocalEngine(policy, 256, 1).serve(1, {}).generate(ask("main"))


def test_a_forward_pass_that_fails_is_explained(tmp_path: Path) -> None:
    two_heads = Family({"rotary_dim": 16})  # CodeGen needs four
    policy = tiny_policy(tmp_path, make_config("codegen", two_heads), weights="full")
    with pytest.raises(ConfigError, match=r"pass of CodeGenForCausalLM in float32 fails here: .*shape.*; try model.dt"):
        LocalEngine(policy, 256, 1).serve(0, {}).generate(ask("main"))


def test_a_family_that_reads_its_weights_itself_is_refused_in_mixed_precision(tmp_path: Path) -> None:
    family = CACHED["mamba"]
    base = tiny_base(tmp_path / "base", make_config("mamba", family))
    agents = [AgentConfig(name="main", role="main", model=str(base))]
    lora = LoraConfig(rank=4, target_modules=family.targets)
    policy = Policy.open(agents, ModelConfig(device="cpu", dtype="mixed"), lora, 0)
    with pytest.raises(ConfigError, match=r'MambaForCausalLM in bfloat16 fails here: .*; try model.dtype = "float32"'):
        LocalEngine(policy, 256, 1).serve(0, {}).generate(ask("main"))


def test_the_page_lists_the_families_that_are_tested() -> None:
    rows = re.findall(r"^\| (?:together|by length|whole texts) \|(.*?)\|", PAGE.read_text(), re.M)
    listed = [set(re.findall(r"`(\w+(?: with ALiBi)?)`", row)) for row in rows]
    assert listed == [set(PADDED), set(CACHED), set(WHOLE)]
