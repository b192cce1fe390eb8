"""Limits on the CPU time of the process that runs the test."""

import _signal  # type: ignore[import-not-found]  # signal's own functions; that module makes enumerations of numbers
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .recorder import OutOfTime


def start_clock(seconds: float) -> None:
    """Raise OutOfTime in the main thread once this process has used so many more seconds of CPU time."""
    _signal.signal(_signal.SIGPROF, _raise)
    _signal.setitimer(_signal.ITIMER_PROF, seconds)


def stop_clock() -> None:
    """Undo :func:`start_clock`."""
    _signal.setitimer(_signal.ITIMER_PROF, 0)
    _signal.signal(_signal.SIGPROF, _signal.SIG_DFL)


@contextmanager
def limit_cpu(seconds: float) -> Iterator[None]:
    """Set a stricter limit for a while; OutOfTime is raised at whichever limit comes first."""
    left, _ = _signal.getitimer(_signal.ITIMER_PROF)
    if not 0 < seconds < left:
        yield
        return
    began = time.process_time()
    _signal.setitimer(_signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        _signal.setitimer(_signal.ITIMER_PROF, max(left - (time.process_time() - began), 1e-6))


def _raise(*_: Any) -> None:
    raise OutOfTime
