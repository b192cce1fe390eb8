"""Files of runs: written whole, shared with whoever may read their folder, told apart by their bytes."""

import hashlib
import os
from pathlib import Path

DRAFT = ".{}"
"""Name of a file while it is written; a kill may leave it."""


def atomic_write(path: Path, data: bytes) -> None:
    """Write or replace a file; readers and crashes see the old bytes or the new ones. On disk when this returns."""
    draft = path.with_name(DRAFT.format(path.name))
    draft.write_bytes(data)
    sync_path(draft)
    draft.replace(path)
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def share_files(folder: Path) -> None:
    """Let whoever may read ``folder`` read the files below it: safetensors writes files that only their owner reads."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
