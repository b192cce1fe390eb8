from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from magrpo.checks.problems import load_problems
from magrpo.errors import ConfigError, PluginFailed
from magrpo.problems.files import FileProblems
from magrpo.problems.rows import DatasetRow
from magrpo.types import Problem

ADD = Problem("add/2", "p", "f", "t")


class Given:
    """Loads ``splits``, whatever they are."""

    def __init__(self, splits: Any) -> None:
        self.splits = splits

    def load(self) -> Any:
        return self.splits


@pytest.mark.parametrize(
    ("splits", "fault"),
    [
        (None, "returned None; it must return a mapping from splits (train, test, ood) to lists of Problems"),
        ([ADD], "returned [Problem("),
        ({"validation": [ADD]}, "returned the split 'validation'; splits are train, test, ood"),
        ({"train": 5}, "returned 5 for the split 'train'"),
        ({"train": [{"prompt": "p"}]}, "returned {'prompt': 'p'} in the split 'train'"),
        (
            {"train": [Problem("a", None)]},
            "returned the ill-typed problem 'a'; Expected `str`, got `null` - at `$.prompt`",
        ),
        ({"train": [Problem(2, "p")]}, "returned the ill-typed problem 2; Expected `str`, got `int` - at `$.task_id`"),
        (
            {"train": [Problem("a", "p", tags={"b": 1})]},  # type: ignore[dict-item]
            "returned the ill-typed problem 'a'; Expected `str`, got `int` - at `$.tags[...]`",
        ),
    ],
)
def test_unusable_splits_are_refused(splits: object, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_problems(Given(splits))
    assert str(raised.value).startswith(f"problems tests.checks.test_problems:Given: load() {fault}")
    assert "\n" not in str(raised.value)


def test_splits_may_come_from_generators() -> None:
    def generate(number: int) -> Iterator[Problem]:
        yield Problem(f"add/{1 // number}", "p")

    assert load_problems(Given({"train": generate(1), "test": [ADD]})) == {
        "train": [Problem("add/1", "p")],
        "test": [ADD],
    }
    with pytest.raises(PluginFailed, match=r"Given: load\(\) failed: ZeroDivisionError: "):
        load_problems(Given({"train": generate(0)}))


class Parsed(FileProblems):
    """Parses a row as the row itself says."""

    benchmark: ClassVar[str] = ""
    kind: str = "parsed"

    def parse(self, row: DatasetRow) -> Any:
        answers = {"text": "p", "problem": ADD, "untyped": Problem("add/2", 3), "nothing": None}
        return answers[row.values["give"]]


@pytest.mark.parametrize(
    ("give", "fault"),
    [
        ("text", "returned 'p' for row '{}:1'; it must return a Problem, or None to skip the row"),
        ("untyped", "returned the ill-typed problem 'add/2' for row '{}:1'; Expected `str`, got `int` - at `$.prompt`"),
    ],
)
def test_a_row_that_becomes_no_problem_is_named(tmp_path: Path, give: str, fault: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"give": give}))
    with pytest.raises(ConfigError) as raised:
        Parsed(source=str(path)).load()
    assert str(raised.value) == f"problems tests.checks.test_problems:Parsed: parse() {fault.format(path)}"
    path.write_text(json.dumps({"give": "unknown"}))
    with pytest.raises(PluginFailed, match=r"Parsed: parse[(][)] failed for row '.*:1': KeyError: 'unknown'"):
        Parsed(source=str(path)).load()
