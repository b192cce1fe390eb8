"""``magrpo score`` refuses files that it cannot use before it opens the sandbox, with one line that names the row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

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
        ({"prompt": None}, {}, "problems.jsonl:1: has no 'prompt'; its keys are task_id, entry_point, test"),
        ({}, {"task_id": None, "completions": None}, "completions.jsonl:1: has no 'task_id' and no 'completions'; its"),
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


def test_a_file_that_trains_can_be_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parquet has null for what is missing; further columns and numbers as ids are fine in training, too."""
    arguments = write_inputs(tmp_path, {"task_id": 7, "tags": ["easy"]}, {"task_id": 7})
    path = tmp_path / "problems.jsonl"
    row = json.loads(path.read_text()) | {"canonical_solution": None, "hidden_test": None}
    path.write_text(json.dumps(row))
    assert main(["score", *arguments]) == 0, capsys.readouterr().err


def write_inputs(folder: Path, problem: dict[str, Any], completion: dict[str, Any]) -> list[str]:
    """Write a problem and a completion with these changes (None: no such key); returns the arguments of the files."""
    for name, row in (("problems", PROBLEM | problem), ("completions", COMPLETION | completion)):
        kept = {key: value for key, value in row.items() if value is not None}
        (folder / f"{name}.jsonl").write_text(json.dumps(kept))
    files = {"problems": "problems.jsonl", "completions": "completions.jsonl", "output": "out.jsonl"}
    return [word for flag, name in files.items() for word in (f"--{flag}", str(folder / name))]


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--output", "completions.jsonl", "--output {path} is the file of --completions; name another file"),
        ("--output", "linked.jsonl", "--output {path} is the file of --problems; name another file"),
        ("--output", "folder", "--output {path} is a folder; name a file"),
        ("--completions", "folder", "{path}: is a folder; name a file"),
        ("--completions", "nowhere.jsonl", "{path}: no such file"),
        ("--completions", "empty.jsonl", "{path}: contains no completion"),
        ("--problems", "empty.jsonl", "{path}: contains no problem"),
    ],
)
def test_an_unusable_file_is_named_and_inputs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, name: str, message: str
) -> None:
    arguments = write_inputs(tmp_path, {}, {})
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "linked.jsonl").symlink_to("problems.jsonl")
    before = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    arguments[arguments.index(flag) + 1] = str(tmp_path / name)
    assert main(["score", *arguments]) == 2
    assert capsys.readouterr().err == f"magrpo: {message.format(path=tmp_path / name)}\n"
    assert {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")} == before


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


def test_a_refusal_keeps_the_earlier_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.jsonl").write_text("an earlier report")
    arguments = write_inputs(tmp_path, {}, {})
    before = sorted(tmp_path.iterdir())
    assert main(["score", *arguments, "sandbox.kind=none"]) == 2
    assert "sandbox.kind = 'none' runs no programs" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == "an earlier report"
    assert sorted(tmp_path.iterdir()) == before


def test_a_report_replaces_the_file_behind_a_link_and_is_written_into_a_pipe(tmp_path: Path) -> None:
    arguments = write_inputs(tmp_path, {}, {})
    (tmp_path / "earlier.jsonl").write_text("an earlier report")
    (tmp_path / "out.jsonl").symlink_to("earlier.jsonl")
    assert main(["score", *arguments]) == 0
    assert json.loads((tmp_path / "earlier.jsonl").read_text())["status"] == "pass"
    assert (tmp_path / "out.jsonl").is_symlink()
    arguments[-1] = str(tmp_path / "pipe")
    os.mkfifo(arguments[-1])
    pipe = os.open(arguments[-1], os.O_RDWR)  # opening only one end would wait for the other
    try:
        assert main(["score", *arguments]) == 0
        assert json.loads(os.read(pipe, 10_000))["status"] == "pass"
    finally:
        os.close(pipe)


def test_parquet_is_scored_like_its_json_lines(tmp_path: Path) -> None:
    arguments = write_inputs(tmp_path, {}, {})
    for place in (1, 3):
        rows = [json.loads(Path(arguments[place]).read_text())]
        arguments[place] = str(Path(arguments[place]).with_suffix(".parquet"))
        parquet.write_table(pyarrow.Table.from_pylist(rows), arguments[place])
    assert main(["score", *arguments]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["status"] == "pass"


def test_a_report_to_a_stream_is_appended_to_what_the_stream_holds(tmp_path: Path) -> None:
    """As ``--output /dev/stdout >> all.jsonl`` does."""
    arguments = write_inputs(tmp_path, {}, {})
    with (tmp_path / "all.jsonl").open("ab") as file:
        file.write(b'{"status": "old"}\n')
        file.flush()
        arguments[arguments.index("--output") + 1] = f"/dev/fd/{file.fileno()}"
        assert main(["score", *arguments]) == 0
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["old", "pass"]


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


def test_only_the_program_itself_makes_a_line_forgeable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the variant in which results of ``aux`` cannot be used, the test does arithmetic with an object."""
    texts = {"helper": "def aux(x):\n    return x / 2", "main": "def f(x):\n    return aux(x)"}
    problem = {"test": "assert abs(f(1) - 0.5) < 1e-6"}
    assert main(["score", *write_inputs(tmp_path, problem, {"completions": texts})]) == 0
    report = json.loads((tmp_path / "out.jsonl").read_text())
    assert (report["status"], report["forgeable"]) == ("pass", False)
    assert "forge" not in capsys.readouterr().err
