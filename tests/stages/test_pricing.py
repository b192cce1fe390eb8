"""The processes that call rewards: they do not outlive the run, and a dead one is an error that a retry mends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import BrokenExecutor

import psutil
import pytest

from magrpo.stages.pricing import RewardProcesses
from tests.processes import assert_all_end

# Starts two processes and prints that they work.
RUN = """
import os, time
from magrpo.stages.pricing import RewardProcesses
processes = RewardProcesses(2)
list(processes.map(abs, range(100)))
print("started", flush=True)
time.sleep(600)
"""


def test_nothing_survives_kill_9_of_the_run() -> None:
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "started\n"
            processes = psutil.Process(run.pid).children(recursive=True)
            assert processes
            run.send_signal(signal.SIGKILL)
            run.wait()
            assert_all_end(processes)
        finally:
            run.kill()


def test_a_worker_that_dies_breaks_the_pool() -> None:
    with RewardProcesses(1) as processes:
        pid = processes.submit(os.getpid).result()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(BrokenExecutor):
            list(processes.map(abs, range(100)))
