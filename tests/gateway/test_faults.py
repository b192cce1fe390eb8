"""Many episodes at once, one in four of which goes wrong: each ends as it should, and the others do not notice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest

from magrpo.envs.program import AgentProgram
from magrpo.gateway.player import EpisodePlayer
from magrpo.model.lineup import Lineup
from tests.fakes import Clock
from tests.gateway.playing import FakeModel, make_services, make_tasks
from tests.process_state import use_temporary_folder
from tests.processes import assert_all_end, find_running

PROGRAM = """
import http.client, json, os, signal, socket, struct, time
from urllib.parse import urlsplit


def solve(problem, agents):
    globals()[problem.prompt](agents)
    return agents["planner"].ask("well") + agents["coder"].ask("done")


def behave(agents):
    pass


def crash(agents):
    agents["planner"].ask("well")
    raise RuntimeError("crash")


def kill(agents):
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(agents):
    agents["planner"].ask("well")
    while True:
        time.sleep(60)


def post(agents, body, headers):
    address = urlsplit(agents.url)
    connection = http.client.HTTPConnection(address.hostname, address.port)
    connection.request("POST", f"{address.path}/v1/chat/completions", body, headers)
    return connection


BODY = json.dumps({"model": "coder", "messages": [{"role": "user", "content": "hi"}], "stream": True})


def send_nonsense(agents):
    for body in (b"\\xff", b"{", BODY.replace("user", "\\\\ud800")[:-1].encode(), b'{"model": 1}'):
        assert post(agents, body, {}).getresponse().status == 400


def drop(agents):
    connection = post(agents, BODY, {})
    answer = connection.getresponse()
    assert answer.read(10).startswith(b"data: ")
    answer.fp.raw._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    answer.close()
    connection.close()


def retry(agents):
    first = post(agents, BODY, {"x-stainless-retry-count": "0"}).getresponse().read()
    again = post(agents, BODY, {"x-stainless-retry-count": "1"}).getresponse().read()
    assert again == first
"""
OUTCOMES = {
    "crash": ("failed", "RuntimeError: crash", 1),
    "kill": ("failed", "signal 11", 0),
    "hang": ("timed_out", "took longer than env.time_limit_s = 3600", 1),
    "send_nonsense": ("finished", "", 2),
    "drop": ("finished", "", 3),
    "retry": ("finished", "", 3),
    "behave": ("finished", "", 2),
}
"""Status, message and number of calls of each kind of episode."""


@pytest.mark.parametrize(
    ("fresh", "num_episodes"), [(False, 256), (True, 64)], ids=["reused processes", "fresh processes"]
)
def test_many_episodes_with_faults(
    lineup: Lineup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool, num_episodes: int
) -> None:
    num_of_each = num_episodes // 20  # 5 % of each fault
    (tmp_path / "faulty.py").write_text(PROGRAM)
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    use_temporary_folder(monkeypatch, tmp_path / "temporary")
    kinds = [kind for kind in OUTCOMES if kind != "behave" for _ in range(num_of_each)]
    kinds += ["behave"] * (num_episodes - len(kinds))
    num_calls = sum(OUTCOMES[kind][2] for kind in kinds)
    num_ended = Counter[str]()
    clock, model = Clock(), FakeModel(lineup)

    def advance(number: int) -> None:
        num_ended["all"] += number

    def get_time() -> float:
        """The clock goes once every call has been sampled and only those episodes are left that hang."""
        if num_ended["all"] >= num_episodes - num_of_each and len(model.requests) == num_calls:
            clock.now += 1e6
        return clock.now

    env = AgentProgram(run="faulty:solve", time_limit_s=3600.0, fresh_processes=fresh, concurrency=num_episodes)
    player = EpisodePlayer(env, lineup, get_time)
    played = player.play(make_tasks(*kinds), make_services(model.generate, advance))
    outcomes = [(kind, (one.status, one.message, len(one.calls))) for kind, one in zip(kinds, played, strict=True)]
    assert Counter(outcomes) == Counter((kind, OUTCOMES[kind]) for kind in kinds)
    assert all(one.result == "planner: wellcoder: done" for one in played if one.status == "finished")
    assert num_ended["all"] == num_episodes
    recorded = Counter(request.seed for request in model.requests)
    assert sum(recorded.values()) == sum(len(one.calls) for one in played), "each call was sampled once"
    assert max(recorded.values()) == 1, "and with a seed of its own"
    servers = find_running(psutil.Process().children(), "magrpo.gateway.forkserver")
    workers = [worker for server in servers for worker in server.children()]
    player.close()
    assert_all_end(workers)
    assert list((tmp_path / "temporary").iterdir()) == []
