"""``magrpo score`` refuses files that it cannot use before it opens the sandbox, with one line that names the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import main

PROBLEM = {"task_id": "t", "prompt": "def f(x):\n", "entry_point": "f", "test": "assert f(1) == 1"}
COMPLETION = {"task_id": "t", "completions": {"helper": "", "main": "def f(x):\n    return x"}}


@pytest.mark.parametrize(
    ("problem", "completion", "message"),
    [
        ({"test": "(" * 3000}, {}, "problems.jsonl:1: field 'test' is not Python: SyntaxError: too many nested"),
        (
            {"test": "assert f(1) == " + "-" * 3000 + "1"},
            {},
            "'test' is not Python: SyntaxError: too deeply nested",
        ),
        ({"test": "assert f(1)\n" * 20_000}, {}, "problems.jsonl:1: field 'test' has 20,000 asserts; at most 10,000"),
        ({"hidden_test": "assert"}, {}, "problems.jsonl:1: field 'hidden_test' is not Python: SyntaxError"),
        ({"prompt": "x" * 5_000_000}, {}, "problems.jsonl:1: field 'prompt' has 5,000,000 characters"),
        ({"prompt": 3}, {}, "problems.jsonl:1: ValidationError: Expected `str`, got `int` - at `$.prompt`"),
        ({}, {"task_id": "x" * 10**5}, "completions.jsonl:1: task_id 'xxx"),
        (
            {},
            {"completions": {"x" * 10**5: ""}},
            "completions.jsonl:1: completions needs the keys helper and main, got",
        ),
    ],
)
def test_an_unusable_row_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    problem: dict[str, Any],
    completion: dict[str, Any],
    message: str,
) -> None:
    assert main(["score", *write_inputs(tmp_path, problem, completion)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert len(line) < 600
    assert not (tmp_path / "out.jsonl").exists()


def write_inputs(folder: Path, problem: dict[str, Any], completion: dict[str, Any]) -> list[str]:
    """Write a problem and a completion with these changes; returns the arguments that name the files."""
    (folder / "problems.jsonl").write_text(json.dumps(PROBLEM | problem))
    (folder / "completions.jsonl").write_text(json.dumps(COMPLETION | completion))
    files = {"problems": "problems.jsonl", "completions": "completions.jsonl", "output": "out.jsonl"}
    return [word for flag, name in files.items() for word in (f"--{flag}", str(folder / name))]


def test_a_program_of_one_programmer_is_scored(tmp_path: Path) -> None:
    completion = {"completions": {"solo": "def f(x):\n    return x"}}
    assert main(["score", *write_inputs(tmp_path, {}, completion), "reward.kind=solo"]) == 0
    report = json.loads((tmp_path / "out.jsonl").read_text())
    assert (report["status"], report["reward"]) == ("pass", 2.5)


def test_a_reward_of_texts_is_refused_before_a_report_is_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").write_text("an earlier report")
    assert main(["score", *write_inputs(tmp_path, {}, {}), "reward.kind=writing"]) == 2
    assert "reward.kind = 'writing': magrpo score runs programs of helper and main" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "an earlier report"


def test_a_test_that_cannot_be_run_is_not_the_sandboxs_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems, completions, output = (tmp_path / f"{name}.jsonl" for name in ("problems", "completions", "out"))
    problems.write_text(json.dumps(PROBLEM | {"test": "import pytest\nassert f(1) == 1"}))
    completions.write_text(json.dumps(COMPLETION))
    files = ["--problems", str(problems), "--completions", str(completions), "--output", str(output)]
    assert main(["score", *files]) == 1
    report = json.loads(output.read_text())
    assert (report["status"], report["reward"]) == ("test_error", None)
    assert "1 not scored: their tests cannot be run" in " ".join(capsys.readouterr().err.split())
