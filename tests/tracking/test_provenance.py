"""Provenance never keeps a run from starting: what cannot be found out is left out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from magrpo.tracking.provenance import collect_provenance

SOURCE = Path(__file__).parents[2] / "magrpo" / "tracking" / "provenance.py"
GIT_TAGS = {"mlflow.source.git.commit", "git.dirty"}
STRANGER = 54321
"""A user id without a passwd entry."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

# Becomes the user of the first argument, unless that is empty, and prints the tags that the file of the second finds.
# All is imported before, since Python may lie where another user cannot read it.
PROBE = """
import json, os, runpy, sys
collect_provenance = runpy.run_path(sys.argv[2])["collect_provenance"]
if sys.argv[1]:
    collect_provenance()
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
print(json.dumps(collect_provenance()))
"""


@pytest.fixture
def checkout() -> Iterator[Path]:
    """A git repository with one commit that holds ``magrpo/tracking/provenance.py``, in a folder that all may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Path(folder) / "checkout"
        (root / "magrpo" / "tracking").mkdir(parents=True)
        shutil.copy(SOURCE, root / "magrpo" / "tracking" / "provenance.py")
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "first"]):
            subprocess.run(["git", *command], cwd=root, check=True)
        yield root


def tags(checkout: Path, environment: Mapping[str, str] = MappingProxyType({}), user: str = "") -> dict[str, str]:
    """What ``provenance`` of a checkout finds in a process of its own, without anybody's git configuration."""
    own = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    file = str(checkout / "magrpo" / "tracking" / "provenance.py")
    command = [sys.executable, "-c", PROBE, user, file]
    done = subprocess.run(command, env=own | dict(environment), cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"version.python", "mlflow.source.name", "mlflow.source.type"} <= found.keys()
    return dict(found)


def test_a_checkout_of_ones_own(checkout: Path) -> None:
    found = tags(checkout, {"LOGNAME": "somebody"})
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True)
    assert found["mlflow.source.git.commit"] == head.stdout.strip()
    assert found["git.dirty"] == "false"
    assert found["mlflow.user"] == "somebody"
    with (checkout / "magrpo" / "tracking" / "provenance.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert tags(checkout)["git.dirty"] == "true"


def test_git_refuses_the_folder_of_another_user(checkout: Path) -> None:
    assert not GIT_TAGS & tags(checkout, {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}).keys()


def test_without_git(checkout: Path) -> None:
    assert not GIT_TAGS & tags(checkout, {"PATH": str(checkout / "magrpo")}).keys()


def test_a_repository_without_a_commit(checkout: Path) -> None:
    shutil.rmtree(checkout / ".git")
    assert not GIT_TAGS & tags(checkout).keys()
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    assert not GIT_TAGS & tags(checkout).keys()


@needs_root
def test_a_user_without_a_passwd_entry(checkout: Path) -> None:
    """Without HOME, too: nothing says where the user's configuration is."""
    found = tags(checkout, user=str(STRANGER))
    assert "mlflow.user" not in found
    assert not GIT_TAGS & found.keys(), "the checkout is root's"
    for path in (checkout, *checkout.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    assert tags(checkout, user=str(STRANGER)).keys() >= GIT_TAGS


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyError("getpwuid(): uid not found: 12345"), OSError("No username set in the environment")):

        def refuse(error: Exception = error) -> str:
            raise error

        monkeypatch.setattr("getpass.getuser", refuse)
        assert "mlflow.user" not in collect_provenance()
