"""Problems in the form of LiveCodeBench, from small files of our own."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from magrpo.problems.livecodebench import LiveCodeBench
from magrpo.problems.rows import read_rows
from magrpo.rewards.coding import MAXIMA, CodingReward, SoloReward
from magrpo.sandboxes.pool import Pool
from magrpo.stages.score import Scored, score_texts
from magrpo.types import Problem
from tests.problems.test_files import jsonl, numbered

STATEMENT = "Add up $n \\le 9$ numbers.\n\nThe first line is n, the second the numbers."
PAIRS = [("2\n1 2\n", "3\n"), ("1\n-4", "-4"), ("3\n1 1 1\n", "3.0\n\n"), ("0\n\n", "0")]
SUM = "lines = stdin.split('\\n')\n    return "
METHOD = "class Solution:\n    def join(self, words: List[str], times: int = 1) -> str:\n        "


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def lcb(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A LiveCodeBench row with one public and three packed private tests; fields changed to ``...`` are left out."""
    tests = [{"input": given, "output": expected, "testtype": "stdin"} for given, expected in PAIRS]
    whole = {
        "question_id": f"abc{number}",
        "question_content": STATEMENT + numbered(number),
        "starter_code": "",
        "difficulty": "easy" if number % 2 else "hard",
        "public_test_cases": json.dumps(tests[:1]),
        "private_test_cases": packed(json.dumps(tests[1:])),
        "metadata": "{}",
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not ...}


def lcb_method(number: int = 0) -> dict[str, Any]:
    """A LiveCodeBench row on a method instead of standard input, whose private tests are plain JSON."""
    tests = [
        {"input": '["a", "b"]\n2', "output": '"abab"', "testtype": "functional"},
        {"input": "[]\n1", "output": '""', "testtype": "functional"},
    ]
    return lcb(
        number,
        starter_code=METHOD,
        public_test_cases=json.dumps(tests[:1]),
        private_test_cases=json.dumps(tests),
        metadata=json.dumps({"func_name": "join"}),
    )


def load(rows: list[dict[str, Any]], folder: Path, **options: Any) -> dict[str, Problem]:
    """The problems of a file with these rows, by ``task_id``."""
    source = jsonl(folder / "rows.jsonl", rows)
    fields = {"kind": "livecodebench", "source": source, "test_frac": 0.5, **options}
    splits = LiveCodeBench.model_validate(fields).load()
    return {problem.task_id: problem for problems in splits.values() for problem in problems}


def solve(pool: Pool, problem: Problem, body: str) -> Scored:
    signature = problem.prompt[problem.prompt.index("def ") :].split("\n")[0]
    above = problem.prompt[: problem.prompt.index("def ")]
    text = f"{above}{signature}\n    {body}\n"
    [scored], _ = score_texts([(problem, {"solo": text})], reward=SoloReward(), sandbox=pool, cache={})
    return scored


def passed(pool: Pool, problem: Problem, body: str) -> tuple[int, int]:
    """Tests passed, shown ones and hidden ones, by the entry point with this body."""
    reports = solve(pool, problem, body).reports
    assert not any(report.forgeable for report in reports.values())
    return reports["program"].tests_passed, reports["program_hidden"].tests_passed


# ------------------------------------------------------------------------------------------------------ --- tests
def test_standard_input_becomes_an_argument(pool: Pool, tmp_path: Path) -> None:
    problem = load([lcb(i) for i in range(4)], tmp_path)["LiveCodeBench/abc0"]
    assert problem.prompt.startswith('def solve(stdin: str) -> str:\n    """Add up $n \\\\le 9$ numbers.\n')
    assert problem.entry_point == "solve"
    assert "-4" not in problem.prompt + problem.test
    assert passed(pool, problem, SUM + "str(sum(map(int, lines[1].split())))") == (1, 3)
    assert passed(pool, problem, SUM + "f'  {sum(map(int, lines[1].split())):.3f} \\n\\n'") == (1, 3)
    assert passed(pool, problem, SUM + "lines[0].replace('2', '3')") == (1, 2)
    assert passed(pool, problem, SUM + "'\\n3'") == (1, 1)
    assert passed(pool, problem, SUM + "'3 3'") == (0, 0)


def test_two_agents_share_a_contest_problem(pool: Pool, tmp_path: Path) -> None:
    problem = load([lcb(i) for i in range(4)], tmp_path)["LiveCodeBench/abc0"]
    texts = {
        "helper": "def aux(stdin):\n    return [int(word) for word in stdin.split()[1:]]",
        "main": "def solve(stdin):\n    return str(sum(aux(stdin)))",
    }
    [scored], _ = score_texts([(problem, texts)], reward=CodingReward(), sandbox=pool, cache={})
    assert scored.reward.parts == MAXIMA


