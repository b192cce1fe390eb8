"""The lock of a run directory: one process works on a run at a time.

It is a lock on an open file, not the file's existence: the kernel releases it however its process ends.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from magrpo.plugins import ConfigError
from magrpo.run.store import RunStore

LOCK = "lock"
_PATIENCE_S = 1.0  # is_held, in another process, holds the lock for a moment


@contextmanager
def hold_run(store: RunStore) -> Iterator[None]:
    """Hold the lock of a run directory; ConfigError, naming the process, if another one holds it."""
    path = store.path / LOCK
    lock = FileLock(path, timeout=_PATIENCE_S, fallback_to_soft=False)
    try:
        held = lock.acquire()
    except Timeout:
        holder = path.read_text() or "?"
        raise ConfigError(f"run {store.run_id}: process {holder} is working on it already") from None
    with held:
        path.write_text(str(os.getpid()))
        yield


def is_held(folder: Path) -> bool:
    """Whether a process holds the run directory ``folder``."""
    path = folder / LOCK
    # NFS locks only files that are open for writing; those of other users may be read-only here.
    mode = "r+b" if os.access(path, os.W_OK) else "rb"
    try:
        with path.open(mode) as file:
            return not lock_descriptor(file.fileno(), blocking=False)
    except FileNotFoundError:
        return False
