"""The supervised child: messages, deadlines, and nothing left behind however either side ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from magrpo.process.child import Child, ProcessDied, last_words
from tests.processes import assert_all_end

ECHO = """
import sys
from multiprocessing.connection import Connection
channel = Connection(int(sys.argv[1]))
while True:
    message = channel.recv_bytes()
    if message == b"fail":
        raise ValueError("asked to fail")
    channel.send_bytes(message[::-1])
"""
# Starts three grandchildren, one in a session of its own and one whose parent has ended, tells their process ids, then
# hangs.
FAMILY = """
import subprocess, sys, time
from multiprocessing.connection import Connection
same, session = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)
orphan = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"], text=True)
channel = Connection(int(sys.argv[1]))
channel.send_bytes(f"{same.pid} {session.pid} {orphan}".encode())
time.sleep(600)
"""
# A trainer that starts a family from a thread that ends, prints the process ids, then hangs.
TRAINER = """
import os, sys, threading, time
from pathlib import Path
from magrpo.process.child import Child
def start():
    global child
    child = Child([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), os.environ)
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(child.receive().decode(), flush=True)
time.sleep(600)
"""


def start(script: str, folder: Path) -> Child:
    return Child([sys.executable, "-c", script], folder / "child.log", os.environ)


def read_processes(line: str | bytes) -> list[psutil.Process]:
    """The grandchildren that a family tells of."""
    return [psutil.Process(int(pid)) for pid in line.split()]


def test_messages_go_both_ways(tmp_path: Path) -> None:
    child = start(ECHO, tmp_path)
    large = os.urandom(3_000_000)
    for message in (b"abc", b"", large):
        child.send(message)
        assert child.receive() == message[::-1]
    child.kill()
    child.kill()
    assert not child.died


def test_a_failure_names_the_last_line_of_the_log(tmp_path: Path) -> None:
    child = start(ECHO, tmp_path)
    child.send(b"fail")
    with pytest.raises(ProcessDied, match=r"ended with status 1 \(ValueError: asked to fail\); log: .*child.log"):
        child.receive()
    assert child.died
    with pytest.raises(ProcessDied):
        child.send(b"abc")
    child.kill()


def test_a_missed_deadline_kills_the_group(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchildren = read_processes(child.receive())
    with pytest.raises(ProcessDied, match=r"killed at its deadline of 0.2 s"), child.enforce_deadline(0.2):
        child.receive()
    assert_all_end(grandchildren)
    child.kill()


def test_a_deadline_that_is_kept_changes_nothing(tmp_path: Path) -> None:
    child = start(ECHO, tmp_path)
    with child.enforce_deadline(60):
        child.send(b"ab")
        assert child.receive() == b"ba"
    child.kill()
    assert not child.died


def test_all_are_gone_when_kill_returns(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchildren = read_processes(child.receive())
    family = [*grandchildren, *grandchildren[0].parents()[:3]]  # the command and its two keepers
    child.kill()
    assert not any(process.is_running() for process in family)


def test_what_a_child_leaves_behind_is_killed(tmp_path: Path) -> None:
    child = start(FAMILY.replace("time.sleep(600)", "channel.recv_bytes()"), tmp_path)
    grandchildren = read_processes(child.receive())
    child.send(b"end")
    with pytest.raises(ProcessDied, match="ended with status 0"):
        child.receive()
    assert not any(process.is_running() for process in grandchildren)


@pytest.mark.parametrize("victim", ["trainer", "front", "back"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_a_death(tmp_path: Path, victim: str, sent: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, FAMILY, str(tmp_path / "child.log")], stdout=subprocess.PIPE, text=True
    ) as trainer:
        try:
            assert trainer.stdout is not None
            grandchildren = read_processes(trainer.stdout.readline())
            command, back, front, asker = grandchildren[0].parents()[:4]
            assert asker.pid == trainer.pid  # the thread that started the child has ended, and the child lives
            assert grandchildren[2].parent() == back
            {"trainer": trainer, "front": front, "back": back}[victim].send_signal(sent)
            assert_all_end([*grandchildren, command, back, front])
        finally:
            trainer.kill()


def test_an_interrupt_from_the_terminal_does_not_reach_the_child(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchildren = read_processes(child.receive())
    assert all(os.getsid(p.pid) != os.getsid(0) for p in [*grandchildren, *grandchildren[0].parents()[:3]])
    child.kill()


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("loading\nready\n\n", "ready"),
        ("Traceback:\n  File x\nValueError: a, b\n", "ValueError: a, b"),
        ("x.ValidationError: 1 error for Config\n  Value error: no such model\n    See the page\n",
         "x.ValidationError: 1 error for Config Value error: no such model See the page"),
        ("[rank0]:   File x\n[rank0]: AssertionError\n[rank0]:[W1122 16:11:37.6 Nccl.cpp:1] leak\n", "AssertionError"),
        ("[rank0]: ValueError: a\n[rank0]:   and b\n", "ValueError: a and b"),
        ("KeyError: 1\n\nDuring handling\n  raise\nTypeError: second\n", "TypeError: second"),
    ],
)  # fmt: skip
def test_last_words_are_the_last_error_with_its_message(log: str, words: str) -> None:
    assert last_words(log) == words
