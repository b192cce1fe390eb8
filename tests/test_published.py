"""A published model, SmolLM2-135M-Instruct, through a whole run: prompts, sampling, update, answers, export."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from magrpo.algo.answers import measure_completions
from magrpo.asking.answers import open_asked_agents
from magrpo.asking.problems import load_asked_problems
from magrpo.asking.teams import find_asked_team
from magrpo.config.run import load_config
from magrpo.export.agents_folder import write_run_agents
from magrpo.export.merging import merge_adapter
from magrpo.model.forward import can_share_prompts
from magrpo.run.files import checkpoint_weights, read_groups
from magrpo.run.store import RunStore
from magrpo.types import RolloutGroup, Turn
from pipelines.arguments import locate_config
from tests.pipelines.micro import blank_pictures, run_locally, write_config

pytestmark = pytest.mark.slow
SETTINGS = (
    "problems.size=2",
    "rollout.max_new_tokens=24",
    "optim.lr=1e-3",
    "eval.max_problems=1",
    "eval.num_samples=1",
)
GAP = 1e-4
"""Largest difference between log-probabilities of one token: rounding."""


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """One iteration of SmolLM2 as ``main`` and a tiny Llama, of another vocabulary, as ``helper``."""
    folder = tmp_path_factory.mktemp("run")
    config = load_config(write_config(folder, iterations=1), [*SETTINGS, f"agents.1.model={smollm2}"])
    with blank_pictures():
        store, _, _ = run_locally(config)
    return store


def groups_of(run: RunStore) -> list[RolloutGroup[Turn]]:
    pointer = run.find("00001/rollout.0")
    assert pointer is not None
    return read_groups(run.folder(pointer))


def load_base(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def plain_logps(model: Any, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    logps: torch.Tensor = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1)
    return logps


def test_prompts_are_the_tokens_of_the_chat_template(run: RunStore, smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for group in groups_of(run):
        prompt = group.prompts["main"]
        messages = [{"role": m.role, "content": m.content} for m in prompt.observation.messages]
        plain = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(prompt.token_ids) == plain
        assert tokenizer.decode(plain).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_engine_and_trainer_agree_with_plain_forward_passes(run: RunStore) -> None:
    bases = {agent.name: load_base(agent.model) for agent in run.config().agents}
    for group in groups_of(run):
        for agent, actions in group.actions.items():
            for action in actions:
                expected = plain_logps(bases[agent], group.prompts[agent].token_ids, action.token_ids)
                torch.testing.assert_close(torch.tensor(action.sampling_logps), expected, rtol=0, atol=GAP)
    metrics = run.manifest_of("00001/update")["metrics"]
    assert metrics["update/sampling_gap"] < GAP
    assert metrics["update/main/grad_norm"] > 0


def test_siblings_share_their_prompt_in_updates(smollm2: Path) -> None:
    """Its states reach 30, so that rounding in float32 moves them by more than those of a tiny model."""
    assert can_share_prompts(load_base(smollm2), torch.float32)


def test_answers_are_those_that_plain_peft_generates(run: RunStore, smollm2: Path, tmp_path: Path) -> None:
    exported = write_run_agents(run)
    asked = find_asked_team(run.run_id, run.path.parent)
    problem = next(iter(load_asked_problems(asked).values()))
    with open_asked_agents(asked, with_untrained=True) as agents:
        [answer] = agents.answer_problem(agents.trained, problem)
        assert agents.untrained is not None
        [before] = agents.answer_problem(agents.untrained, problem)
    assert answer.texts != before.texts, "training has moved the weights"
    tokenizer = AutoTokenizer.from_pretrained(exported / "main")
    adapted: Any = PeftModel.from_pretrained(load_base(smollm2), str(exported / "main")).eval()
    [step] = answer.steps
    prompt_ids = step.prompts["main"].token_ids
    inputs = {"input_ids": torch.tensor([prompt_ids]), "attention_mask": torch.ones(1, len(prompt_ids))}
    written = adapted.generate(**inputs, max_new_tokens=24, do_sample=False)[0, len(prompt_ids) :]
    assert tokenizer.decode(written, skip_special_tokens=True) == answer.texts["main"]

    merge_adapter(asked.config.agents[1], checkpoint_weights(run, 1) / "main", tmp_path / "merged")
    merged = load_base(tmp_path / "merged")
    token_ids = tuple(written.tolist())
    gap = plain_logps(merged, prompt_ids, token_ids) - plain_logps(adapted, prompt_ids, token_ids)
    assert float(gap.abs().max()) < 0.2, "merged weights are rounded to bfloat16, as the base is"


def test_two_small_authors_pay_for_faulty_answers(smollm2: Path, tmp_path: Path) -> None:
    """The shipped configuration in mixed precision, with so few tokens that most answers are cut off."""
    posts = [f"TITLE: Moving to city {i}\n\nPOST: I found a job in city {i}, far from here." for i in range(20)]
    source = tmp_path / "posts.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": post}) for post in posts), encoding="utf-8")
    models = [f"agents.{i}.model={smollm2}" for i in (0, 1)]
    short = ["train.num_iterations=1", "rollout.problems_per_iteration=2", "rollout.group_size=2"]
    evaluation = ["eval.every=1", "eval.max_problems=1", "rollout.max_new_tokens=12"]
    arguments = [*models, "model.dtype=mixed", f"problems.source={source}", f"root={tmp_path}", *short, *evaluation]
    with blank_pictures():
        store, _, _ = run_locally(load_config(locate_config("tldr_cpu"), arguments))
    config, rollout = store.config(), store.manifest_of("00001/rollout.0")["metrics"]
    answers = [measure_completions(group) for group in groups_of(store)]
    cost = sum(
        config.penalty.cut_off * rollout[f"rollout/{agent.name}/cut_off_frac"]
        + config.penalty.copied * rollout[f"rollout/{agent.name}/copied_frac"]
        + config.penalty.repeated * rollout[f"rollout/{agent.name}/repeated_frac"]
        + config.penalty.strayed
        * fmean(max(0.0, 1 - 2 * one.prompt_words_frac) for group in answers for one in group[agent.name])
        for agent in config.agents
    )
    assert cost > 0
    penalty = store.manifest_of("00001/credit")["metrics"]["reward/penalty"]
    assert penalty == pytest.approx(-cost * sum(config.reward.maxima.values()))
    assert 1e-4 < store.manifest_of("00001/update")["metrics"]["update/sampling_gap"] < 0.05
    prompt = groups_of(store)[0].prompts["summary"].token_ids
    assert "<|im_start|>assistant" in AutoTokenizer.from_pretrained(smollm2).decode(prompt)
