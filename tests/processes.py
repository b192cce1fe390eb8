"""Waiting for processes and for conditions."""

import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

import psutil

from magrpo.process.children import wait_for_end

_DEADLINE_S = 600.0


def assert_all_end(processes: Collection[psutil.Process]) -> None:
    """Wait until none of them runs; one that only waits for its parent's attention does not."""
    alive = wait_for_end(processes, 300.0)
    assert not alive, f"still running: {alive}"


def stop_process(process: subprocess.Popen[bytes] | psutil.Popen) -> None:
    """As systemd stops a unit: ask, and after a minute insist."""
    process.terminate()
    try:
        process.wait(60)
    except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
        process.kill()
        process.wait()


def read_command(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended, waited for or not."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def find_actors(kind: str, pid: int | None = None) -> list[psutil.Process]:
    """The Ray actors of the class ``kind`` below a process, by default this one."""
    family = psutil.Process(pid).children(recursive=True)
    return [process for process in family if " ".join(read_command(process)).startswith(f"ray::{kind}")]


def find_running(processes: Iterable[psutil.Process], module: str) -> list[psutil.Process]:
    """The processes that run ``python -m module``."""
    return [process for process in processes if read_command(process)[1:3] == ["-m", module]]


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` returns a true value."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
