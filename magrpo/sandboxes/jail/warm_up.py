"""Runs the code of candidates and testers in the zygote, before it forks any, on a program of its own.

CPython adapts code that runs repeatedly and remembers where it found attributes. Processes forked later inherit what it
learned here; otherwise each would learn it again, and copy the memory that holds it.
"""

import json
import marshal
import os
import socket
import sys
import time
from _thread import start_new_thread
from base64 import b64encode
from typing import Any

from . import candidate, tester, wire
from .candidate_process import CandidateProcess
from .confine import Limits

ROUNDS = 20
CHECK = """
for n in range(3):
    __magrpo__.begin()
    __magrpo__.verdict("candidate(n) == n", True, candidate(n) == n)
"""
TEST = marshal.dumps(compile(CHECK, "<test>", "exec"))
PROGRAM = {"source": "def f(n):\n    return n\n", "entry_point": "f", "watch": "", "may_share": False}
JOB: dict[str, Any] = {**PROGRAM, "code": b64encode(TEST).decode(), "needs": [], "verdict": None}


def warm_up(limits: Limits) -> None:
    """Let a tester judge a plain program, two jobs at a time; the candidates run in threads of this process."""
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    before = count_threads()  # packages may have started some, which a fork does not copy
    for _ in range(ROUNDS):
        parent, connection = socket.socketpair()
        requests, zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with parent, connection, requests, zygote, start_candidate() as second:
            socket.send_fds(zygote, [json.dumps([0, 0.0, 0, os.getpid()]).encode()], [second.fileno()])
            process = CandidateProcess(start_candidate(), os.getpid(), proc)
            wire.send_message(parent, [JOB, JOB])
            tester.serve_jobs(connection, requests, process, limits, False)
            reader = wire.FrameReader(parent, 1 << 20)
            for _ in range(2):
                report = reader.read_message(lambda: None)
                assert report.get("cases") == [["pass", ""]] * 3, report
            second.shutdown(socket.SHUT_RDWR)
        while count_threads() > before:
            time.sleep(1e-4)
    os.close(proc)
    del sys.modules[candidate.MODULE], sys.modules["test"]


def count_threads() -> int:
    """Count the threads of this process."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - pathlib is slow to import


def start_candidate() -> socket.socket:
    """Start a candidate in a thread of this process and return the channel to it."""
    channel, far = socket.socketpair()
    start_new_thread(candidate.CandidateServer(far).serve_calls, ())
    return channel
