"""Two real vLLM servers: the samples of one, and the same samples while a server is stopped, outdated or killed.

That a server is killed while it truncates comes last: nobody starts it again.
"""

from __future__ import annotations

import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.config.place import EnginePlace
from magrpo.engines.pool import PoolEngine
from magrpo.engines.roster import Patience
from magrpo.engines.vllm import VllmEngine
from magrpo.engines.vllm_place import make_jobs
from magrpo.fleets import Running
from magrpo.fleets.local import LocalFleet
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.process.children import find_running, list_family, send_signal
from magrpo.stages.probe import compute_probes, write_probes
from magrpo.types import Action, Request, SamplingParams
from tests.tiny import perturb, tiny_base

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
KEY = "secret"
AGENTS = ("helper", "main")
ASKED = [
    Request(agent, tuple(range(5, 15 + i)), SamplingParams(max_new_tokens=100), seed=100 * i + g)
    for i in range(8)
    for agent in AGENTS
    for g in range(4)
]


@dataclass
class World:
    """Two servers that somebody else runs, as far as engines know, and three versions of weights."""

    host: EngineHost
    servers: list[Running]
    folders: dict[int, dict[str, Path]]
    alone: list[Action]
    """The samples of the first server alone, from version 1."""

    def open(self, *numbers: int, silence_s: float = 60.0) -> PoolEngine:
        urls = tuple(f"http://{self.servers[i].host}:{self.servers[i].port}" for i in numbers)
        place = EnginePlace(servers=urls, max_batch=8)
        return PoolEngine(
            replace(self.host, place=place), {}, KEY, Patience(silence_s=silence_s, check_s=0.2, return_s=0.2)
        )

    def family(self, number: int) -> list[psutil.Process]:
        """The processes of a server, its first one first."""
        port = str(self.servers[number].port)
        servers = find_running(list_family(os.getpid()), "vllm.entrypoints.openai.api_server")
        [first] = [server for server in servers if port in server.cmdline()]
        return [first, *list_family(first.pid)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("pool")
    base = str(tiny_base(root / "base"))
    agents = [AgentConfig(name=name, role=name, model=base) for name in AGENTS]
    policy = Policy.open(agents, ModelConfig(device="cpu"), LoraConfig(rank=4), seed=0)
    folders = {}
    for version in (1, 2):
        perturb(policy, seed=version)
        folders[version] = policy.save(root / f"version-{version}")
        write_probes(root / f"version-{version}", compute_probes(policy))
    fleet = LocalFleet()
    host = replace(
        EngineHost.of(policy), fleet=fleet, place=EnginePlace(servers=2), shares_gpus=False, logs=root / "logs"
    )
    engine = PoolEngine(host, make_jobs(host, VllmEngine(cpu_cache_gib=0.1).options, KEY), KEY)  # starts and waits
    roster: Any = engine._dispatcher.roster
    servers = [server.running for server in roster._serving]
    world = World(host, servers, folders, [])
    try:
        alone = world.open(0)
        world.alone = alone.serve(1, folders[1]).generate(ASKED)
        alone.close()
        yield world
    finally:
        engine.close()
        fleet.close()


def tokens(actions: list[Action]) -> list[tuple[int, ...]]:
    return [action.token_ids for action in actions]


def test_a_server_has_no_process_that_spins_while_it_waits_for_another(world: World) -> None:
    names = [process.name() for process in world.family(0)]
    assert any("EngineCore" in name for name in names), names
    assert not any("Worker" in name for name in names), names


def test_two_servers_give_the_samples_of_one(world: World) -> None:
    engine = world.open(0, 1)
    served = engine.serve(1, world.folders[1])
    assert tokens(served.generate(ASKED)) == tokens(world.alone)
    engine.close()


def test_a_server_with_an_old_version_under_the_new_name_loads_the_new_one(world: World, tmp_path: Path) -> None:
    """The folder had the weights of version 2 when the server loaded it, and has those of version 1 now."""
    weights = tmp_path / "weights"
    shutil.copytree(world.folders[1]["helper"].parent, weights)
    folders = {agent: weights / agent for agent in AGENTS}
    first = world.open(0, 1)
    names = {agent: adapter.name for agent, adapter in first.serve(1, folders).by_agent.items() if adapter}
    first.close()
    shutil.rmtree(weights)
    shutil.copytree(world.folders[2]["helper"].parent, weights)
    (weights / "probe.json").unlink()
    second = world.open(1)
    roster: Any = second._dispatcher.roster
    [server] = roster._serving
    for agent in AGENTS:
        second._wait(server._client.load_adapter(names[agent], weights / agent))
    shutil.rmtree(weights)
    shutil.copytree(world.folders[1]["helper"].parent, weights)
    engine = world.open(0, 1)
    assert tokens(engine.serve(1, folders).generate(ASKED)) == tokens(world.alone)
    engine.close()
    second.close()


def test_a_stopped_server_leaves_in_the_middle_of_a_batch(world: World, caplog: pytest.LogCaptureFixture) -> None:
    engine = world.open(0, 1, silence_s=15.0)
    served = engine.serve(1, world.folders[1])
    finished: list[int] = []
    family = world.family(1)

    def stop(count: int) -> None:
        finished.append(count)
        if len(finished) == 10:
            send_signal(family, signal.SIGSTOP)

    try:
        assert tokens(served.generate(ASKED, stop)) == tokens(world.alone)
    finally:
        send_signal(family, signal.SIGCONT)
    assert sum(finished) == len(ASKED)
    assert "was removed from the pool" in caplog.text
    assert "did not answer within 15 s" in caplog.text
    engine.close()


def test_the_extension_asks_for_the_key(world: World) -> None:
    for path in ("watch", "load", "generate"):
        url = f"http://{world.servers[0].host}:{world.servers[0].port}/inference/magrpo/{path}"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(url, data=b"{}"), timeout=60)


def test_a_server_killed_in_the_middle_of_a_batch_leaves_support_as_it_was(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = SamplingParams(max_new_tokens=100, top_p=0.9, top_k=20, keep_support=True)
    asked = [replace(request, sampling=sampling) for request in ASKED]
    alone = world.open(0)
    expected = alone.serve(1, world.folders[1]).generate(asked)
    alone.close()
    engine = world.open(0, 1)
    served = engine.serve(1, world.folders[1])
    finished: list[int] = []
    family = world.family(1)

    def kill(count: int) -> None:
        finished.append(count)
        if len(finished) == 10:
            send_signal(family, signal.SIGKILL)

    actions = served.generate(asked, kill)
    assert tokens(actions) == tokens(expected)
    assert [action.support for action in actions] == [action.support for action in expected]
    for action, other in zip(actions, expected, strict=True):
        assert action.sampling_logps == pytest.approx(other.sampling_logps, abs=1e-4)
    assert sum(finished) == len(asked)
    assert "was removed from the pool: lost the connection to http" in caplog.text
    engine.close()
