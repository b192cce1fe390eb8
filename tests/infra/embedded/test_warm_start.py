from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from infra.embedded.demonstrations import RECIPES, Example, make_first_turns, render_plain_text
from infra.embedded.warm_start import (
    CONTEXT,
    EOS,
    PAD,
    WarmStart,
    WarmStartConfig,
    build_tokenizer,
    compute_loss,
    pad_rows,
    scale_lr,
    tokenize_example,
    train_base_model,
)
from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.model.policy import Policy
from magrpo.problems.coopcode import CoopCode
from magrpo.types import Problem

RECIPE, _ = RECIPES["coopcode"]
TINY = WarmStartConfig(
    num_problems=64,
    lr=1e-2,
    num_revisions=0,
    num_steps=60,
    batch_size=16,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
)
TOKENIZER = build_tokenizer(["def aux(xs):\n    return xs[2:]\n", "a_b"])


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return CoopCode(kind="coopcode", num_train=64, num_test=3, num_ood=3).load()["train"]


@pytest.fixture(scope="module")
def second_turns(problems: list[Problem]) -> list[Example]:
    return [Example(e.prompt + "# previous\npass\n", e.completion) for e in make_first_turns(problems[:8], RECIPE, 0)]


@pytest.fixture(scope="module")
def trained(problems: list[Problem], second_turns: list[Example]) -> WarmStart:
    return train_base_model(problems, second_turns, RECIPE, TINY)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_known_pieces_are_one_token_each_and_the_rest_bytes() -> None:
    pieces = ["def", " aux", "(", "xs", "):", "\n    ", "return", " xs", "[", "2", ":]", "\n"]
    ids = TOKENIZER.encode("def aux(xs):\n    return xs[2:]\n")
    assert [TOKENIZER.decode([i]) for i in ids] == pieces
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("a_b a_cq")] == ["a", "_b", " ", "a", "_", "c", "q"]
    assert len(TOKENIZER.encode("é")) == 2


def test_the_tokenizer_does_not_depend_on_the_order_of_texts() -> None:
    assert build_tokenizer(["b a", "c"]).get_vocab() == build_tokenizer(["c", "b a"]).get_vocab()


def test_only_completion_tokens_and_the_end_are_labels() -> None:
    prompt, completion = tokenize_example(TOKENIZER, Example("xs", "aux"))
    assert completion[-1] == EOS
    input_ids, labels = pad_rows([([7, 8], [9, EOS]), ([7], [EOS])])
    assert input_ids.tolist() == [[7, 8, 9, EOS], [7, EOS, PAD, PAD]]
    assert labels.tolist() == [[-100, -100, 9, EOS], [-100, EOS, -100, -100]]
    assert prompt == TOKENIZER.encode("xs")


def test_the_loss_is_the_cross_entropy_of_completion_tokens(trained: WarmStart) -> None:
    input_ids, labels = pad_rows([([7, 8], [9, 10, EOS]), ([7], [11, EOS])])
    with torch.no_grad():
        logps = trained.model(input_ids=input_ids).logits.log_softmax(-1)
        wanted = [logps[0, 1, 9], logps[0, 2, 10], logps[0, 3, EOS], logps[1, 0, 11], logps[1, 1, EOS]]
        loss = compute_loss(trained.model, input_ids, labels)
    assert loss.item() == pytest.approx(-sum(x.item() for x in wanted) / 5, rel=1e-5)


def test_the_learning_rate_rises_then_falls_to_nothing() -> None:
    config = WarmStartConfig(num_steps=100, warmup_steps=9)
    factors = [scale_lr(step, config) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[4] == pytest.approx(0.5)
    assert max(factors) == factors[9] == pytest.approx(0.91)
    assert factors[-1] == pytest.approx(0.01)


def test_training_lowers_the_loss(trained: WarmStart) -> None:
    assert trained.losses[0] == pytest.approx(math.log(trained.model.config.vocab_size), abs=0.3)
    assert sum(trained.losses[-10:]) / 10 < 0.6 * trained.losses[0]


def test_the_same_seed_gives_the_same_weights(
    trained: WarmStart, problems: list[Problem], second_turns: list[Example]
) -> None:
    short = TINY.model_copy(update={"num_steps": 3})
    torch.manual_seed(7)
    state = torch.get_rng_state()
    runs = [train_base_model(problems, second_turns, RECIPE, short) for _ in range(2)]
    other = train_base_model(problems, second_turns, RECIPE, short.model_copy(update={"seed": 1}))
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert runs[0].losses == runs[1].losses != other.losses
    assert trained.losses[0] == runs[0].losses[0]
    assert torch.equal(torch.get_rng_state(), state), "training leaves the global random state alone"


def test_what_is_saved_loads_as_a_policy_that_renders_the_same_prompts(
    trained: WarmStart, problems: list[Problem], tmp_path: Path
) -> None:
    trained.save(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for a, b in zip(trained.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    agent = AgentConfig(name="helper", role="helper", model=str(tmp_path / "base"))
    policy = Policy.open([agent], ModelConfig(device="cpu"), LoraConfig(rank=2), 0)
    assert policy.lineup.stop_token_ids("helper") == (EOS,)
    assert policy.lineup.max_length("helper") == CONTEXT
    for problem in problems[:4]:
        seen = RECIPE.env.observe(problem, "helper", [], "helper")
        assert (
            list(policy.lineup.render("helper", seen))
            == tokenize_example(trained.tokenizer, Example(render_plain_text(seen), ""))[0]
        )
