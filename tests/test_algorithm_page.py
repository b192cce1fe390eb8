"""docs/algorithm.md and docs/recipes.md: numbers are those that the code computes, the recipe works as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from magrpo.algo import advantages
from magrpo.algo.advantages import ESTIMATORS, group_advantages
from magrpo.config.run import RunConfig, load_config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def read_section(page: str, title: str) -> str:
    return re.split(r"^## ", page[page.index(f"## {title}") + 3 :], maxsplit=1, flags=re.MULTILINE)[0]


def read_table(page: str, title: str) -> list[list[str]]:
    rows = [line for line in read_section(page, title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_iteration_in_numbers_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    [(program, output)] = re.findall(r"```python\n(.*?)```\n\nIt prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == output


def test_aligned_mode_gives_the_advantages_that_the_page_says() -> None:
    section = read_section(PAGE, "One iteration in numbers")
    shown = ", ".join(f"{value:g}" for value in group_advantages([4.0, 2.5, 1.5, 1.5], "magrpo"))
    assert f"advantages {shown}," in " ".join(section.split())


def test_the_table_of_estimators_is_that_of_the_code() -> None:
    _, *rows_of_table = read_table(PAGE, "Advantage")  # the first is the head
    rows = {row[0].split("`")[1]: row for row in rows_of_table}
    assert rows.keys() <= ESTIMATORS.keys()
    for name, row in rows.items():
        values = group_advantages([1.0, 2.0, 2.0, 3.0], name)
        assert row[-1] == ", ".join(f"{value:.4g}" for value in values)
        assert row[3].startswith("yes") == bool(ESTIMATORS[name].bias)


def test_the_settings_of_the_default_run_are_those_of_its_file() -> None:
    shipped = load_config(ROOT / "pipelines" / "configs" / "embedded.toml")
    for key, embedded, default, _ in read_table(PAGE, "What the default run uses"):
        section, name = key.strip("`").split(".")
        field: Any = RunConfig.model_fields[section].annotation.model_fields[name]
        assert embedded == str(getattr(getattr(shipped, section), name)), key
        assert default == str(field.default), key


ADDED = """
import sys, types
source = sys.stdin.read()
sys.modules["magrpo.algo.advantages"] = module = types.ModuleType("magrpo.algo.advantages")
exec(source, vars(module))
from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.planning.warnings import list_config_warnings
config = load_config(sys.argv[1], ["algo.estimator=mamedian"])
print(list_config_warnings(config))
print(module.group_advantages([1.0, 2.0, 6.0], "mamedian"), module.group_advantages([2.0, 2.0], "mamedian"))
try:
    load_config(sys.argv[1], ["algo.estimator=mamedain"])
except ConfigError as error:
    print(error)
"""


def test_an_estimator_is_added_as_the_recipe_says() -> None:
    """One function and one row of the module suffice, in a process of its own."""
    function, row = re.findall(r"```python\n(.*?)```", read_section(RECIPES, "Add an estimator"), re.DOTALL)
    source = Path(advantages.__file__).read_text(encoding="utf-8")
    table = "ESTIMATORS: Mapping[str, Estimator] = {\n"
    assert source.count(table) == 1
    changed = source.replace(table, f"{function}\n\n{table}{row}")
    config = ROOT / "pipelines" / "configs" / "embedded.toml"
    command = [sys.executable, "-c", ADDED, str(config)]
    done = subprocess.run(command, input=changed, capture_output=True, text=True, cwd=ROOT, check=True)
    warnings, computed, message = done.stdout.splitlines()
    assert "estimator 'mamedian': the median may be the completion's own return" in warnings
    assert computed == "[-1.0, 0.0, 4.0] [0.0, 0.0]"
    assert "unknown value 'mamedain'; did you mean 'mamedian'?" in message
