"""The path of a new user, typed into a terminal: from the clone to the answers of the trained agents.

``python -m pytest tests/test_newcomer.py -s`` prints what the terminal showed, and the seconds until something moved,
the first iteration and the verdict.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pexpect
import pyte
import pytest

ROOT = Path(__file__).parents[1]
SMALL = "train.num_iterations=3 rollout.problems_per_iteration=8 eval.max_problems=12 eval.num_samples=2"
PROMPT = "newcomer> "


class Screen(pyte.HistoryScreen):
    """A screen of 80 columns with all that scrolled off it, and the moments at which something was shown."""

    def __init__(self) -> None:
        super().__init__(80, 30, history=10_000, ratio=1e-4)
        self.times = [time.monotonic()]
        self._stream = pyte.Stream(self)

    def write(self, text: str) -> None:
        self.times.append(time.monotonic())
        self._stream.feed(text)

    def flush(self) -> None:
        pass

    def longest_silence(self, since: float) -> float:
        """Seconds; of what was shown after the moment ``since``."""
        return max((later - max(earlier, since) for earlier, later in pairwise(self.times) if later > since), default=0)

    def read_lines(self) -> list[str]:
        """Every line, from the first that was shown."""
        above = ("".join(row[column].data for column in range(self.columns)) for row in self.history.top)
        return [line.rstrip() for line in (*above, *self.display)]


class Terminal:
    """A shell in a terminal."""

    def __init__(self, folder: Path) -> None:
        hidden = ("PYTHON", "PREFECT", "MLFLOW", "VIRTUAL_ENV", "CI", "NO_COLOR", "GITHUB", "BASH")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        environment |= {"TERM": "xterm-256color", "PS1": PROMPT, "GPU": "0"}
        self.shell = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile"],
            cwd=folder,
            env=environment,
            dimensions=(30, 80),
            encoding="utf-8",
            timeout=600,
        )
        self.screen = self.shell.logfile_read = Screen()
        self.shell.expect_exact(PROMPT)
        self.shell.sendline("bind 'set enable-bracketed-paste off'")
        self.shell.expect_exact([f"\n{PROMPT}", f"\r{PROMPT}"])

    def type(self, line: str, *awaited: str, prompt: str = PROMPT) -> list[float]:
        """Type a line and wait for each text (an expression), then for ``prompt``; the seconds until each was shown."""
        self.shell.sendline(line)
        self.shell.expect_exact("\r\n")  # the echo of the line
        start, seconds = time.monotonic(), []
        for text in (*awaited, re.escape(prompt)):
            found = self.shell.expect([text, pexpect.EOF, pexpect.TIMEOUT])
            assert found == 0, f"no {text!r} in\n{self.text}"
            seconds.append(time.monotonic() - start)
        self.silence = self.screen.longest_silence(start)
        return seconds[:-1]

    @property
    def text(self) -> str:
        """What a reader sees who scrolls up to the start."""
        return "\n".join(self.screen.read_lines()).rstrip()

    def last(self, pattern: str) -> str:
        """The last text shown that matches, or its group."""
        found = re.findall(pattern, self.text)
        assert found, f"no {pattern!r} in\n{self.text}"
        return str(found[-1])


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    print(terminal.text)
    terminal.shell.close(force=True)


def prepare_environment(checkout: Path) -> None:
    """Put a ``.venv`` into a checkout as infra/setup.sh leaves it, with the dependencies of the tests: no download."""
    environment = checkout / ".venv"
    run: dict[str, Any] = {"check": True, "cwd": checkout, "capture_output": True}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], **run)
    [packages] = environment.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-build-isolation", "--editable", checkout], **run)
    subprocess.run(["bash", "-c", 'source infra/setup.sh && digest cpu >"$STAMP"'], **run)


@pytest.mark.slow
def test_from_the_clone_to_an_answer(terminal: Terminal, tmp_path: Path) -> None:
    [block] = re.findall(r"^```sh\n(make run .+?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    run, _ = (line.partition("  #")[0].strip() for line in block.splitlines())
    terminal.type(f"git clone {ROOT} magrpo && cd magrpo")
    prepare_environment(tmp_path / "magrpo")
    moved, first, verdict = terminal.type(f'{run} ARGS="{SMALL}"', r"[^\s\x1b]", r"1/3 |iteration +1\b", r"result: ")
    print(f"\nsomething moved after {moved:.1f} s, first iteration {first:.0f} s, verdict {verdict:.0f} s;", end=" ")
    print(f"the longest silence was {terminal.silence:.1f} s")
    assert terminal.last(r"result: +(better|no reliable change|worse)\b")
    report = tmp_path / "magrpo" / terminal.last(r"report: +(\S+)")
    assert report.is_file()
    asked = terminal.last(r"(\S*magrpo ask \S+)")
    [answered] = terminal.type(asked, r"tests?\b")
    print(f"ask answered after {answered:.0f} s")
    assert "def aux" in terminal.text
    assert "base models" in terminal.text
    assert "Traceback" not in terminal.text
