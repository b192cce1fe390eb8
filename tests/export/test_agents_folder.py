"""The folder of trained agents: what its card says is what its snippets, commands and requests give."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from magrpo.store import RunStore
from pipelines.cli import main
from tests.pipelines.micro import blank_pictures

CONFIGS = Path(__file__).parents[2] / "pipelines" / "configs"
SHORT = (
    "train.num_iterations=1",
    "rollout.problems_per_iteration=2",
    "rollout.group_size=2",
    "eval.max_problems=4",
    "eval.num_samples=1",
)


def train(root: Path, config: str, *overrides: str) -> RunStore:
    with blank_pictures():
        arguments = [str(CONFIGS / config), *SHORT, *overrides, "--name", "mine", "--root", str(root), "--local"]
        assert main(["train", *arguments]) == 0
    return RunStore.open(root, "mine")


@pytest.fixture(scope="module")
def coders(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A finished run of two programmers."""
    return train(tmp_path_factory.mktemp("coders"), "embedded.toml")


@pytest.fixture(scope="module")
def authors(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A finished run of two authors."""
    return train(tmp_path_factory.mktemp("authors"), "writing_embedded.toml")


@pytest.fixture(params=["coders", "authors"])
def agents(request: pytest.FixtureRequest) -> Path:
    """The folder of a finished run's agents."""
    store: RunStore = request.getfixturevalue(request.param)
    return store.path / "agents"


def read_blocks(card: str, language: str = "") -> list[str]:
    """The code blocks of a card in one language."""
    return [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", card, re.M | re.S) if kind == language]


def run_python(folder: Path, snippet: str) -> str:
    """Run a snippet in ``folder`` without this project on the path; its output."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", snippet], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippet_of_the_card_prints_the_answers_of_the_card(agents: Path) -> None:
    card = (agents / "README.md").read_text()
    [snippet] = read_blocks(card, "python")
    printed = read_blocks(card)[0]
    assert run_python(agents, snippet) == printed
