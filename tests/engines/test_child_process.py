"""The supervised child: messages, deadlines, and nothing left behind however either side ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from magrpo.engines import EngineError
from magrpo.engines.child_process import Child, last_words

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
# Starts a grandchild, tells its process id, then hangs.
FAMILY = """
import subprocess, sys, time
from multiprocessing.connection import Connection
grandchild = subprocess.Popen(["sleep", "600"])
channel = Connection(int(sys.argv[1]))
channel.send_bytes(str(grandchild.pid).encode())
time.sleep(600)
"""
# A trainer that starts a family from a thread that ends, prints the process ids, then hangs.
TRAINER = """
import os, sys, threading, time
from pathlib import Path
from magrpo.engines.child_process import Child
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


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_all_end(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 60
    while not all(map(ended, processes)):
        assert time.monotonic() < deadline, f"still running: {processes}"
        time.sleep(0.02)


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
    with pytest.raises(EngineError, match=r"ended with status 1 \(ValueError: asked to fail\); log: .*child.log"):
        child.receive()
    assert child.died
    with pytest.raises(EngineError):
        child.send(b"abc")
    child.kill()


def test_a_missed_deadline_kills_the_group(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchild = psutil.Process(int(child.receive()))
    with pytest.raises(EngineError, match=r"killed at its deadline of 0.2 s"), child.enforce_deadline(0.2):
        child.receive()
    assert_all_end([grandchild])
    child.kill()


def test_a_deadline_that_is_kept_changes_nothing(tmp_path: Path) -> None:
    child = start(ECHO, tmp_path)
    with child.enforce_deadline(60):
        child.send(b"ab")
        assert child.receive() == b"ba"
    child.kill()
    assert not child.died


def test_kill_ends_the_group(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchild = psutil.Process(int(child.receive()))
    family = grandchild.parents()[:2]  # the command and its keeper
    child.kill()
    assert_all_end([grandchild, *family])


def test_the_group_of_a_child_that_ended_is_killed(tmp_path: Path) -> None:
    child = start(FAMILY.replace("time.sleep(600)", ""), tmp_path)
    grandchild = int(child.receive())
    with pytest.raises(EngineError, match="ended with status 0"):
        child.receive()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(grandchild) and not ended(psutil.Process(grandchild)):
        assert time.monotonic() < deadline


@pytest.mark.parametrize("victim", ["trainer", "keeper"])
def test_nothing_survives_kill_9(tmp_path: Path, victim: str) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, FAMILY, str(tmp_path / "child.log")], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    grandchild = psutil.Process(int(trainer.stdout.readline()))
    family = descendants(trainer.pid)
    keeper = next(process for process in family if process.ppid() == trainer.pid)
    assert len(family) == 3  # the thread that started the child has ended, and the child lives
    assert grandchild in family
    if victim == "trainer":
        trainer.kill()
        assert_all_end(family)
    else:
        keeper.send_signal(signal.SIGKILL)
        assert_all_end([process for process in family if process != grandchild])
        grandchild.kill()
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()


def test_an_interrupt_from_the_terminal_does_not_reach_the_child(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchild = psutil.Process(int(child.receive()))
    assert all(os.getsid(p.pid) != os.getsid(0) for p in [grandchild, *grandchild.parents()[:2]])
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
