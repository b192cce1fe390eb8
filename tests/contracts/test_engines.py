"""What every engine promises: one suite for all of them, against a plain loop over the trainer's own forward pass.

On a CPU in float32; on a GPU (``-m gpu``) in bfloat16, since vLLM's adapters take no float32 there. Engine and trainer
use different kernels on a GPU, so their logits differ by bfloat16's rounding.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.engines import PromptTooLong
from magrpo.errors import ConfigError
from magrpo.interfaces import Engine, Served
from magrpo.model.collate import collate
from magrpo.model.forward import head_weights, hidden_states
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.plugins import build_plugin
from magrpo.types import Action, Request, Sample, SamplingParams
from magrpo_kernels import LossOptions, TokenInputs, group_policy_loss
from tests.tiny import EOS, VOCAB_SIZE, perturb, tiny_base, tiny_config

MAX_LENGTH = 128
AGENTS = ("helper", "main", "solo")
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)


@dataclass
class World:
    """An engine, the policy it serves, and the folders of two trained versions."""

    engine: Engine
    policy: Policy
    folders: dict[int, dict[str, Path]]
    served: Served

    @property
    def tolerance(self) -> float:
        """Largest difference between logits of engine and trainer."""
        return 1e-4 if self.policy.dtype == torch.float32 else 0.25

    def serve(self, version: int) -> None:
        self.policy.load(version, self.folders[version])
        self.served.close()
        self.served = self.engine.serve(version, self.folders[version])


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# With an agent of full weights, vLLM needs a second server.
ENGINES = [
    pytest.param(("transformers", "full"), id="transformers"),
    pytest.param(("vllm", "lora"), id="vllm", marks=pytest.mark.vllm),
    pytest.param(("vllm", "full"), id="vllm-full", marks=[pytest.mark.vllm, pytest.mark.slow]),
]


@pytest.fixture(scope="module", params=ENGINES)
def world(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Yield each engine at version 1 of two LoRA agents and one more, then close it twice, which must be harmless."""
    kind, weights = request.param
    root = tmp_path_factory.mktemp("engines")
    base = str(tiny_base(root / "base", tiny_config(max_length=MAX_LENGTH)))
    agents = [
        AgentConfig(name=name, role=name, model=base, weights=weights if name == "solo" else "lora") for name in AGENTS
    ]
    policy = Policy.open(agents, ModelConfig(device=device), LoraConfig(rank=4, alpha=8.0), seed=0)
    folders = {}
    for version in (1, 2):
        perturb(policy, seed=version, scale=0.05)
        folders[version] = policy.save(root / f"version-{version}")
    policy.load(1, folders[1])
    engine = build_plugin("engine", {"kind": kind}).open(EngineHost.of(policy))
    yield World(engine, policy, folders, engine.serve(1, folders[1]))
    engine.close()
    engine.close()


def prompts(count: int = 4, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, VOCAB_SIZE, (5 + 11 * i,), generator=generator).tolist()) for i in range(count)]


def requests(sampling: SamplingParams, siblings: int = 2, count: int = 4) -> list[Request]:
    """For each prompt and agent, ``siblings`` requests in a row that differ only in their seed."""
    return [
        Request(agent, prompt, sampling, seed=1000 * i + g)
        for i, prompt in enumerate(prompts(count))
        for agent in AGENTS
        for g in range(siblings)
    ]


def trainer_logits(policy: Policy, agent: str, ids: tuple[int, ...]) -> torch.Tensor:
    """(T, V) logits of one sequence, unpadded and without a cache, on the CPU."""
    with policy.active(agent) as model, torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids], device=policy.device)).logits[0]
    return logits.float().cpu()


def assert_greedy(world: World, request: Request, action: Action) -> None:
    """Every token is the trainer's likeliest one, and the completion ends where it should."""
    logits = trainer_logits(world.policy, action.agent, request.prompt_ids + action.token_ids)
    rows = logits[len(request.prompt_ids) - 1 : -1]
    chosen = rows.gather(-1, torch.tensor(action.token_ids)[:, None]).squeeze(-1)
    assert (chosen >= rows.amax(-1) - world.tolerance).all()
    assert len(action.token_ids) == request.sampling.max_new_tokens or action.token_ids[-1] == EOS
    assert EOS not in action.token_ids[:-1]


