"""Finding processes, sending them signals and waiting for their end. Any of them may end by itself meanwhile."""

import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

import psutil

_POLL_S = 0.05


def list_family(pid: int) -> list[psutil.Process]:
    """The running descendants of a process; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def send_signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to each process that still runs; the end of one may end the others."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_for_end(processes: Collection[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """The processes that still run after ``timeout_s`` seconds; a zombie does not count as running."""
    end = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
