"""Lone surrogates in any text that enters are replaced: no file is refused for them, and no run ends by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magrpo.python_source import parse_python
from magrpo.sandboxes.pool import Pool
from magrpo.stages.prepare import prepare
from magrpo.text import replace_surrogates
from magrpo.types import Execution, Problem
from pipelines.cli import main
from tests.pipelines.micro import blank_pictures

HALF = "a\ud83d\udc00b\ud800"  # a pair that json.loads would join, and a half
EMBEDDED = Path(__file__).parents[1] / "pipelines" / "configs" / "embedded.toml"
TEST = "def check(candidate):\n    assert candidate(1) == '\\ud800'\n    assert candidate(2) == 2\n"
PROMPT = f'def f(x):\n    """Do {HALF}."""\n'


def test_plain_json_with_and_without() -> None:
    assert replace_surrogates({"a\ud800": [HALF, 1, None]}) == {"a\ufffd": ["a\ufffd\ufffdb\ufffd", 1, None]}
    with pytest.raises(SyntaxError, match="surrogates"):
        parse_python("x = '\ud800'")


def test_problems_of_any_set_are_prepared_without() -> None:
    class Odd:
        def load(self) -> dict[str, list[Problem]]:
            return {split: [Problem(f"{split}\ud800", HALF, tags={"a": "\ud800"})] for split in ("train", "test")}

    splits = prepare(Odd(), 1)
    assert splits["train"] == [Problem("train\ufffd", "a\ufffd\ufffdb\ufffd", tags={"a": "\ufffd"})]


def test_the_sandbox_takes_them_in_programs_tests_and_values(pool: Pool) -> None:
    values, source, test = pool.run(
        [
            Execution("def f(x):\n    return '\\ud800' if x == 1 else '\\udfff'\n", "f", TEST),
            Execution("def f(x):\n    return '\ud800'\n", "f", TEST),
            Execution("def f(x):\n    return 1\n", "f", "assert f(1) == '\ud800'"),
        ]
    )
    assert [case.status for case in values.cases] == ["pass", "wrong"]
    assert "\\udfff" in values.cases[1].message
    assert (source.status, source.compiles) == ("load_error", False)
    assert (test.status, "surrogates" in test.cases[0].message) == ("test_error", True)


def write_lines(path: Path, rows: list[dict[str, object]], *, escaped: bool) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@pytest.mark.parametrize("escaped", [True, False])
def test_a_file_to_score(tmp_path: Path, escaped: bool) -> None:
    problem: dict[str, object] = {"task_id": "t\ud800", "prompt": PROMPT, "entry_point": "f", "test": TEST}
    helper, entry = f"def aux(x):\n    return '{HALF}'", "def f(x):\n    return aux(x)"
    completion: dict[str, object] = {"task_id": "t\ud800", "completions": {"helper": helper, "main": entry}}
    problems = write_lines(tmp_path / "problems.jsonl", [problem], escaped=escaped)
    completions = write_lines(tmp_path / "completions.jsonl", [completion], escaped=escaped)
    output = tmp_path / "out.jsonl"
    options = ["--problems", str(problems), "--completions", str(completions), "--output", str(output)]
    assert main(["score", *options, "sandbox.workers=1"]) == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    assert (report["task_id"], report["status"], report["reward"]) == ("t\ufffd", "wrong", 1.5)


def test_a_run_trains_on_them(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "task_id": f"t/{number}\ud800",
            "prompt": f'def f(x):\n    """Add {number} {HALF}."""\n',
            "entry_point": "f",
            "test": "def check(candidate):\n    assert candidate('\ud800') == 1\n",
            "canonical_solution": "    return 1\n",
        }
        for number in range(4)
    ]
    source = write_lines(tmp_path / "problems.jsonl", rows, escaped=True)
    changes = [
        "problems.kind=humaneval",
        f"problems.source={source}",
        "problems.test_frac=0.5",
        "train.num_iterations=1",
        "rollout.problems_per_iteration=2",
        "rollout.group_size=2",
        "eval.num_samples=1",
        "sandbox.workers=1",
    ]
    with blank_pictures():
        assert main(["train", str(EMBEDDED), *changes, "--name", "odd", "--root", str(tmp_path), "--local"]) == 0
    assert main(["ask", "odd", "--root", str(tmp_path), f"Add {HALF}"]) == 0
