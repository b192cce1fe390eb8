"""Paths as users write them."""

from pathlib import Path


def expand_home(path: Path | str) -> Path:
    """Replace ``~`` and ``~user`` by a home folder; a path of a user who is not there stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
