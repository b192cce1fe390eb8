"""The transformers engine: what is its own, beyond the contract that all engines share."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from threading import Event, current_thread, main_thread
from time import sleep
from typing import Any, Literal

import pytest
import torch
from transformers import MistralConfig, PreTrainedConfig

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.engines import NonFiniteLogits
from magrpo.engines.auto import AutoEngine
from magrpo.engines.local.decoding import can_decode_apart
from magrpo.engines.transformers import LocalEngine, TransformersEngine
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.model.side_by_side import Stop, run_side_by_side
from magrpo.types import Action, Request, SamplingParams
from tests.tiny import VOCAB_SIZE, perturb, tiny_base, tiny_config, tiny_policy

WEIGHTS: dict[str, Literal["lora", "full"]] = {"helper": "lora", "main": "lora", "own": "full"}
SAMPLED = SamplingParams(max_new_tokens=14)
SHORT = SamplingParams(max_new_tokens=3)


def ask(count: int = 12, sampling: SamplingParams = SAMPLED) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in (3, 9, 17, 30)]
    return [Request("main", prompts[i % 4], sampling, seed=i) for i in range(count)]


def assert_same_but_for_rounding(action: Action, expected: Action) -> None:
    """Sums depend on the number of threads."""
    assert action.text == expected.text
    assert action.token_ids == expected.token_ids
    assert action.sampling_logps == pytest.approx(expected.sampling_logps, abs=1e-5)


def open_team(folder: Path) -> Policy:
    base = str(tiny_base(folder / "base"))
    agents = [AgentConfig(name=name, role=name, model=base, weights=weights) for name, weights in WEIGHTS.items()]
    policy = Policy.open(agents, ModelConfig(device="cpu"), LoraConfig(rank=4), seed=0)
    perturb(policy, seed=1, scale=0.05)
    return policy


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.usefixtures("threads")
def test_agents_side_by_side_say_what_they_say_alone(tmp_path: Path, num_threads: int) -> None:
    policy = open_team(tmp_path)
    asked = [replace(request, agent=[*WEIGHTS][i % 3]) for i, request in enumerate(ask(24))]
    finished: list[int] = []
    together = LocalEngine(policy, 5, num_threads).serve(0, {}).generate(asked, finished.append)
    assert torch.get_num_threads() == num_threads
    assert sum(finished) == len(asked)
    alone = {
        name: iter(LocalEngine(policy, 5, 1).serve(0, {}).generate([r for r in asked if r.agent == name]))
        for name in WEIGHTS
    }
    for action in together:
        assert_same_but_for_rounding(action, next(alone[action.agent]))


@pytest.mark.usefixtures("threads")
def test_the_end_of_a_run_ends_agents_that_decode_side_by_side(tmp_path: Path) -> None:
    class RunEnds(BaseException): ...

    def abort(finished: int) -> None:
        raise RunEnds

    asked = [replace(request, agent=[*WEIGHTS][i % 3]) for i, request in enumerate(ask(24))]
    engine = LocalEngine(open_team(tmp_path), 5, 2).serve(0, {})
    with pytest.raises(RunEnds):
        engine.generate(asked, abort)
    assert torch.get_num_threads() == 2
    assert len(engine.generate(asked)) == len(asked), "no lock is held"


def test_a_task_that_fails_ends_the_others() -> None:
    failed = Event()

    def fail(stop: Stop) -> None:
        failed.set()
        raise ValueError("first")

    def wait(stop: Stop) -> None:
        assert failed.wait(60)
        while not stop():
            sleep(0.001)
        raise CancelledError

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="first"):
        run_side_by_side([wait, fail], 2, 2)
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "weights", "apart"),
    [("float32", "shared", True), ("bfloat16", "lora", True), ("bfloat16", "shared", False), ("mixed", "shared", True)],
)
def test_agents_are_decoded_apart_by_models_of_their_own(tmp_path: Path, dtype: Any, weights: Any, apart: bool) -> None:
    agents = [AgentConfig(name=n, role=n, model=str(tiny_base(tmp_path)), weights=weights) for n in ("one", "two")]
    policy = Policy.open(agents, ModelConfig(device="cpu", dtype=dtype), LoraConfig(rank=4), seed=0)
    assert can_decode_apart(policy) is apart


def test_tasks_that_share_something_are_run_one_at_a_time() -> None:
    active: list[int] = []

    def enter(stop: Stop) -> int:
        active.append(1)
        assert sum(active) == 1
        sleep(0.001)
        active.append(-1)
        return current_thread().name == main_thread().name

    assert run_side_by_side([enter] * 3, torch.get_num_threads(), 1) == [True] * 3


def largest_gap(policy: Policy, asked: list[Request], actions: list[Action]) -> float:
    """Largest difference between the engine's log-probabilities and those of one unpadded forward pass."""
    gaps = []
    for request, action in zip(asked, actions, strict=True):
        with policy.active("main") as model, torch.no_grad():
            logits = model(input_ids=torch.tensor([request.prompt_ids + action.token_ids])).logits[0].float()
        logps = logits[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logps.gather(-1, torch.tensor(action.token_ids)[:, None]).squeeze(-1)
        gaps.append(float((expected - torch.tensor(action.sampling_logps)).abs().max()))
    return max(gaps)


def sliding_window() -> PreTrainedConfig:
    """The configuration of a tiny Mistral whose window of 8 tokens is shorter than most prompts of ``ask``."""
    return MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        sliding_window=8,
        eos_token_id=2,
    )


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("llama", hidden_size=128, num_kv_heads=2),
        tiny_config("qwen2", tie=False),
        sliding_window(),
    ],
    ids=["llama-grouped-heads", "qwen2-biases", "mistral-sliding-window"],
)
def test_logps_are_those_of_an_unpadded_forward_pass(tmp_path: Path, config: PreTrainedConfig) -> None:
    policy = tiny_policy(tmp_path, config)
    asked = ask()
    served = TransformersEngine().open(EngineHost.of(policy)).serve(0, {})
    assert largest_gap(policy, asked, served.generate(asked)) < 2e-5


