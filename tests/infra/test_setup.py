"""infra/setup.sh chooses the builds for the machine; installing them is what ``make setup`` itself shows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

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
