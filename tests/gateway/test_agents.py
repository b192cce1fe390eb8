"""The agents as programs see them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from magrpo.gateway.agents import Agents, GatewayRefused
from tests.gateway.playing import AGENTS, FakeModel, OpenGateway, open_gateway


@pytest.fixture
def gateway(model: FakeModel) -> Iterator[OpenGateway]:
    with open_gateway(model) as opened:
        yield opened


@pytest.fixture
def agents(gateway: OpenGateway) -> Agents:
    return Agents(gateway.url, gateway.TOKEN, AGENTS, seed=5)


def test_agents_are_asked_with_a_text_or_with_messages(agents: Agents, gateway: OpenGateway) -> None:
    assert agents["planner"].ask("hello") == "planner: hello"
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "good"}]
    assert agents["coder"].ask(messages, max_tokens=8) == "coder: g"
    assert [request.sampling.max_new_tokens for request in gateway.model.requests][1] == 8


def test_agents_are_a_mapping(agents: Agents) -> None:
    assert (list(agents), len(agents), "coder" in agents, "nobody" in agents) == ([*AGENTS], 2, True, False)
    with pytest.raises(KeyError, match="no agent 'nobody'; there are: planner, coder"):
        agents["nobody"]


def test_refusals_are_exceptions_with_the_reason(agents: Agents, gateway: OpenGateway) -> None:
    with pytest.raises(GatewayRefused, match=r"response_format: not supported.* from another distribution"):
        agents["planner"].ask("hello", response_format={"type": "json_object"})
    gateway.session.seal()
    with pytest.raises(GatewayRefused, match="the episode has ended"):
        agents["planner"].ask("hello")


def test_code_runs_in_the_sandbox(agents: Agents) -> None:
    report = agents.run_code("def f(): ...", "f", "def check(f): ...")
    assert (report["status"], report["cases"][0]["status"]) == ("pass", "pass")


def test_clients_of_openai(agents: Agents) -> None:
    request = {"model": "coder", "messages": [{"role": "user", "content": "hello"}]}
    with agents["planner"].client(max_retries=0) as client:
        assert client.chat.completions.create(**request).choices[0].message.content == "coder: hello"
    assert agents["planner"].async_client().base_url.path.endswith("/v1/")


def test_episodes_load_no_library() -> None:
    code = "import magrpo.gateway.forkserver, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "aiohttp", "openai", "numpy"} & set(done.stdout.split())
