"""Locks on folders, for processes that make something in them. A lock ends with its process."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def lock_folder(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of a folder; ``how`` as for :func:`fcntl.flock`.

    Raises OSError if there is no such folder, or another process holds it and ``how`` says not to wait.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def make_draft(parent: Path, prefix: str, remove: Callable[[Path], None] = shutil.rmtree) -> Iterator[Path]:
    """A new locked folder whose name begins with ``prefix``, deleted by ``remove`` at the end unless it was renamed.

    Folders with this prefix that killed processes left behind are deleted first. Raises OSError if ``parent`` cannot be
    read or written.
    """

    def delete(folder: Path) -> None:
        with suppress(OSError):  # another process was faster, or something still uses it
            remove(folder)

    with ExitStack() as held:
        with lock_folder(parent):
            for stale in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
                with suppress(OSError), lock_folder(stale, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    delete(stale)
            draft = parent / f"{prefix}{uuid.uuid4().hex[:8]}"
            draft.mkdir()
            held.callback(delete, draft)
            held.enter_context(lock_folder(draft))
        yield draft
