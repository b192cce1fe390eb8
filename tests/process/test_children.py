from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from magrpo.process.children import list_family, send_signal, wait_for_end


@contextmanager
def running_child() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a Python process that has started, sleeps for ten minutes and is killed afterwards."""
    script = "import time; print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child
        finally:
            child.kill()


def test_killed_processes_are_found_and_waited_for() -> None:
    with running_child() as child:
        family = list_family(psutil.Process().pid)
        assert child.pid in [process.pid for process in family]
        one = [process for process in family if process.pid == child.pid]
        assert wait_for_end(one, 0.0) == one
        send_signal(one, signal.SIGKILL)
        assert wait_for_end(one, 60.0) == []
    assert list_family(child.pid) == []


def test_a_signal_reaches_those_that_run_beside_one_that_has_ended() -> None:
    with running_child() as first, running_child() as second:
        both = [psutil.Process(child.pid) for child in (first, second)]
        first.kill()
        first.wait()
        send_signal(both, signal.SIGKILL)
        assert second.wait(60) == -signal.SIGKILL
        assert wait_for_end(both, 0.0) == []