def test_functions_of_livecodebench(pool: Pool, tmp_path: Path) -> None:
    problem = load([lcb_method(i) for i in range(4)], tmp_path)["LiveCodeBench/abc1"]
    assert "def join(words: List[str], times: int=1) -> str:\n" in problem.prompt
    assert passed(pool, problem, "return ''.join(words) * times") == (1, 2)
    assert passed(pool, problem, "return 'abab'") == (1, 1)


# ----------------------------------------------------------------------------------------------------------- hostile
@pytest.mark.parametrize(
    "body",
    [
        "class S(str):\n        strip = lambda self: self\n        split = lambda self, *_: [self]\n        "
        "__eq__ = lambda self, other: True\n        __hash__ = str.__hash__\n    return S('x')",
        "from unittest.mock import ANY\n    return ANY",
        "from unittest.mock import MagicMock\n    return MagicMock()",
        "print('3')\n    return ''",
        "import os\n    os.write(1, b'3')\n    return None or 0",
        "return b'3'",
        "return 3",
        "return [['3']]",
        "return '9' * (1 << 23)",
        "return 'sNaN'",
        "return '1e999999999999999999'",
        "return '\\ud800'",
    ],
)
def test_a_forged_output_is_no_output(pool: Pool, tmp_path: Path, body: str) -> None:
    problem = load([lcb(i) for i in range(4)], tmp_path)["LiveCodeBench/abc0"]
    scored = solve(pool, problem, body)
    assert not scored.masked
    assert (scored.reward.parts["tests"], scored.reports["program"].tests_total) == (0.0, 1)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    class Harm:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(mark),)

    pickle.loads(pickle.dumps(Harm()))
    mark.rmdir()
    for harm in (Harm(), [json.dumps([]), Harm()], b"[]", ["[]", "[]"], {"a": "[]"}):
        with pytest.raises(ValueError, match=r"rows\.jsonl:1: .* contains a pickle of something other than a string"):
            load([lcb(0, private_test_cases=packed(harm)), lcb(1)], tmp_path)
    assert not mark.exists()


# ------------------------------------------------------------------------------------------------------------ limits
def test_limits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    easy = load([lcb(i) for i in range(6)], tmp_path, difficulty=["easy"])
    assert set(easy) == {"LiveCodeBench/abc1", "LiveCodeBench/abc3", "LiveCodeBench/abc5"}
    assert "skipped 3 of 6 rows" in caplog.text
    assert "of the public test split of LiveCodeBench" in caplog.text
    few = load([lcb(i) for i in range(4)], tmp_path, max_tests=2)
    assert few["LiveCodeBench/abc0"].hidden_test.count("assert") == 2
    short = load([lcb(i) for i in range(4)], tmp_path, max_test_chars=8)
    assert short["LiveCodeBench/abc0"].test.count("assert") == 1
    assert short["LiveCodeBench/abc0"].hidden_test.count("assert") == 2
    with pytest.raises(ValueError, match=r"rows\.jsonl: all 2 rows were skipped; widen the limits in \[problems\]"):
        load([lcb(i) for i in range(2)], tmp_path, max_test_chars=7)


def test_parquet_and_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_list([lcb(i) for i in range(4)]).to_parquet(path)
    whole = LiveCodeBench(kind="livecodebench", source=str(path), test_frac=0.5).load()
    assert sum(len(problems) for problems in whole.values()) == 4
    asked: list[Any] = []

    def download(repository: str, name: str, repo_type: str) -> str:
        asked.append((repository, name, repo_type))
        if name == "none.jsonl":
            raise FileNotFoundError("offline")
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert len(read_rows("owner/name:data/rows.parquet", "test")) == 4
    assert asked == [("owner/name", "data/rows.parquet", "dataset")]
    with pytest.raises(ValueError, match=r"owner/name:none\.jsonl: .* offline; give the path of a local copy"):
        read_rows("owner/name:none.jsonl", "test")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (lcb(question_content=...), "has no field 'question_content'"),
        (lcb(public_test_cases="["), "field 'public_test_cases' is not JSON"),
        (lcb(public_test_cases="[1]"), "field 'public_test_cases' is not a list of tests"),
        (lcb(private_test_cases="AAAA"), "field 'private_test_cases' is neither JSON nor packed JSON"),
        (lcb(starter_code=METHOD), "field 'metadata' has no func_name"),
        (lcb_method() | {"starter_code": "def"}, "field 'starter_code' is not Python"),
        (
            lcb_method() | {"starter_code": "x = 1"},
            "field 'starter_code' does not define the function 'join'",
        ),
        (lcb(public_test_cases="NaN"), "field 'public_test_cases' is not JSON: NaN is not a number"),
    ],
)
def test_an_unusable_row_is_named_with_its_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: {message}"):
        load([row, row], tmp_path)
