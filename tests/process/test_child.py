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
# Starts a grandchild, sends its process id, then hangs.
FAMILY = """
import subprocess, sys, time
from multiprocessing.connection import Connection
grandchild = subprocess.Popen(["sleep", "600"])
channel = Connection(int(sys.argv[1]))
channel.send_bytes(str(grandchild.pid).encode())
time.sleep(600)
"""
# Ends with the process whose id it is given, and does nothing until then.
ORPHAN = """
import sys, time
from multiprocessing.connection import Connection
from magrpo.process.parent import exit_with_parent
exit_with_parent(int(sys.argv[1]))
Connection(int(sys.argv[2])).send_bytes(b"ready")
time.sleep(600)
"""
# A trainer that starts a child from a thread that ends, prints the child's process id, then hangs.
TRAINER = """
import os, sys, threading, time
from pathlib import Path
import psutil
from magrpo.process.child import Child
def start():
    global child
    child = Child([sys.executable, "-c", sys.argv[1], str(os.getpid())], Path(sys.argv[2]), os.environ)
thread = threading.Thread(target=start)
thread.start()
thread.join()
child.receive()
[process] = psutil.Process().children()
print(process.pid, flush=True)
time.sleep(600)
"""


def start(script: str, folder: Path) -> Child:
    return Child([sys.executable, "-c", script], folder / "child.log", os.environ)


def read_process(message: bytes) -> psutil.Process:
    """The grandchild whose id a family has sent."""
    return psutil.Process(int(message))


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
    grandchild = read_process(child.receive())
    with pytest.raises(ProcessDied, match=r"killed at its deadline of 0.2 s"), child.enforce_deadline(0.2):
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


def test_a_killed_child_leaves_no_process(tmp_path: Path) -> None:
    child = start(FAMILY, tmp_path)
    grandchild = read_process(child.receive())
    family = [grandchild, *grandchild.parents()[:1]]
    assert os.getsid(grandchild.pid) != os.getsid(0), "an interrupt from the terminal reaches them"
    child.kill()
    assert_all_end(family)


def test_processes_that_a_child_leaves_behind_are_killed(tmp_path: Path) -> None:
    child = start(FAMILY.replace("time.sleep(600)", "channel.recv_bytes()"), tmp_path)
    grandchild = read_process(child.receive())
    child.send(b"end")
    with pytest.raises(ProcessDied, match="ended with status 0"):
        child.receive()
    assert_all_end([grandchild])


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_trainer(tmp_path: Path, sent: signal.Signals) -> None:
    """But not with the thread of the trainer that started it."""
    command = [sys.executable, "-c", TRAINER, ORPHAN, str(tmp_path / "child.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            child = psutil.Process(int(trainer.stdout.readline()))
            trainer.send_signal(sent)
            assert_all_end([child])
        finally:
            trainer.kill()


def test_a_child_whose_parent_has_ended_exits_at_once(tmp_path: Path) -> None:
    program = "import os; from magrpo.process.parent import exit_with_parent; exit_with_parent(1); print('on')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")


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
