"""The wheel works without the checkout: installed into a fresh environment, it trains in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = "train.num_iterations=2 rollout.problems_per_iteration=4 eval.max_problems=4 eval.num_samples=1"


def run(*command: str | Path, folder: Path, path: str | None = None) -> str:
    """The output of a command that succeeds, without this checkout on Python's path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PREFECT"))}
    environment["PATH"] = path or environment["PATH"]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel in it; it borrows the dependencies of the tests."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("environment")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("magrpo", "magrpo_kernels", "pipelines"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, folder=folder)
    [wheel] = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    [packages] = (folder / "venv" / "lib").glob("python3*/site-packages")
    # A plain path, so that the editable install among these packages is not followed back to the checkout.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(*pip, "--python", folder / "venv" / "bin" / "python", "install", "--no-deps", wheel, folder=folder)
    return folder / "venv"


@pytest.mark.slow
def test_the_installed_wheel_trains_in_an_empty_folder(environment: Path, tmp_path: Path) -> None:
    python, magrpo = environment / "bin" / "python", environment / "bin" / "magrpo"
    code = "import magrpo, magrpo_kernels, pipelines as p; print(magrpo.__file__, magrpo_kernels.__file__, p.__file__)"
    places = run(python, "-c", code, folder=tmp_path).split()
    assert all(place.startswith(str(environment)) for place in places), places
    said = run(magrpo, "train", "embedded", *SMALL.split(), "--name", "first", folder=tmp_path)
    assert "first" in said
    assert "Traceback" not in said
    reports = list((tmp_path / "runs" / "first").rglob("report.html"))
    assert reports, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    assert "first" in run(magrpo, "runs", folder=tmp_path)


@pytest.mark.slow
def test_the_wheel_holds_every_file_that_is_not_python(environment: Path) -> None:
    """Templates, word lists, prompts, base models and configurations that ship."""
    [packages] = (environment / "lib").glob("python3*/site-packages")
    tracked = run("git", "ls-files", "magrpo", "magrpo_kernels", "pipelines", folder=ROOT).split()
    data = [name for name in tracked if not name.endswith((".py", ".md"))]
    assert len(data) > 30
    assert [name for name in data if not (packages / name).is_file()] == []
