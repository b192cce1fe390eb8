"""The images and the Compose file for real: built, started, trained through, killed, restored, removed.

Needs root, podman and runc, and debootstrap where Docker Hub is out of reach: ``make images`` installs them. Images are
kept under ``build/podman`` for the next time.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STORAGE = ROOT / "build" / "podman"
STAND_INS = Path(__file__).parent / "images"
PYTHON = "docker.io/library/python:3.11.14-slim-bookworm"
POSTGRES = "docker.io/library/postgres:17.10"
PREFECT = "docker.io/prefecthq/prefect:3.7.7-python3.11"
WORKER, MLFLOW = "localhost/magrpo-worker:0.1.0", "localhost/magrpo-mlflow:0.1.0"
WORKER_GPU = "localhost/magrpo-worker-gpu:0.1.0"
SOURCES = "infra magrpo magrpo_kernels pipelines requirements pyproject.toml README.md LICENSE .dockerignore"
RUNS = "/var/lib/magrpo/runs"
SMALL = ["train.num_iterations=4", "eval.every=4", "eval.num_samples=1", "problems.num_test=12"]
UNCONFINED = [f"--security-opt={option}" for option in ("seccomp=unconfined", "apparmor=unconfined", "unmask=ALL")]
PATIENCE_S = 900
BUILD_ROOM = 30e9
"""Free bytes that building the GPU image needs: its layers, and the largest of them twice more while it is written."""


@dataclass(frozen=True)
class Podman:
    """podman with settings and images of its own, and a copy of the project to build and to start from."""

    project: Path
    env: dict[str, str]
    pip_settings: list[str]
    """Flags that give a build the settings of this machine's pip."""

    def __call__(self, *command: str | Path, text: str | None = None) -> str:
        """What ``podman COMMAND`` prints, with ``text`` as its input."""
        return self.run("podman", *command, text=text)

    def compose(self, *command: str) -> str:
        return self.run(*self.env["COMPOSE"].split(), "--file", "infra/compose.yaml", *command)

    def run(self, *command: str | Path, text: str | None = None) -> str:
        done = subprocess.run(command, env=self.env, cwd=self.project, text=True, input=text, capture_output=True)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def build(self, name: str, dockerfile: Path, context: Path, *arguments: str) -> None:
        self(
            *("build", "--network", "host", *self.pip_settings, *arguments),
            *("--tag", name, "--file", dockerfile, context),
        )

    def succeeds(self, *command: str) -> bool:
        return subprocess.run(["podman", *command], env=self.env, capture_output=True).returncode == 0

    def inspect(self, container: str, path: str) -> str:
        return self("inspect", "--format", f"{{{{.{path}}}}}", container).strip()

    def wait_until_healthy(self, *containers: str) -> None:
        """Ask each container's health check, as systemd would: machines without it have nobody who does."""
        for container in containers:
            wait_for(partial(self.succeeds, "healthcheck", "run", container), f"{container} is not healthy")

    def list_what_is_left(self) -> list[str]:
        kinds = ("container", "pod", "volume")
        return [name for kind in kinds for name in self(kind, "ls", "--quiet").split()]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition()``."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(1)
    return value


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Has the images of ``infra/images``, and those that the Compose file takes from elsewhere."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("podman", "runc"))):
        pytest.skip("needs root, podman and runc: make images")
    folder = tmp_path_factory.mktemp("images")
    project = folder / "magrpo"
    project.mkdir()
    for name in SOURCES.split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, project / name)
    podman = Podman(project, os.environ | write_settings(folder), mount_pip_settings(folder))
    build_images(podman, folder)
    podman.run("infra/make-env.sh", "infra/.env")
    yield podman
    podman("pod", "rm", "--all", "--force")
    podman("container", "rm", "--all", "--force")
    podman("volume", "rm", "--all", "--force")
    podman("image", "prune", "--force")
    if (STORAGE / "overlay").is_mount():
        podman.run("umount", STORAGE / "overlay")  # so that `make clean` can remove it


