"""infra/setup.sh chooses the builds for the machine; installing them is what ``make setup`` itself shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pip
import pytest

ROOT = Path(__file__).parents[2]
LISTS_ONE = "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'"
NO_DRIVER = "echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9"


def choose_build(folder: Path, nvidia_smi: str = NO_DRIVER, gpu: str | None = None) -> subprocess.CompletedProcess[str]:
    """Call the function of that name, with a program ``nvidia-smi`` of this text on the path, and the variable GPU."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"} | ({} if gpu is None else {"GPU": gpu})
    command = ["bash", "-c", "source infra/setup.sh && choose_build"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("nvidia_smi", "gpu", "build"),
    [
        (LISTS_ONE, None, "cuda"),
        (LISTS_ONE, "0", "cpu"),
        (NO_DRIVER, None, "cpu"),
        (NO_DRIVER, "1", "cuda"),
        ("exit 0", None, "cpu"),
    ],
    ids=["found", "found but unwanted", "no driver", "wanted", "no GPU"],
)
def test_a_gpu_is_found_or_asked_for(tmp_path: Path, nvidia_smi: str, gpu: str | None, build: str) -> None:
    chosen = choose_build(tmp_path, nvidia_smi, gpu)
    assert (chosen.stdout, chosen.returncode) == (f"{build}\n", 0)


def test_any_other_value_is_refused_with_the_choices(tmp_path: Path) -> None:
    chosen = choose_build(tmp_path, gpu="yes")
    assert chosen.returncode == 1
    assert chosen.stderr.strip().startswith("GPU=yes: 1 installs builds for NVIDIA GPUs, 0 builds for CPUs")


@pytest.mark.parametrize("target", ["run", "setup", "test"])
def test_make_calls_the_script_first(target: str) -> None:
    command = ["make", "-n", "--no-print-directory", target, "GPU=1", "SHELL=/bin/bash"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[0] == "infra/setup.sh"


def test_make_hands_the_variable_on() -> None:
    """GPU=1 after ``make`` reaches infra/setup.sh."""
    exported = subprocess.run(
        ["make", "-s", "--no-print-directory", "-f", "-", "show", "GPU=1"],
        cwd=ROOT,
        input="include Makefile\nshow:\n\t@echo GPU is $$GPU\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert exported.stdout == "GPU is 1\n"


def set_up(checkout: Path) -> str:
    """Run the script as far as it comes with a Python that makes no environment and a pip that has no index."""
    programs = checkout / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in {"bwrap": "", "python": 'case $1 in -m) echo "asked for: $*"; exit 9;; esac'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": str(programs / "python")}
    pip = {"GPU": "0", "TORCH_INDEX": "", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"}
    run = subprocess.run(
        [checkout / "infra/setup.sh"],
        env=path | pip,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    return run.stdout + run.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads of a checkout."""
    requirements = [f"requirements/{name}.txt" for name in ("cpu", "services", "dev", "ray")]
    for name in ("infra/setup.sh", "pyproject.toml", *requirements):
        target = tmp_path / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return tmp_path / "checkout"


def make_environment(folder: Path) -> None:
    """Make an environment whose pip is this one's: to install one takes seconds."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    program = folder / "bin/pip"
    program.write_text(f"#!{folder}/bin/python\nfrom pip import main\nraise SystemExit(main())\n")
    program.chmod(0o755)


def test_an_environment_without_pip_or_python_is_made_anew(checkout: Path) -> None:
    """A Debian without python3-venv leaves the first, a new version of the system's Python the second."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)
    assert "asked for: -m venv .venv" in set_up(checkout)
    (checkout / ".venv/bin").mkdir()
    (checkout / ".venv/bin/python").symlink_to("/no/python3.11")
    write_stamp = "source infra/setup.sh && digest cpu >.venv/setup.sha256"
    subprocess.run(["bash", "-c", write_stamp], cwd=checkout, check=True)
    assert "asked for: -m venv .venv" in set_up(checkout)


def test_an_environment_is_kept_until_its_checkout_moves(checkout: Path) -> None:
    make_environment(checkout / ".venv")
    assert "Could not get the CPU build of torch" in set_up(checkout)
    moved = checkout.rename(checkout.with_name("moved"))
    assert "asked for: -m venv .venv" in set_up(moved)
