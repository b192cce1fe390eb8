"""Folders of agents in every form: full copies, a base in a folder of one's own, chat templates, several turns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import GenerationConfig

from magrpo.assets import name_base
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.config.run import load_config
from magrpo.export.agents_folder import write_agents, write_run_agents
from magrpo.export.merging import merge_adapter
from magrpo.export.team import TrainedTeam
from magrpo.model.lineup import GENERATION_CONFIG
from magrpo.model.policy import Policy
from magrpo.run.files import checkpoint_weights
from magrpo.run.store import RunStore
from tests.export.test_agents_folder import run_python
from tests.pipelines.micro import blank_pictures, run_locally, write_config
from tests.tiny import EOS, PAD, tiny_base, tiny_config

SHORT = ["train.num_iterations=1", "eval.max_problems=2", "eval.num_samples=1"]
CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ '[me]' if add_generation_prompt }}"


def run_micro(folder: Path, *overrides: str, chat_template: str | None = None, **generation: int) -> RunStore:
    base = tiny_base(folder / "base", tiny_config(max_length=64), chat_template=chat_template)
    if generation:
        (base / GENERATION_CONFIG).write_text(json.dumps(generation))
    with blank_pictures():
        store, _, _ = run_locally(load_config(write_config(folder), [*SHORT, *overrides]))
    return store


def check_snippet(folder: Path) -> str:
    """Run the snippet of the card in ``folder``, which must print what the card says; returns the card."""
    card = (folder / "README.md").read_text()
    [snippet] = re.findall(r"^```python\n(.*?)^```$", card, re.M | re.S)
    [printed] = re.findall(r"one after the other:\n\n(`{3,})\n(.*?)^\1$", card, re.M | re.S)
    assert run_python(folder, snippet) == printed[1]
    return card


@pytest.mark.parametrize("chat_template", [None, CHAT])
def test_a_full_copy_and_an_adapter_answer_side_by_side(tmp_path: Path, chat_template: str | None) -> None:
    store = run_micro(tmp_path, "agents.0.weights=full", chat_template=chat_template, eos_token_id=PAD)
    agents = write_run_agents(store)
    card = check_snippet(agents)
    assert "isinstance(model, PeftModel)" in card
    assert f"The base `{tmp_path}/base` is a folder on the training machine" in card
    assert "--port 8000" in card
    assert "--port 8001" in card
    assert "--served-model-name helper" in card
    ours = checkpoint_weights(store, 1) / "helper" / "model.safetensors"
    assert (agents / "helper" / "model.safetensors").samefile(ours), "full copies take no space twice"
    assert not (agents / "main" / "adapter_config.json").samefile(
        checkpoint_weights(store, 1) / "main" / "adapter_config.json"
    )
    assert (agents / "helper" / "chat_template.jinja").read_text() == (chat_template or PLAIN)
    assert store.find("00001/update") is not None, "the committed files are as they were"
    assert 'ends = {"helper": [2, 0], "main": [2, 0]}' in card, "the tokenizer's token and the generation config's"
    write_agents(TrainedTeam.of(store, merged=True), tmp_path / "merged")
    for copy in (agents / "helper", tmp_path / "merged" / "main"):
        assert GenerationConfig.from_pretrained(copy).eos_token_id == [EOS, PAD]


PLAIN = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def test_a_template_that_training_did_not_use_is_replaced(tmp_path: Path) -> None:
    agents = write_run_agents(run_micro(tmp_path, "model.chat_template=none", chat_template=CHAT))
    assert (agents / "main" / "chat_template.jinja").read_text() == PLAIN
    check_snippet(agents)


def test_agents_that_take_turns_show_their_first_answers(tmp_path: Path) -> None:
    kinds = ["env.kind=tests.plugins:TakingTurns", "rollout.max_new_tokens=4"]
    agents = write_run_agents(run_micro(tmp_path, *kinds))
    assert "Episodes have 2 turns; this is the first answer of each agent." in check_snippet(agents)


def test_merged_copies_need_no_base(tmp_path: Path) -> None:
    store = run_micro(tmp_path, "agents.0.weights=shared", "agents.1.weights=shared")
    write_agents(TrainedTeam.of(store, merged=True), tmp_path / "merged")
    assert "peft" not in check_snippet(tmp_path / "merged").partition("## Evaluation")[0]
    assert json.loads((tmp_path / "merged/config.json").read_text())["agents"][0]["weights"] == "full"


def test_a_base_whose_sampling_transformers_would_not_save_can_be_trained_and_merged(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", tiny_config(max_length=64))
    sampling = {"temperature": 0.6, "length_penalty": 2.0, "eos_token_id": EOS, "pad_token_id": PAD}
    (base / GENERATION_CONFIG).write_text(json.dumps(sampling))
    lora, full = (
        AgentConfig(name=weights, role=weights, model=str(base), weights=weights) for weights in ("lora", "full")
    )
    policy = Policy.open([lora, full], ModelConfig(device="cpu"), LoraConfig(rank=4), seed=0)
    folders = policy.save(tmp_path / "checkpoint")
    merge_adapter(lora, folders["lora"], tmp_path / "merged")
    for folder in (folders["full"], tmp_path / "merged"):
        saved = GenerationConfig.from_pretrained(folder)
        assert (saved.eos_token_id, saved.pad_token_id, saved.temperature) == ([EOS], PAD, None)


def test_bases_have_their_name_where_they_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    names = {base: name_base(base) for base in ("coopcode-base", "Qwen/Qwen2.5-Coder-3B", "mine")}
    assert names == {
        "coopcode-base": "coopcode-base",
        "Qwen/Qwen2.5-Coder-3B": "Qwen/Qwen2.5-Coder-3B",
        "mine": str(tmp_path / "mine"),
    }