def trainer_logps(policy: Policy, request: Request, action: Action) -> torch.Tensor:
    """(T,) log-probabilities of the action's tokens; those of greedy requests are taken at temperature 1."""
    logits = trainer_logits(policy, action.agent, request.prompt_ids + action.token_ids)
    logps = (logits[len(request.prompt_ids) - 1 : -1] / (request.sampling.temperature or 1.0)).log_softmax(-1)
    return logps.gather(-1, torch.tensor(action.token_ids)[:, None]).squeeze(-1)


def assert_logps_are_the_trainers(world: World, asked: list[Request], actions: list[Action]) -> None:
    for request, action in zip(asked, actions, strict=True):
        expected = trainer_logps(world.policy, request, action)
        torch.testing.assert_close(torch.tensor(action.sampling_logps), expected, atol=world.tolerance, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_logps_are_the_trainers(world: World, temperature: float) -> None:
    asked = requests(SamplingParams(temperature=temperature, max_new_tokens=16))
    assert_logps_are_the_trainers(world, asked, world.served.generate(asked))


def test_greedy_completions_are_the_reference_of_every_agent(world: World) -> None:
    asked = requests(GREEDY, siblings=1)
    actions = world.served.generate(asked)
    for request, action in zip(asked, actions, strict=True):
        assert_greedy(world, request, action)
    by_agent = {agent: [a.token_ids for a in actions if a.agent == agent] for agent in AGENTS}
    assert all(one != other for one, other in pairwise(by_agent.values()))
    assert_logps_are_the_trainers(world, asked, actions)


def test_a_new_version_is_taken_up(world: World) -> None:
    asked = requests(GREEDY, siblings=1)
    before = world.served.generate(asked)
    world.serve(2)
    after = world.served.generate(asked)
    world.serve(1)
    again = world.served.generate(asked)
    assert {action.policy_version for action in before} == {1}
    assert {action.policy_version for action in after} == {2}
    for agent in AGENTS:
        old, new = ([a.token_ids for a in actions if a.agent == agent] for actions in (before, after))
        assert old != new
    if world.policy.device.type == "cpu":
        assert again == before
    for version, actions in ((2, after), (1, again)):
        world.policy.load(version, world.folders[version])
        for request, action in zip(asked, actions, strict=True):
            assert_greedy(world, request, action)


def test_a_completion_depends_on_its_request_alone(world: World) -> None:
    if world.policy.device.type == "cuda":
        pytest.skip("on a GPU the other requests of a batch decide how sums are rounded")
    asked = requests(SamplingParams(max_new_tokens=16))
    actions = world.served.generate(asked)
    alone = world.served.generate(asked[::-3])
    assert [action.token_ids for action in alone] == [action.token_ids for action in actions[::-3]]
    for one, other in zip(alone, actions[::-3], strict=True):
        assert one.sampling_logps == pytest.approx(other.sampling_logps, abs=1e-4)
    assert all(one.token_ids != other.token_ids for one, other in zip(actions[::2], actions[1::2], strict=True))


def test_stop_tokens_and_length_limits(world: World) -> None:
    asked = [
        Request(request.agent, request.prompt_ids, SamplingParams(temperature=2.0, max_new_tokens=limit), request.seed)
        for limit in (1, 5, 80)
        for request in requests(GREEDY, siblings=12, count=3)
    ]
    actions = world.served.generate(asked)
    reasons = set()
    for request, action in zip(asked, actions, strict=True):
        assert 1 <= len(action.token_ids) <= request.sampling.max_new_tokens
        assert len(action.sampling_logps) == len(action.token_ids)
        assert EOS not in action.token_ids[:-1]
        stopped = action.token_ids[-1] == EOS
        assert action.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(action.token_ids) == request.sampling.max_new_tokens
        assert action.text == world.policy.lineup.tokenizer(action.agent).decode(
            action.token_ids, skip_special_tokens=True
        )
        assert "<eos>" not in action.text
        reasons.add((action.agent, action.finish_reason))
    assert len(reasons) == 2 * len(AGENTS)


def test_sampled_tokens_follow_the_distribution(world: World) -> None:
    prompt = prompts(1)[0]
    count = 1500
    asked = [Request("main", prompt, SamplingParams(max_new_tokens=1), seed) for seed in range(count)]
    drawn = torch.tensor([action.token_ids[0] for action in world.served.generate(asked)])
    expected = trainer_logits(world.policy, "main", prompt)[-1].softmax(-1) * count
    likely = expected >= 5
    observed = torch.bincount(drawn, minlength=VOCAB_SIZE)
    cells = torch.cat([observed[likely], observed[~likely].sum()[None]])
    means = torch.cat([expected[likely], expected[~likely].sum()[None]])
    chi_squared = float(((cells - means) ** 2 / means).sum())
    degrees = len(cells) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations


TRUNCATIONS = [(3, 1.0), (0, 0.3), (20, 0.5)]


def support_logits(policy: Policy, request: Request, action: Action) -> list[torch.Tensor]:
    """For each token the trainer's logits at the sampling temperature, -inf outside the token's support."""
    rows = trainer_logits(policy, action.agent, request.prompt_ids + action.token_ids)[len(request.prompt_ids) - 1 : -1]
    outside = torch.full_like(rows, -torch.inf)
    return [
        row.index_copy(0, torch.tensor(support), logits[list(support)] / request.sampling.temperature)
        for row, logits, support in zip(outside, rows, action.support, strict=True)
    ]


def assert_logps_with_support_are_the_trainers(world: World, asked: list[Request], actions: list[Action]) -> None:
    """Compare by definition, and through the trainer's own collator, forward pass and kernel."""
    for request, action in zip(asked, actions, strict=True):
        rows = support_logits(world.policy, request, action)
        expected = [row.log_softmax(-1)[token] for row, token in zip(rows, action.token_ids, strict=True)]
        torch.testing.assert_close(
            torch.tensor(action.sampling_logps), torch.stack(expected), atol=world.tolerance, rtol=0
        )
    for agent in AGENTS:
        samples = [
            Sample(r.prompt_ids, a.token_ids, a.sampling_logps, 0.0, 1.0, 0, 1, support=a.support)
            for r, a in zip(asked, actions, strict=True)
            if a.agent == agent
        ]
        batch = collate(samples, [(i,) for i in range(len(samples))], world.policy.device)
        tokens = batch.tokens
        with world.policy.active(agent) as model, torch.no_grad():
            weight, bias = head_weights(model)
            inputs = TokenInputs(tokens.token_ids, tokens.sample_weights, tokens.advantages, support=tokens.support)
            options = LossOptions(temperature=0.8)
            logps = group_policy_loss(hidden_states(model, batch), weight, inputs, options, bias=bias).logps
        assert float((logps - tokens.sampling_logps).abs().max()) < world.tolerance


@pytest.mark.parametrize(("top_k", "top_p"), TRUNCATIONS)
def test_a_kept_support_is_what_the_definition_says(world: World, top_k: int, top_p: float) -> None:
    """The likeliest tokens at the sampling temperature: at most top_k, and of those the fewest that reach top_p."""
    asked = requests(SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, max_new_tokens=6, keep_support=True))
    actions = world.served.generate(asked)
    unkept_requests = [replace(request, sampling=replace(request.sampling, keep_support=False)) for request in asked]
    unkept = world.served.generate(unkept_requests)
    assert_logps_are_the_trainers(world, unkept_requests, unkept)
    for request, action, plain in zip(asked, actions, unkept, strict=True):
        assert action.token_ids == plain.token_ids
        assert plain.support == ()
        assert len(action.support) == len(action.token_ids)
        rows = trainer_logits(world.policy, action.agent, request.prompt_ids + action.token_ids)
        rows = rows[len(request.prompt_ids) - 1 : -1]
        for row, token, support in zip(rows, action.token_ids, action.support, strict=True):
            assert token in support
            assert list(support) == sorted(set(support))
            probabilities, order = (row / 0.8).softmax(-1).sort(descending=True)
            if top_k:
                probabilities = probabilities[:top_k] / probabilities[:top_k].sum()
            assert len(support) <= len(probabilities)
            left_out = order[~torch.isin(order, torch.tensor(support))]
            assert row[list(support)].min() >= row[left_out].max() - 2 * world.tolerance
            assert probabilities[: len(support) - 1].sum() < top_p + world.tolerance
            assert probabilities[: len(support)].sum() > top_p - world.tolerance
    assert_logps_with_support_are_the_trainers(world, asked, actions)


