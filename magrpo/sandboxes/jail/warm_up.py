"""Runs the code of candidates and testers in the zygote, before it forks any, on a program of its own.

CPython adapts code that runs repeatedly and remembers where it found attributes. What it has learned here holds in
every process forked later, which would otherwise learn it again, and for that copy the memory it stands in.
"""

import marshal
import os
import random
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
PROGRAM = {"source": "def f(n):\n    return n\n", "entry_point": "f", "watch": ""}
JOB: dict[str, Any] = {**PROGRAM, "code": b64encode(TEST).decode(), "needs": [], "verdict": None}


def warm_up(limits: Limits) -> None:
    """Judge a plain program several times; the candidate runs in a thread of this process."""
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    seed = random.seed
    for _ in range(ROUNDS):
        channel, far = socket.socketpair()
        parent, connection = socket.socketpair()
        with parent, connection, far:
            start_new_thread(candidate.Server(far).serve_calls, ())
            wire.send_message(parent, JOB)
            process = CandidateProcess(channel, os.getpid(), proc)
            tester.serve_job(connection, channel, process, limits, False)
            report = wire.FrameReader(parent, 1 << 20).read_message(lambda: None)
            assert report.get("cases") == [["pass", ""]] * 3, report
            process.close()
            random.seed = seed  # testers replace it
            while len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
                time.sleep(1e-4)
    os.close(proc)
    del sys.modules[candidate.MODULE], sys.modules["test"]
