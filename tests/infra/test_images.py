"""The images, the Compose file and the manifests for real: built, started, trained through, killed, restored, removed.

Needs root, podman with runc, and debootstrap where Docker Hub cannot be reached: ``make images`` installs them. Images
are kept under ``build/podman`` for the next time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STORAGE = ROOT / "build" / "podman"
STAND_INS = Path(__file__).parent / "images"
PYTHON = "docker.io/library/python:3.11.14-slim-bookworm"
POSTGRES = "docker.io/library/postgres:17.10"
PREFECT = "docker.io/prefecthq/prefect:3.7.7-python3.11"
WORKER, MLFLOW = "localhost/magrpo-worker:0.1.0", "localhost/magrpo-mlflow:0.1.0"
SOURCES = "infra magrpo magrpo_kernels pipelines requirements pyproject.toml README.md LICENSE .dockerignore"
DEBIAN = "http://deb.debian.org/debian"
RUNS = "/var/lib/magrpo/runs"
SMALL = ["train.num_iterations=12", "eval.every=12", "eval.num_samples=1", "rollout.problems_per_iteration=2"]
PATIENCE_S = 600


@dataclass(frozen=True)
class Podman:
    """podman with settings and images of its own, and a copy of the project to build and to start from."""

    folder: Path
    env: dict[str, str]

    def __call__(self, *command: str | Path, check: bool = True) -> str:
        """What ``podman COMMAND`` prints; its errors are shown if it fails."""
        return self.run("podman", *command, check=check)

    def compose(self, *command: str | Path) -> str:
        return self.run(*self.compose_command, "--file", self.project / "infra" / "compose.yaml", *command)

    def run(self, *command: str | Path, check: bool = True) -> str:
        done = subprocess.run(
            command, env=self.env, cwd=self.project, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    @property
    def project(self) -> Path:
        return self.folder / "magrpo"

    @property
    def compose_command(self) -> tuple[str, str, str]:
        return sys.executable, "-m", "podman_compose"

    def inspect(self, container: str, path: str) -> str:
        return self("inspect", "--format", f"{{{{{path}}}}}", container).strip()

    def list_everything(self) -> list[str]:
        """Containers, pods, volumes, secrets, and networks besides podman's own."""
        names = [self(kind, "ls", "--quiet").split() for kind in ("container", "pod", "volume", "secret", "network")]
        return [name for found in names for name in found if name != self("network", "ls", "--quiet", "--filter", "name=^podman$").strip()]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(1)
    return value


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """podman with the images of ``infra/images``, and those that the Compose file takes from elsewhere."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("podman", "runc"))):
        pytest.skip("needs root, podman and runc: make images")
    folder = tmp_path_factory.mktemp("images")
    (folder / "magrpo").mkdir()
    for name in SOURCES.split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / "magrpo" / name)
    podman = Podman(folder, os.environ | write_settings(folder))
    build_images(podman)
    yield podman
    podman("system", "prune", "--force", "--volumes", check=False)


def write_settings(folder: Path) -> dict[str, str]:
    """Files that keep podman apart from the machine's own, and the variables that name them."""
    _, hard = (int(number) for number in os.popen("ulimit -Sn; ulimit -Hn").read().split())
    containers = f"""
[containers]
default_ulimits = ["nofile={hard}:{hard}", "nproc=1000:1000"]
[engine]
runtime = "runc"
[network]
network_config_dir = "{folder}/networks"
"""
    storage = f"""
[storage]
driver = "overlay"
graphroot = "{STORAGE}"
runroot = "{folder}/run"
"""
    variables = {}
    for name, text in (("CONTAINERS_CONF", containers), ("CONTAINERS_STORAGE_CONF", storage)):
        path = folder / name.lower()
        path.write_text(text)
        variables[name] = str(path)
    return variables


def build_images(podman: Podman) -> None:
    """Pull what can be pulled; where the registry is out of reach, put stand-ins from Debian in its place."""
    pip = write_pip_settings(podman.folder)
    if podman("image", "exists", PYTHON, check=False) or not pulls(podman, PYTHON):
        make_base(podman)
    ...
