"""What imports what: light modules stay light, every table entry exists, packages keep to their dependencies."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import CHECKED

ROOT = Path(__file__).parents[1]
HEAVY = {
    *("datasets", "matplotlib", "mlflow", "pandas", "peft", "prefect"),
    *("ray", "torch", "transformers", "triton", "vllm"),
}


LIGHT = (
    *("magrpo.config.run", "magrpo.library", "magrpo.interfaces", "pipelines.commands.train"),
    *("magrpo.tracking.mlflow_runs", "magrpo.tracking.model_registry"),
)
LOADING = f"""
import sys
from importlib import import_module
from pathlib import Path
def show_loaded(name, *others):
    print(name, *sys.modules.keys() & {{*{HEAVY}, *others}})
import pipelines.cli
show_loaded("pipelines.cli", "magrpo.config.run", "magrpo.run.store")  # which it loads when a command needs them
for module in {LIGHT}:
    import_module(module)
    show_loaded(module)
from magrpo.config.run import load_config
for path in sorted(Path("pipelines/configs").glob("*.toml")):
    load_config(path, [])
    show_loaded(path.stem)
"""


def test_light_modules_and_shipped_configurations_load_no_heavy_library() -> None:
    """One after the other, in one process: the first line with more than a name is that of the one that does."""
    done = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, check=True, cwd=ROOT)
    configs = [path.stem for path in sorted(ROOT.glob("pipelines/configs/*.toml"))]
    assert done.stdout.splitlines() == ["pipelines.cli", *LIGHT, *configs]


def test_modules_whose_shapes_are_checked_in_tests_exist() -> None:
    """A module that was moved would silently go unchecked."""
    assert [name for name in CHECKED if find_spec(name) is None] == []


def third_party_imports(path: Path) -> set[str]:
    """The top-level names outside the standard library that a module imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:  # else: a sibling
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ("magrpo/types.py", set()),
        ("magrpo/seeds.py", set()),
        ("magrpo/sandboxes/jail/**/*.py", set()),
        ("magrpo/algo/**/*.py", {"magrpo", "magrpo_kernels", "jaxtyping", "numpy", "scipy", "torch"}),
        ("magrpo_kernels/**/*.py", {"magrpo_kernels", "jaxtyping", "torch", "triton"}),
    ],
)
def test_packages_keep_to_their_dependencies(files: str, allowed: set[str]) -> None:
    paths = list(ROOT.glob(files))
    assert paths
    assert set().union(*map(third_party_imports, paths)) <= allowed