@pytest.mark.parametrize(("top_k", "top_p"), TRUNCATIONS)
def test_tokens_follow_the_distribution_over_their_support(world: World, top_k: int, top_p: float) -> None:
    prompt, count = prompts(1)[0], 1500
    sampling = SamplingParams(temperature=1.5, top_k=top_k, top_p=top_p, max_new_tokens=1, keep_support=True)
    asked = [Request("main", prompt, sampling, seed) for seed in range(count)]
    actions = world.served.generate(asked)
    assert len({action.support for action in actions}) == 1
    (support,) = actions[0].support
    (logits,) = support_logits(world.policy, asked[0], actions[0])
    expected = logits.softmax(-1)[list(support)] * count
    assert {action.token_ids[0]: action.sampling_logps[0] for action in actions} == {
        token: pytest.approx(float(logits.log_softmax(-1)[token]), abs=world.tolerance)
        for token in {action.token_ids[0] for action in actions}
    }
    observed = torch.bincount(torch.tensor([a.token_ids[0] for a in actions]), minlength=VOCAB_SIZE)[list(support)]
    assert int(observed.sum()) == count
    chi_squared = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(support) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations


def test_a_support_is_kept_for_each_request_that_asks_and_only_where_something_is_cut_off(world: World) -> None:
    keeps = SamplingParams(top_k=4, max_new_tokens=9, keep_support=True)
    all_of_it = replace(keeps, top_k=VOCAB_SIZE + 1)
    mix = (keeps, replace(keeps, keep_support=False), replace(keeps, top_k=0), replace(keeps, temperature=0), all_of_it)
    asked = [replace(r, sampling=mix[i % len(mix)]) for i, r in enumerate(requests(keeps))]
    for request, action in zip(asked, world.served.generate(asked), strict=True):
        if request.sampling == keeps:
            assert [len(ids) for ids in action.support] == [4] * len(action.token_ids)
        elif request.sampling == all_of_it:
            assert action.support == (tuple(range(VOCAB_SIZE)),) * len(action.token_ids)
        else:
            assert action.support == ()
        if request.sampling != keeps:
            assert_logps_are_the_trainers(world, [request], [action])


