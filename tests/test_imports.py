"""What imports what: light modules stay light, every table entry exists, packages keep to their dependencies."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from magrpo.plugins import TABLES, Plugin, import_plugin
from tests.conftest import CHECKED

ROOT = Path(__file__).parents[1]
HEAVY = {
    *("datasets", "matplotlib", "mlflow", "pandas", "peft", "prefect"),
    *("ray", "torch", "transformers", "triton", "vllm"),
}


def list_loaded(code: str) -> set[str]:
    """The modules that a process has loaded after ``code``."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print('loaded:', *sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.partition("loaded:")[2].split())


@pytest.mark.parametrize(
    "module",
    [
        *("magrpo.config.run", "magrpo.library", "magrpo.interfaces", "pipelines.commands.train"),
        *("magrpo.tracking.mlflow_runs", "magrpo.tracking.model_registry"),
    ],
)
def test_light_modules_load_no_heavy_library(module: str) -> None:
    assert HEAVY & list_loaded(f"import {module}") == set()


def test_the_command_line_loads_the_configuration_when_a_command_needs_it() -> None:
    loaded = list_loaded("import pipelines.cli")
    assert not {*HEAVY, "magrpo.config.run", "magrpo.run.store"} & loaded


READING = f"""
import sys
from pathlib import Path
from magrpo.config.run import load_config
for path in sorted(Path("pipelines/configs").glob("*.toml")):
    load_config(path, [])
    print(path.stem, *{HEAVY}.intersection(sys.modules))
"""


def test_reading_a_configuration_loads_no_heavy_library() -> None:
    """Of all that ship, one after the other: the first line with more than a name is that of the one that does."""
    done = subprocess.run([sys.executable, "-c", READING], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == [path.stem for path in sorted(ROOT.glob("pipelines/configs/*.toml"))]


@pytest.mark.parametrize(
    ("table", "kind"), [(table, kind) for table in TABLES.values() for kind in table], ids=lambda value: str(value)[:20]
)
def test_every_table_entry_is_a_plugin(table: Mapping[str, str], kind: str) -> None:
    assert issubclass(import_plugin(table, kind), Plugin)


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
