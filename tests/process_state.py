"""What a test changes in this process until its end."""

import sys
import tempfile
from pathlib import Path

import pytest


def use_temporary_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this process make its temporary files in ``folder``."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def use_modules(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Let this process import the modules ``names`` from ``folder``, even if it has imported others of these names."""
    monkeypatch.syspath_prepend(folder)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
