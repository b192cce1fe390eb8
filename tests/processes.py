"""Waiting for processes and for conditions."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

import psutil

from magrpo.process.children import wait_for_end

_DEADLINE_S = 600.0


def assert_all_end(processes: Collection[psutil.Process]) -> None:
    """Wait until none of them runs; one that only waits for its parent's attention does not."""
    alive = wait_for_end(processes, 300.0)
    assert not alive, f"still running: {alive}"


def find_actors(kind: str) -> list[psutil.Process]:
    """The Ray actors of the class ``kind`` below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended
            if process.cmdline() and process.cmdline()[0].startswith(f"ray::{kind}"):
                found.append(process)
    return found


def find_running(processes: Sequence[psutil.Process], module: str) -> list[psutil.Process]:
    """The processes that run ``python -m module``."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a zombie has no command, either
            if process.cmdline()[1:3] == ["-m", module]:
                found.append(process)
    return found


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` returns a true value."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
