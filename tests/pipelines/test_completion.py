"""Completion in a shell: what the completers offer, and the scripts for bash, zsh and fish in real shells."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from pipelines import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two runs, a configuration and a folder."""
    for name in ("seed-1", "seed-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").touch()
    (tmp_path / "elsewhere" / "other").mkdir(parents=True)
    (tmp_path / "elsewhere" / "other" / "config.json").touch()
    (tmp_path / "own.toml").write_text('[env]\nkind = "writing"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("train em", {"embedded", "embedded_grpo", "embedded_program", "embedded_two_turns"}),
        ("train ow", {"own.toml"}),
        ("train ./o", {"./own.toml"}),
        ("train elsew", {"elsewhere/"}),
        ("resume seed", {"seed-1", "seed-2"}),
        ("resume --root elsewhere o", {"other"}),
        ("resume --root=~/elsewhere o", {"other"}),
        ("evaluate seed", {"seed-1", "seed-2"}),
        ("evaluate embedded_g", {"embedded_grpo"}),
        ("sync seed", {"seed-1", "seed-2"}),
        ("compare seed-1 seed", {"seed-1", "seed-2"}),
        ("config show rol", {"rollout"}),
    ],
)
@pytest.mark.usefixtures("folder")
def test_completers_offer(words: str, offered: set[str], capfd: pytest.CaptureFixture[str]) -> None:
    cli.main(["__complete", *shlex.split(words)])
    lines = capfd.readouterr().out.partition("\x1fbegin\n")[2].splitlines()
    start = words.rpartition(" ")[2].lstrip("=")
    assert {value for line in lines if (value := line.partition("\t")[0]).startswith(start)} == offered


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """The environment of a shell with a home of its own, where ``magrpo`` is this checkout's."""
    command = folder / "bin" / "magrpo"
    command.parent.mkdir()
    main = "import sys; from pipelines.cli import main; sys.exit(main())"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{main}" "$@"\n')
    command.chmod(0o755)
    own = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder / "home")}
    return os.environ | own | {"TERM": "dumb"}


def install(shell: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As cli.md says."""
    Path(environment["HOME"]).mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", environment["HOME"])
    assert cli.main(["--install-completion", "--shell", shell]) == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_runs_and_commands(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("bash", environment, monkeypatch)
    asked = [
        "COMP_WORDS=(magrpo resume seed); COMP_CWORD=2",
        "COMP_WORDS=(magrpo sche); COMP_CWORD=1",
    ]
    lines = [f'{words}; COMPREPLY=(); _magrpo; echo "${{COMPREPLY[@]}}"' for words in asked]
    done = subprocess.run(
        ["bash", "--norc"],
        input="\n".join(["source ~/.bashrc", *lines]),
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [set(line.split()) for line in done.stdout.splitlines()] == [{"seed-1", "seed-2"}, {"schedule"}]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_runs_and_configurations(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal; of several runs it first writes what they have in common."""
    home = Path(environment["HOME"])
    home.mkdir()
    (home / ".zshrc").write_text("autoload -Uz compinit && compinit -u\nPS1='READY> '\n")
    install("zsh", environment, monkeypatch)
    zsh = pexpect.spawn("zsh", ["-d", "-i"], env=environment, cwd=folder, encoding="utf-8", dimensions=(40, 120))
    zsh.expect("READY> ", timeout=60)
    for words, completed in (
        ("resume se", "ed-"),
        ("train embedded_g", "rpo "),
        ("sche", "dule "),
    ):
        zsh.send(f"magrpo {words}\t")
        zsh.expect_exact(f"{words}{completed}", timeout=60)
        zsh.sendcontrol("u")  # empty the line
    zsh.sendline("exit")
    zsh.expect(pexpect.EOF, timeout=60)


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_runs_and_commands(
    folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("fish", environment, monkeypatch)
    for words, offered in (("resume seed", {"seed-1", "seed-2"}), ("sche", {"schedule"})):
        command = ["fish", "--command", f"complete --do-complete 'magrpo {words}'"]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
        assert {line.partition("\t")[0] for line in done.stdout.splitlines()} == offered