def test_one_batch_may_mix_sampling_parameters(world: World) -> None:
    kinds = (GREEDY, SamplingParams(temperature=1.0, max_new_tokens=7), SamplingParams(temperature=0.5, top_k=5))
    mix = tuple(SamplingParams(s.temperature, s.top_p, s.top_k, min(s.max_new_tokens, 9)) for s in kinds)
    asked = [
        Request(request.agent, request.prompt_ids, mix[i % len(mix)], request.seed)
        for i, request in enumerate(requests(GREEDY))
    ]
    actions = world.served.generate(asked)
    assert_logps_are_the_trainers(world, asked, actions)
    for request, action in zip(asked, actions, strict=True):
        if request.sampling.temperature == 0:
            assert_greedy(world, request, action)


def test_a_prompt_that_leaves_no_room_is_refused_before_sampling(world: World) -> None:
    fits = Request("main", (5,) * (MAX_LENGTH - 4), SamplingParams(max_new_tokens=4), 0)
    assert world.served.generate([fits])[0].agent == "main"
    too_long = Request("main", (5,) * (MAX_LENGTH - 3), SamplingParams(max_new_tokens=4), 0)
    seen: list[int] = []
    with pytest.raises(PromptTooLong, match=r"'main'.*125 tokens.*max_new_tokens = 4.*128") as caught:
        world.served.generate([fits, too_long], seen.append)
    assert isinstance(caught.value, ConfigError), "a user's mistake: one line, no traceback"
    assert pickle.loads(pickle.dumps(caught.value)).request == caught.value.request == too_long
    assert seen == []


def test_progress_counts_every_completion(world: World) -> None:
    asked = requests(SamplingParams(max_new_tokens=8))
    seen: list[int] = []
    world.served.generate(asked, seen.append)
    assert sum(seen) == len(asked)
    assert all(count > 0 for count in seen)


def test_no_requests_no_actions(world: World) -> None:
    assert world.served.generate([]) == []


@pytest.mark.parametrize("share", [0.8, *([0.01] if torch.cuda.is_available() else [])])
def test_sleep_and_wake_change_nothing(world: World, share: float) -> None:
    """On a GPU the trainer meanwhile takes a share of the free memory: a small one lets an engine keep its weights."""
    asked = requests(GREEDY, siblings=1, count=2)
    before = world.served.generate(asked)
    for _ in range(2):  # the first time the engine learns how much memory the trainer takes
        world.policy.lineup.release_cached_memory()
        if world.policy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        world.engine.sleep()
        if world.policy.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            torch.ones(int(share * free), dtype=torch.uint8, device="cuda")
        world.engine.wake()
    again = world.served.generate(asked)
    if world.policy.device.type == "cpu":
        assert again == before
    for request, action in zip(asked, again, strict=True):
        assert_greedy(world, request, action)
