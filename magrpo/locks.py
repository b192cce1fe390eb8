"""A lock on a folder, for processes that make something in it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock_folder(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process; ``how`` as for :func:`fcntl.flock`.

    Raises OSError if there is no such folder, or another process holds it and ``how`` says not to wait.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
