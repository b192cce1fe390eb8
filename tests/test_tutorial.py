"""docs/tutorial.md: every block is written or run as it stands, in a folder of its own, with small numbers added."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from pipelines.cli import main
from tests.pipelines.micro import blank_pictures, start
from tests.process_state import use_modules
from tests.processes import wait_until

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
COMMANDS = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]
SMALL = ["eval.num_samples=1", "eval.max_problems=2", "tracking.system_metrics=false"]
SMALL_TRAINING = [*SMALL, "train.num_iterations=1", "rollout.problems_per_iteration=2", "rollout.group_size=2"]
ADDED = {"train": [*SMALL_TRAINING, "--local"], "study": ["--dry-run"], "evaluate": [*SMALL, "--local"]}
"""Added to a command of the tutorial, for seconds in place of minutes; the runs of the study are only planned."""


def write_files(folder: Path) -> None:
    """Write the blocks that begin with a file's name."""
    named = [re.match(r"# (\S+\.(?:py|toml))\n", block) for language, block in BLOCKS if language != "sh"]
    assert [name[1] for name in named if name] == ["make_problems.py", "mine.toml", "my_plugins.py", "study.toml"]
    assert all(named), "a block without a file's name"
    for name in named:
        assert name is not None
        (folder / name[1]).write_text(name.string[name.end() :])


def expand_make(line: str) -> list[str]:
    """The ``magrpo`` command that a ``make`` command ends in, without running it or heeding a make around the tests."""
    around = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS", "CONFIG", "WORKERS")
    recipe = subprocess.run(
        ["make", "-n", "--no-print-directory", *shlex.split(line)[1:]],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in around},
        capture_output=True,
        text=True,
        check=True,
    )
    tool, *words = shlex.split(recipe.stdout.splitlines()[-1])
    assert tool == ".venv/bin/magrpo"
    return [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    use_modules(monkeypatch, tmp_path, "my_plugins")
    ran = []
    for line in COMMANDS:
        tool, *words = shlex.split(line)
        if tool in ("python", "head"):
            done = subprocess.run([sys.executable if tool == "python" else tool, *words], cwd=tmp_path, check=True)
            assert done.returncode == 0
            continue
        if tool == "make":
            tool, words = "magrpo", expand_make(line)
        assert tool == "magrpo", line
        ran.append(words[0])
        if words[0] == "schedule":
            continue
        with blank_pictures():
            assert main([*words, *ADDED.get(words[0], [])]) == 0, line
    assert ran == ["train", "train", "train", "train", "compare", "evaluate", "study", "schedule"]
    assert len((tmp_path / "problems.jsonl").read_text().splitlines()) == 56
    assert (tmp_path / "runs" / "comparisons" / "plain-vs-own" / "compare.html").exists()


@pytest.mark.slow
def test_the_schedule_is_served(tmp_path: Path) -> None:
    write_files(tmp_path)
    subprocess.run([sys.executable, "make_problems.py"], cwd=tmp_path, check=True)
    [line] = [line for line in COMMANDS if line.startswith("magrpo schedule")]
    log = tmp_path / "log"
    log.touch()
    process = start(shlex.split(line)[1:], log, before=partial(os.chdir, tmp_path))
    wait_until(lambda: "Ctrl-C" in log.read_text() or not process.is_alive())
    assert process.is_alive(), log.read_text()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(600)
    assert process.exitcode == 0, log.read_text()