def test_batch_size_and_padding_change_nothing(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    asked = ask()
    whole = TransformersEngine().open(EngineHost.of(policy)).serve(0, {}).generate(asked)
    for max_batch in (1, 5):
        parts = TransformersEngine(max_batch=max_batch).open(EngineHost.of(policy)).serve(0, {}).generate(asked)
        assert [action.token_ids for action in parts] == [action.token_ids for action in whole]
        for one, other in zip(parts, whole, strict=True):
            assert one.sampling_logps == pytest.approx(other.sampling_logps, abs=1e-5)


def test_prompts_that_run_in_several_chunks_are_padded_apart(tmp_path: Path) -> None:
    """Hundreds of prompts hold more tokens than run at once; the short ones are not padded to the longest."""
    policy = tiny_policy(tmp_path)
    widths: list[int] = []
    with policy.active("main") as model:
        model.register_forward_pre_hook(
            lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
    generator = torch.Generator().manual_seed(0)
    asked = [
        Request("main", tuple(torch.randint(3, VOCAB_SIZE, (3 + i // 8,), generator=generator).tolist()), SHORT, seed=i)
        for i in range(240)
    ]
    served = TransformersEngine(max_batch=240).open(EngineHost.of(policy)).serve(0, {})
    actions = served.generate(asked)
    prefilled = [width for width in widths if width > 1]
    assert len(prefilled) > 1
    assert max(prefilled) == 32
    assert min(prefilled) < 24
    assert largest_gap(policy, asked, actions) < 2e-5


def test_a_bfloat16_base_keeps_its_float32_adapter(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, dtype="bfloat16")
    asked = ask()
    served = TransformersEngine().open(EngineHost.of(policy)).serve(0, {})
    assert largest_gap(policy, asked, served.generate(asked)) < 0.1


def test_the_policy_is_left_as_it_was(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    with policy.active("main") as model:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        TransformersEngine().open(EngineHost.of(policy)).serve(0, {}).generate(ask())
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trains
        model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters("main").values())


def test_weights_that_diverged_stop_the_run(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    with torch.no_grad():
        next(iter(policy.parameters("main").values())).fill_(float("nan"))
    engine = TransformersEngine().open(EngineHost.of(policy))
    with pytest.raises(NonFiniteLogits, match=r"'main'.*not finite.*optim.lr"):
        engine.serve(1, {}).generate(ask())
    with pytest.raises(NonFiniteLogits, match=r"'main'.*not finite at policy version 0; the weights of .* are damaged"):
        engine.serve(0, {}).generate(ask())


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    engine = TransformersEngine().open(EngineHost.of(tiny_policy(tmp_path))).serve(0, {})
    with pytest.raises(ValueError, match="'main': empty prompt"):
        engine.generate([Request("main", (), SAMPLED, 0)])


def test_weights_load_only_if_the_policy_does_not_hold_them(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    saved = policy.save(tmp_path / "weights")
    nowhere = {"main": tmp_path / "there is no such folder"}
    policy.sources = nowhere
    engine = LocalEngine(policy, 256)
    expected = engine.serve(0, nowhere).generate(ask())
    perturb(policy, seed=2)
    assert engine.serve(0, nowhere).generate(ask()) != expected
    actions = engine.serve(3, saved).generate(ask())
    assert policy.version == 3
    assert [action.token_ids for action in actions] == [action.token_ids for action in expected]


def test_two_versions_may_be_open_at_once(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    engine = LocalEngine(policy, 256)
    first = engine.serve(1, policy.save(tmp_path / "first"))
    perturb(policy, seed=2)
    second = engine.serve(2, policy.save(tmp_path / "second"))
    one, two, again = first.generate(ask()), second.generate(ask()), first.generate(ask())
    assert one == again
    assert [a.token_ids for a in one] != [a.token_ids for a in two]
    assert {a.policy_version for a in one} | {a.policy_version for a in two} == {1, 2}


def test_auto_takes_transformers_on_cpu(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    lineup = policy.lineup
    chosen = AutoEngine().choose_engine(lineup.configs, lineup.model, lineup.lora, policy.device)
    assert chosen == TransformersEngine()
    assert isinstance(AutoEngine().open(EngineHost.of(policy)), LocalEngine)


@pytest.mark.parametrize(("device", "warnings"), [("cuda", 1), ("cpu", 0)])
def test_sampling_on_a_gpu_without_vllm_says_what_it_costs(
    device: str, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tiny_policy(tmp_path)
    lineup = replace(policy.lineup, device=torch.device(device))
    TransformersEngine().open(EngineHost(lineup, lambda: policy))
    assert caplog.text.count("set engine.kind = vllm") == warnings
