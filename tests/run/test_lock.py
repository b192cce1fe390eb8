"""One process works on a run at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from magrpo.errors import ConfigError
from magrpo.run.lock import hold_run, is_held
from magrpo.run.store import RunStore

HOLD = """
import subprocess, sys
from pathlib import Path
from magrpo.run.lock import hold_run
from magrpo.run.store import RunStore

with hold_run(RunStore(Path(sys.argv[1]), "run")):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin)
    print("holds", flush=True)
    child.wait()
"""


@contextmanager
def run_holder(store: RunStore) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the run and has a child, until its standard input ends."""
    command = [sys.executable, "-c", HOLD, str(store.path.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"holds\n"
        yield process


def test_a_run_that_another_process_holds_is_refused_with_its_id(store: RunStore) -> None:
    assert not is_held(store.path)
    assert list(store.path.iterdir()) == [], "asking makes no file"
    with run_holder(store) as process:
        assert is_held(store.path)
        with pytest.raises(ConfigError, match=f"^run run: process {process.pid} is working on it already$"):
            hold_run(store).__enter__()
        process.communicate(b"\n")
    assert not is_held(store.path)
    with hold_run(store):
        assert is_held(store.path)
        assert (store.path / "lock").read_text() == str(os.getpid())
    assert not is_held(store.path)


def test_a_killed_process_leaves_the_run_free_while_its_child_lives(store: RunStore) -> None:
    with run_holder(store) as process:
        process.kill()
        process.wait()
        assert not is_held(store.path)
        with hold_run(store):
            assert is_held(store.path)
