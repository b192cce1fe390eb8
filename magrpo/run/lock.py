"""Locks on files: one process works on a run, or serves a schedule, at a time.

A lock is held on an open file and does not depend on the file's existence, so the kernel releases it however the
process ends.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from magrpo.errors import ConfigError
from magrpo.run.store import RunStore

LOCK = "lock"
_PATIENCE_S = 1.0  # is_held, called by another process, takes the lock for a moment


@contextmanager
def hold_run(store: RunStore) -> Iterator[None]:
    """Hold the lock of a run directory; ConfigError, naming the process, if another one holds it."""
    with hold_file(store.path / LOCK, f"run {store.run_id}: process {{holder}} is working on it already"):
        yield


@contextmanager
def hold_file(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of a file, into which the id of this process is written.

    Raises ConfigError if another process holds the lock: ``refusal`` with the id of that process as ``{holder}``.
    """
    lock = FileLock(path, timeout=_PATIENCE_S, fallback_to_soft=False)
    try:
        held = lock.acquire()
    except Timeout:
        raise ConfigError(refusal.format(holder=path.read_text() or "?")) from None
    with held:
        path.write_text(str(os.getpid()))
        yield


def is_held(folder: Path) -> bool:
    """Whether any process holds the lock of the run directory ``folder``."""
    path = folder / LOCK
    # NFS locks only files that are open for writing, but another user's run may be read-only here.
    mode = "r+b" if os.access(path, os.W_OK) else "rb"
    try:
        with path.open(mode) as file:
            return not lock_descriptor(file.fileno(), blocking=False)
    except FileNotFoundError:
        return False
