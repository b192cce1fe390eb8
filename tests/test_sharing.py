"""The workers' plan names modules that exist, and keeps units whole."""

from __future__ import annotations

from pathlib import Path

from tests.sharing import SECONDS, SLOW, SPLIT, TOGETHER, unit_of

ROOT = Path(__file__).parents[1]


def test_every_module_of_the_plan_exists() -> None:
    units = set(TOGETHER.values())
    named = {name.partition("::")[0] for name in (*TOGETHER, *SPLIT, *SECONDS, *SLOW)} - units
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    assert not set(SPLIT) & set(TOGETHER)


def test_a_unit_is_a_module_unless_the_plan_says_otherwise() -> None:
    assert unit_of("tests/run/test_store.py::test_it[a::b]") == "tests/run/test_store.py"
    together, split = next(iter(TOGETHER)), SPLIT[0]
    assert unit_of(f"{together}::test_it") == TOGETHER[together]
    assert unit_of(f"{split}::test_it") == f"{split}::test_it"
