"""Samplers: two give the tokens of one and of one process, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.cluster import samplers
from magrpo.cluster.connection import Cluster
from magrpo.cluster.dealing import NotOpen
from magrpo.cluster.samplers import SamplerActor, SamplerEngine, SamplerSetting, Share, split_requests
from magrpo.config.place import Place
from magrpo.config.run import RunConfig, load_config
from magrpo.engines import EngineError, PromptTooLong
from magrpo.engines.transformers import TransformersEngine
from magrpo.errors import ConfigError
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.types import Action, Request, SamplingParams
from pipelines.arguments import locate_config
from tests.processes import assert_all_end, find_actors
from tests.tiny import perturb, tiny_base, tiny_config

AGENTS = ("helper", "main")
LONG = SamplingParams(max_new_tokens=100)
Tokens = list[tuple[str, int, tuple[int, ...]]]
"""Agent, policy version and tokens of each completion."""


class Trained(NamedTuple):
    """A policy whose weights have moved, and where they are saved."""

    config: RunConfig
    policy: Policy
    weights: Mapping[str, Path]


def make_trained(folder: Path, *changes: str) -> Trained:
    """The team of the embedded configuration on a CPU, with a tiny base model."""
    base = tiny_base(folder / "base", tiny_config(max_length=128))
    models = [f"agents.{i}.model={base}" for i in range(len(AGENTS))]
    sizes = ["lora.rank=4", "rollout.max_new_tokens=100", "model.device=cpu", "engine.kind=transformers"]
    config = load_config(locate_config("embedded"), [*models, *sizes, *changes])
    policy = Policy.open(config.agents, config.model, config.lora, config.train.seed)
    perturb(policy, seed=1, scale=0.05)
    return Trained(config, policy, policy.save(folder / "weights"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Its samplers have small batches: a share takes seconds, so that its progress is seen, and a kill meets it."""
    return make_trained(tmp_path_factory.mktemp("samplers"), "engine.max_batch=4")


@pytest.fixture(scope="module")
def expected(trained: Trained) -> Tokens:
    """What one process answers to the requests."""
    alone = TransformersEngine().open(EngineHost.of(trained.policy))
    return list_tokens(alone.serve(3, trained.weights).generate(make_requests()))


@contextmanager
def open_samplers(cluster: Cluster, trained: Trained, count: int) -> Iterator[SamplerEngine]:
    """Yield an engine of ``count`` samplers, then close it twice, which must be harmless."""
    place = Place.model_validate({"samplers": {"count": count}})
    engine = SamplerEngine(cluster, place, trained.config, trained.policy.lineup, num_served=1)
    try:
        yield engine
    finally:
        engine.close()
        engine.close()


def make_requests(prompts: int = 6, siblings: int = 4) -> list[Request]:
    """``siblings`` requests with different seeds for each agent and each of ``prompts`` prompts of growing length."""
    return [
        Request(agent, tuple(range(3, 6 + prompt)), LONG, seed=1000 * prompt + sibling)
        for prompt in range(prompts)
        for agent in AGENTS
        for sibling in range(siblings)
    ]


def list_tokens(actions: list[Action]) -> Tokens:
    return [(action.agent, action.policy_version, action.token_ids) for action in actions]


def test_two_samplers_give_the_tokens_and_errors_of_one_process(
    cluster: Cluster, trained: Trained, expected: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when one of them is killed in the middle of the batch, which it reports on often."""
    monkeypatch.setattr("magrpo.cluster.dealing._POLL_S", 0.02)
    few, requests, reported, killed = make_requests(2), make_requests(), list[int](), list[int]()

    def report_and_kill_one(count: int) -> None:
        reported.append(count)
        if not killed:
            killed.append(find_actors("SamplerActor")[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    with open_samplers(cluster, trained, 2) as two:
        served = two.serve(3, trained.weights)
        assert list_tokens(served.generate(few)) == expected[: len(few)]
        assert list_tokens(served.generate(requests, report_and_kill_one)) == expected
        assert killed
        assert sum(reported) == len(requests)
        assert len(reported) > 2, "progress within a share"
        again = list_tokens(served.generate(few))
        assert again == expected[: len(few)], "the restarted sampler has loaded the weights again"
        served.close()
        with pytest.raises(PromptTooLong):
            two.serve(0, {}).generate([Request("main", tuple(range(3, 103)), LONG, 0)])
        with pytest.raises(ConfigError, match="cannot read the weights of 'main'"):
            two.serve(1, {"main": tmp_path / "nowhere"}).generate(make_requests(1))
    with pytest.raises(EngineError, match="the samplers were closed"):
        two.serve(0, {}).generate(make_requests(1))
    assert_all_end(find_actors("SamplerActor"))


def test_a_sampler_loads_its_engine_when_it_is_opened_and_wakes_it_when_opened_again(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler that Ray restarts during an update leaves the GPU alone."""
    engine, loaded = Mock(), list[str]()

    def load(*_: object) -> Mock:
        loaded.append("an engine")
        return engine

    monkeypatch.setattr(samplers, "prepare_actor", lambda *_: None)
    monkeypatch.setattr(samplers, "open_engine_plugin", load)
    actor = SamplerActor(SamplerSetting(trained.config, num_served=1, num_threads=1, gpus=0, owns_gpus=False))
    actor.sleep()
    with pytest.raises(NotOpen):
        actor.work(Share(0, 0, {}, []))
    assert not loaded
    actor.open()
    actor.sleep()
    actor.open()
    assert loaded == ["an engine"]
    assert engine.mock_calls == [call.sleep(), call.wake()]


@given(
    prompts=st.lists(st.tuples(st.sampled_from(AGENTS), st.integers(1, 4), st.integers(1, 5)), max_size=30),
    num_shares=st.integers(1, 5),
)
def test_shares_keep_siblings_together_and_leave_nothing_out(
    prompts: list[tuple[str, int, int]], num_shares: int
) -> None:
    requests = [
        Request(agent, (prompt,), LONG, sibling) for agent, prompt, siblings in prompts for sibling in range(siblings)
    ]
    shares = split_requests(requests, num_shares)
    assert sorted(i for share in shares for i in share) == list(range(len(requests)))
    of_prompt = [{(requests[i].agent, requests[i].prompt_ids) for i in share} for share in shares]
    assert sum(map(len, of_prompt)) == len({(request.agent, request.prompt_ids) for request in requests})


@pytest.mark.slow
@pytest.mark.vllm
def test_two_samplers_with_vllm_give_the_tokens_of_one(cluster: Cluster, tmp_path: Path) -> None:
    """Killed together with the actor, the process of vLLM ends too."""
    trained = make_trained(tmp_path, "engine.kind=vllm", "engine.cpu_cache_gib=0.2")
    requests = make_requests(4)
    with open_samplers(cluster, trained, 2) as two:
        served = two.serve(1, trained.weights)
        tokens = list_tokens(served.generate(requests))
        family = [process for sampler in find_actors("SamplerActor") for process in sampler.children(recursive=True)]
        assert len(family) >= 2
        victim = find_actors("SamplerActor")[0]
        of_victim = victim.children(recursive=True)
        victim.kill()
        assert_all_end(of_victim)
        assert list_tokens(served.generate(requests)) == tokens
    assert_all_end(family)
    alone = trained.config.engine.open(EngineHost.of(trained.policy))
    try:
        assert list_tokens(alone.serve(1, trained.weights).generate(requests)) == tokens
    finally:
        alone.close()
