"""Locks on folders, for processes that make something in them. The kernel releases a lock when its process ends."""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor


@contextmanager
def lock_folder(folder: Path, *, blocking: bool = True) -> Iterator[None]:
    """Hold the lock of a folder. No lock file is made in it.

    Raises OSError if there is no such folder; BlockingIOError if another process holds it, unless ``blocking``.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock_descriptor(descriptor, blocking=blocking):
            raise BlockingIOError(f"another process holds {folder}")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def make_draft(parent: Path, prefix: str, remove: Callable[[Path], None] = shutil.rmtree) -> Iterator[Path]:
    """A new locked folder, ``prefix`` and eight random digits, deleted by ``remove`` at the end unless it was renamed.

    Folders of such names that killed processes left behind are deleted first. Raises OSError if ``parent`` cannot be
    read or written.
    """

    def delete(folder: Path) -> None:
        with suppress(OSError):  # another process was faster, or something still uses it
            remove(folder)

    with ExitStack() as held:
        with lock_folder(parent):
            names = re.compile(f"{re.escape(prefix)}[0-9a-f]{{8}}")
            for stale in [path for path in parent.iterdir() if names.fullmatch(path.name)]:
                with suppress(OSError), lock_folder(stale, blocking=False):
                    delete(stale)
            draft = parent / f"{prefix}{uuid.uuid4().hex[:8]}"
            draft.mkdir()
            held.callback(delete, draft)
            held.enter_context(lock_folder(draft))
        yield draft