def write_settings(folder: Path) -> dict[str, str]:
    """The variables that keep podman apart from the machine's own, and the files that they name."""
    for name in ("run", "tmp"):  # of an earlier boot
        shutil.rmtree(STORAGE / name, ignore_errors=True)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = {
        "CONTAINERS_CONF": f"""
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc=1000:1000"]
[engine]
runtime = "runc"
tmp_dir = "{STORAGE}/tmp"
[network]
network_config_dir = "{folder}/networks"
""",
        "CONTAINERS_STORAGE_CONF": f"""
[storage]
driver = "overlay"
graphroot = "{STORAGE}"
runroot = "{STORAGE}/run"
""",
    }
    for name, text in settings.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in settings} | {"COMPOSE": f"{sys.executable} -m podman_compose"}


def build_images(podman: Podman, folder: Path) -> None:
    """Build the images; where the registry is out of reach, on stand-ins made of Debian's packages."""

    def is_there(name: str) -> bool:
        return podman.succeeds("image", "exists", name) or podman.succeeds("pull", "--quiet", name)

    if not is_there(PYTHON):
        make_python_image(podman, folder / "debian")
    index = [f"TORCH_INDEX={os.environ['TORCH_INDEX']}"] if "TORCH_INDEX" in os.environ else []
    for name in (WORKER, MLFLOW):
        arguments = [part for value in index for part in ("--build-arg", value)] if name == WORKER else []
        podman.build(name, find_dockerfile(podman, name), podman.project, *arguments)
    if not is_there(POSTGRES):
        podman.build(POSTGRES, STAND_INS / "postgres.Dockerfile", STAND_INS, "--build-arg", f"BASE={PYTHON}")
    if not is_there(PREFECT):
        podman("tag", WORKER, PREFECT)  # of the same version


def find_dockerfile(podman: Podman, image: str) -> Path:
    name = image.removeprefix("localhost/magrpo-").partition(":")[0]
    return podman.project / "infra" / "images" / f"{name}.Dockerfile"


