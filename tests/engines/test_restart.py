"""A vLLM server that dies in the middle of a batch: a new one is asked for what is missing, and for nothing else.

The servers here are scripted and speak the real protocol; tests/engines/test_vllm.py does it with vLLM itself.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from magrpo.config.agents import AgentConfig, LoraConfig, ModelConfig
from magrpo.engines import EngineError
from magrpo.engines.vllm import VllmEngine
from magrpo.model.host import EngineHost
from magrpo.model.policy import Policy
from magrpo.types import Request, SamplingParams
from tests.engines.scripted import script_servers
from tests.tiny import EOS, tiny_policy

# Appends every call to a file. Answers one item at a time with its seed, and dies after as many as the file `die-after`
# says; each server takes one word from it. Where there is a file `hangs`, it says so and never answers. Where there is
# a file `waits`, the server of the agent `first` waits for the file that it names, such as `sent`, which that of
# `second` makes once it has sent more than a socket holds.
SERVER = """
import os, sys, time
from multiprocessing.connection import Connection
from pathlib import Path
import msgspec
from magrpo.engines.vllm_server import Done, Finished, Generate, LoadAdapters, ServerCall
folder = Path(os.environ["SCRIPT"])
channel, decoder = Connection(int(sys.argv[1])), msgspec.msgpack.Decoder(ServerCall)
dies = (folder / "die-after").read_text().split()
(folder / "die-after").write_text(" ".join(dies[1:]))
left = int(dies[0]) if dies else 10**6
while True:
    call = decoder.decode(channel.recv_bytes())
    with (folder / "calls").open("ab") as calls:
        calls.write(msgspec.json.encode(call) + b"\\n")
    if isinstance(call, Generate) and (folder / "hangs").exists():
        print("out of ideas", flush=True)
        (folder / "hanging").touch()
        time.sleep(1000)
    for number, item in call.items.items() if isinstance(call, Generate) else ():
        if not left:
            raise RuntimeError("out of breath")
        left -= 1
        length = 1
        if (folder / "waits").exists():
            awaited = folder / (folder / "waits").read_text()
            while item.agent == "first" and not awaited.exists():
                time.sleep(0.01)
            length = 100_000
        tokens = [item.seed] * length + [STOP]
        channel.send_bytes(msgspec.msgpack.encode(Finished({number: (tokens, [-1.0] * len(tokens))})))
        if item.agent == "second":
            (folder / "sent").touch()
    channel.send_bytes(msgspec.msgpack.encode(Done()))
"""
ASKED = [Request("main", (5, 6, 7), SamplingParams(max_new_tokens=5), seed) for seed in range(10, 18)]


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A policy of one agent; a vLLM engine opened for it runs ``SERVER``, which logs its calls in ``tmp_path``."""
    (tmp_path / "die-after").touch()
    command = [sys.executable, "-c", SERVER.replace("STOP", str(EOS))]
    script_servers(monkeypatch, lambda: command)
    monkeypatch.setenv("SCRIPT", str(tmp_path))
    return tiny_policy(tmp_path)


def asked(folder: Path) -> list[list[int]]:
    """The numbers of the items of every Generate so far."""
    calls = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    return [list(map(int, call["items"])) for call in calls if call["type"] == "Generate"]


def kinds(folder: Path) -> list[str]:
    return [json.loads(line)["type"] for line in (folder / "calls").read_text().splitlines()]


def test_only_what_is_missing_is_asked_for_again(
    tmp_path: Path, policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "die-after").write_text("3 0")
    engine = VllmEngine().open(EngineHost.of(policy))
    counts: list[int] = []
    try:
        actions = engine.serve(1, policy.save(tmp_path / "weights")).generate(ASKED, counts.append)
    finally:
        engine.close()
    assert [action.token_ids[0] for action in actions] == [request.seed for request in ASKED]
    assert sum(counts) == len(ASKED)
    assert asked(tmp_path) == [list(range(8)), list(range(3, 8)), list(range(3, 8))]
    assert kinds(tmp_path) == ["CreateEngine", "LoadAdapters", "Generate"] * 3, (
        "a new server has the weights of the old"
    )
    assert "out of breath" in caplog.text
    assert "3 of 8 completions are done, restarting the server for the rest" in caplog.text


def test_the_third_death_is_an_error(tmp_path: Path, policy: Policy) -> None:
    (tmp_path / "die-after").write_text("1 1 1")
    engine = VllmEngine().open(EngineHost.of(policy))
    try:
        with pytest.raises(EngineError, match=r"the vLLM server of main ended with status 1 .*out of breath.*log: "):
            engine.serve(0, {}).generate(ASKED)
    finally:
        engine.close()
    assert asked(tmp_path) == [list(range(done, 8)) for done in range(3)]


def ask_two_servers(policy: Policy) -> list[tuple[str, int]]:
    """Ask an engine with the servers of the agents ``first`` and ``second``; returns agents and first tokens."""
    names, base = ("first", "second"), policy.lineup.base("main")
    agents = [AgentConfig(name=name, role=name, model=base, weights="full") for name in names]
    both = Policy.open(agents, ModelConfig(device="cpu"), LoraConfig(), seed=0)
    engine = VllmEngine(deadline_s=120).open(EngineHost.of(both))
    try:
        actions = engine.serve(0, {}).generate([replace(ASKED[0], agent=name) for name in names])
    finally:
        engine.close()
    return [(action.agent, action.token_ids[0]) for action in actions]


def test_no_server_waits_until_another_is_done(tmp_path: Path, policy: Policy) -> None:
    (tmp_path / "waits").write_text("sent")
    assert ask_two_servers(policy) == [("first", 10), ("second", 10)]


def test_a_server_that_is_done_has_no_deadline_while_another_goes_on(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MarkedTimer(threading.Timer):
        """Makes the file that the server ``first`` waits for, once that of ``second`` has sent its answers."""

        def cancel(self) -> None:
            super().cancel()
            if (tmp_path / "sent").exists():
                (tmp_path / "cancelled").touch()

    monkeypatch.setattr(threading, "Timer", MarkedTimer)
    (tmp_path / "waits").write_text("cancelled")
    assert ask_two_servers(policy) == [("first", 10), ("second", 10)]


def test_a_server_that_hangs_is_killed_and_not_asked_again(
    tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PatientTimer(threading.Timer):
        """Starts once the server hangs."""

        def run(self) -> None:
            while not (tmp_path / "hanging").exists() and not self.finished.is_set():
                time.sleep(0.01)
            super().run()

    monkeypatch.setattr(threading, "Timer", PatientTimer)
    (tmp_path / "hangs").touch()
    engine = VllmEngine(deadline_s=0.5).open(EngineHost.of(policy))
    try:
        served = engine.serve(0, {})
        with pytest.raises(EngineError, match=r"server of main was killed at its deadline of 0.5 s.*log: ") as caught:
            served.generate(ASKED)
        log = Path(str(caught.value).rpartition("log: ")[2]).read_text(encoding="utf-8")
        with pytest.raises(EngineError, match="server of main"):
            served.generate(ASKED)
    finally:
        engine.close()
    assert asked(tmp_path) == [list(range(8))]
    assert "out of ideas" in log