def mount_pip_settings(folder: Path) -> list[str]:
    """Flags that give a build the settings of this machine's pip, and the files that they name."""
    settings = ConfigParser(interpolation=None)
    settings["global"] = {}
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        settings["global"][name.rpartition(".")[2]] = value.strip("'")
    with (folder / "pip.conf").open("w") as file:
        settings.write(file)
    words = [word.removeprefix("file://") for value in settings["global"].values() for word in value.split()]
    words = [word.removesuffix("/simple") for word in words]  # an index, with its files beside it
    paths = [path for path in sorted(set(words)) if path.startswith("/") and Path(path).exists()]
    mounts = [f"{folder}/pip.conf:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in paths)]
    return [part for mount in mounts for part in ("--volume", mount)]


def make_python_image(podman: Podman, debian: Path) -> None:
    """Stands in for Docker Hub's python: Debian with its own Python."""
    if not shutil.which("debootstrap"):
        pytest.skip("Docker Hub is out of reach, and debootstrap is not installed: make images")
    sites = subprocess.run(["apt-get", "indextargets", "--format", "$(SITE)"], capture_output=True, text=True).stdout
    packages = "--include=python3,python3-venv,python3-pip,ca-certificates"
    podman.run("debootstrap", "--variant=minbase", packages, "bookworm", debian, sites.split()[0])
    (debian / "usr" / "bin" / "python").symlink_to("python3")
    shutil.rmtree(debian / "var" / "cache" / "apt" / "archives")
    podman.run("tar", "--directory", debian, "--create", "--file", f"{debian}.tar", ".")
    podman("import", "--change", "ENV PIP_BREAK_SYSTEM_PACKAGES=1", f"{debian}.tar", PYTHON)
    Path(f"{debian}.tar").unlink()
    shutil.rmtree(debian)


def start_run(prefect: Callable[..., str]) -> str:
    """Make the deployments and schedule one run now; return the id of its flow run."""
    made = prefect("--no-prompt", "deploy", "--all", "--prefect-file", "infra/prefect.yaml")
    assert made.count("successfully created") == 4, made
    asked = ["-p", f"overrides={json.dumps(SMALL)}", "--start-in", "1 second"]
    created = prefect("deployment", "run", "magrpo-scheduled/by-hand", *asked)
    return created.partition("UUID:")[2].split()[0]


def test_images_are_small_and_run_as_an_ordinary_user(podman: Podman) -> None:
    for name in (WORKER, MLFLOW):
        assert podman("run", "--rm", name, "id", "--user").strip() == "1000"
    assert int(podman.inspect(WORKER, "Size")) < 4.5e9
    assert int(podman.inspect(MLFLOW, "Size")) < 1.5e9


@pytest.mark.parametrize(("flags", "level"), [([], "landlock"), (UNCONFINED, "namespaces")])
def test_the_sandbox_of_a_container_has_the_documented_level(podman: Podman, flags: list[str], level: str) -> None:
    found = podman("run", "--rm", *flags, "--env", "HOME=/tmp", WORKER, "magrpo", "doctor")
    assert f"level {level} " in found


def test_compose(podman: Podman, tmp_path: Path) -> None:
    """A scheduled run whose worker is killed in the middle, resumed, backed up with its servers, and restored."""
    podman.compose("up", "--detach", "postgres")
    podman.wait_until_healthy("magrpo_postgres_1")
    podman.compose("up", "--detach", "prefect", "mlflow")
    podman.wait_until_healthy("magrpo_prefect_1", "magrpo_mlflow_1")
    podman.compose("--profile", "cpu", "up", "--detach", "worker")

    def in_worker(*command: str) -> str:
        return podman("exec", "magrpo_worker_1", *command)

    for service in ("postgres", "prefect", "mlflow", "worker"):
        assert not podman.succeeds("exec", "--user", "0", f"magrpo_{service}_1", "touch", "/etc/written")
        assert int(podman.inspect(f"magrpo_{service}_1", "HostConfig.Memory")) > 0
    start_run(lambda *command: in_worker("prefect", *command))
    run = wait_for(lambda: in_worker("ls", RUNS).strip(), "no run began")
    rollout = f"{RUNS}/{run}/stages/00001/rollout.0"
    wait_for(lambda: podman.succeeds("exec", "magrpo_worker_1", "ls", rollout), "nothing was sampled")
    os.kill(int(podman.inspect("magrpo_worker_1", "State.Pid")), 9)
    wait_for(lambda: podman.inspect("magrpo_worker_1", "RestartCount") == "1", "the worker was not started again")
    wait_for(lambda: podman.succeeds("exec", "magrpo_worker_1", "true"), "the worker does not run again")
    assert "killed" in in_worker("magrpo", "runs", "--root", RUNS)
    resumed = in_worker("magrpo", "resume", run, "--root", RUNS)
    assert "sandbox: Landlock without namespaces" in resumed
    assert "in 2 attempts" in resumed

    podman.run("infra/backup.sh", "--compose", tmp_path)
    [backup] = tmp_path.iterdir()
    podman("stop", "magrpo_worker_1", "magrpo_prefect_1", "magrpo_mlflow_1")
    for name in ("prefect", "mlflow", "mlflow_auth"):
        query = "DROP SCHEMA public CASCADE; CREATE SCHEMA public"
        podman("exec", "magrpo_postgres_1", "psql", "-U", name.partition("_")[0], name, "-c", query)
    podman.run("infra/restore.sh", "--compose", "--replace", backup)
    podman("start", "magrpo_prefect_1", "magrpo_mlflow_1", "magrpo_worker_1")
    podman.wait_until_healthy("magrpo_prefect_1", "magrpo_mlflow_1")
    assert "magrpo-train" in in_worker("prefect", "flow", "ls")
    assert "finished" in in_worker("magrpo", "runs", "--root", RUNS)

    podman.compose("--profile", "cpu", "down", "--volumes")
    assert podman.list_what_is_left() == []


@pytest.mark.timeout(3600)
def test_the_gpu_image_has_all_that_a_gpu_needs(podman: Podman) -> None:
    """Looked at without a GPU: builds for CUDA, and an ordinary user."""
    if (free := shutil.disk_usage(STORAGE).free) < BUILD_ROOM:
        pytest.skip(f"{STORAGE} has {free / 1e9:.0f} GB free; building takes {BUILD_ROOM / 1e9:.0f}")
    podman.build(WORKER_GPU, find_dockerfile(podman, WORKER_GPU), podman.project)
    assert int(podman.inspect(WORKER_GPU, "Size")) < 11e9
    ask = "import os, torch, vllm; print(os.getuid(), torch.version.cuda.split('.')[0], vllm.__version__)"
    run = ("run", "--rm", "--env", "HOME=/tmp", "--workdir", RUNS, WORKER_GPU)
    assert podman(*run, "python", "-c", ask).split() == ["1000", "13", "0.32.0"]
    podman("rmi", "--force", WORKER_GPU)
