from __future__ import annotations

import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import parquet

from magrpo.errors import ConfigError
from magrpo.files.hub import NotCached, check_cached, read_cache_only
from magrpo.plugins import TABLES, build_plugin
from magrpo.problems.humaneval import CoopHumanEval, HumanEval
from magrpo.problems.mbpp import Mbpp
from magrpo.problems.rows import read_rows, split_by_hash
from magrpo.types import Problem
from tests.sandbox.test_humaneval import HUMANEVAL


def numbered(number: int) -> str:
    """What makes the text of a row one of its own; nothing for the first."""
    return f" Row {number}." if number else ""


def row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A row in the form of HumanEval with ``changes`` to its fields; fields changed to ``...`` are left out."""
    whole = {
        "task_id": f"mine/{number}",
        "prompt": f'def f(x):\n    """Return x.{numbered(number)}"""\n',
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        "canonical_solution": "    return x\n",
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not ...}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(values) + "\n" for values in rows), encoding="utf-8")
    return str(path)


def passes(problem: Problem) -> None:
    names: dict[str, Any] = {}
    exec(problem.prompt + problem.canonical_solution, names)
    test: dict[str, Any] = {}
    exec(problem.test, test)
    test["check"](names[problem.entry_point])


# ------------------------------------------------------------------------------------------------------------- rows
def test_every_form_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [row(i) for i in range(3)]
    text = "".join(json.dumps(values) + "\n\n" for values in rows)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "windows.jsonl").write_text(text, encoding="utf-8-sig")
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "windows.jsonl"):
        assert [r.values for r in read_rows(str(tmp_path / name), "test")] == rows, name
    assert [r.where for r in read_rows(str(tmp_path / "a.jsonl"), "test")][1] == f"{tmp_path}/a.jsonl:3"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"task_id": 1}\n{"task_id": \n', r"a\.jsonl:2: is not JSON: Expecting value \(column 12\)"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: is not a JSON object"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: contains no rows"),
        ("a.jsonl", b"\xff\xfe{", r"a\.jsonl: cannot be read"),
        ("a.json", b'{"task_id": 1}', r"a\.json: is not a JSON array of objects; .* \.jsonl"),
        ("a.json", b"[\n{]", r"a\.json:2: is not JSON: Expecting property name .* \(column 2\)$"),
        ("a.csv", b"task_id,prompt\n", r"a\.csv:1: is not JSON: .*; give a \.jsonl, .* or \.parquet file$"),
        ("a.xlsx", b"PK\xff", r"a\.xlsx: cannot be read: .*; give a \.jsonl, .* or \.parquet file$"),
        (
            "a.jsonl",
            b'[\n {"id": 1}\n]',
            r"a\.jsonl:1: is not JSON: .*; if the file is one array, name it \.json$",
        ),
        ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 50, mtime=0)[:-20], r"a\.jsonl\.gz: cannot be read"),
        ("a.parquet", b"plain", r"a\.parquet: cannot be read as Parquet"),
        ("a.jsonl", b"{}\n" + b"[" * 10**5, r"a\.jsonl:2: cannot be read as JSON: RecursionError"),
        ("a.json", b'[{"task_id": ' + b"9" * 5000 + b"}]", r"a\.json:1: cannot be read as JSON: ValueError"),
    ],
)
def test_an_unusable_file_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(str(tmp_path / name), "test")


def test_a_parquet_file_with_bad_text_is_named(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as Parquet: UnicodeDecodeError"):
        read_rows(str(tmp_path / "a.parquet"), "test")


@pytest.mark.parametrize(
    "source", ["./none", "none.jsonl", "/no/where", "none", "a/b/c.jsonl.gz", "~nobody-here/x.jsonl"]
)
def test_a_missing_file_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(ValueError, match=r"no such file; give a \.jsonl, .* or a hub id like owner/name"):
        read_rows(source, "test")


def test_a_hub_id_is_read_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> Dataset:
        asked.append((name, config, split))
        if name == "owner/none":
            raise ConnectionError("offline")
        if name == "owner/script":
            raise RuntimeError("Dataset scripts are no longer supported, but found script.py")
        return Dataset.from_list([row()])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert read_rows("owner/name", "test")[0].values == row()
    read_rows("owner/mbpp", "train+test")
    assert asked == [("owner/name", None, "test"), ("owner/mbpp", "sanitized", "train+test")]
    with pytest.raises(ValueError, match=r"owner/none: .* offline; give the path of a local copy"):
        read_rows("owner/none", "test")
    with pytest.raises(ValueError, match=r"owner/script: .* no longer supported, .*; give the path of a local copy"):
        read_rows("owner/script", "test")


def test_a_cached_data_set_is_found_by_the_name_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package datasets writes the name, but not that of the owner, in snake case."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "OpenMLRL___co_ar_xiv-2").mkdir()
    (tmp_path / "mbpp").mkdir()
    with read_cache_only():
        check_cached("OpenMLRL/CoArXiv-2")
        check_cached("mbpp")
        with pytest.raises(NotCached, match="the data set OpenMLRL/Other is not in the cache"):
            check_cached("OpenMLRL/Other")


def test_a_hub_set_whose_files_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, config: str | None, split: str) -> None:
        raise DatasetGenerationError("An error occurred while generating the dataset") from ValueError("bad row 7")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(ConfigError, match="owner/name: its files cannot be read: ValueError: bad row 7; give the path"):
        read_rows("owner/name", "test")


def test_a_split_or_file_that_a_hub_set_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package datasets takes a folder of the name for the data set."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("owner/name", "owner/empty", "owner/pictures"):
        Path(name).mkdir(parents=True)
    jsonl(Path("owner/name/train.jsonl"), [row()])
    Path("owner/pictures/notes.xyz").write_text("nothing")
    with pytest.raises(ConfigError, match=r"owner/name: has no split 'tset': .*'train'.*; set problems\.hub_split"):
        read_rows("owner/name", "tset")
    for name in ("owner/empty", "owner/pictures"):
        with pytest.raises(ConfigError, match=f"{name}: .* data files.*; give the path of a local copy"):
            read_rows(name, "test")


def test_the_split_follows_from_contents_alone() -> None:
    problems = [Problem(f"p/{i}", f"do {i}", test=f"t{i}") for i in range(20)]
    splits = split_by_hash(problems, 0.3, "x")
    assert len(splits["test"]) == 6
    assert sorted(p.task_id for part in splits.values() for p in part) == sorted(p.task_id for p in problems)
    shuffled = split_by_hash(problems[::-1], 0.3, "x")
    assert {p.task_id for p in shuffled["test"]} == {p.task_id for p in splits["test"]}
    assert [p.task_id for p in splits["train"]] == [p.task_id for p in problems if p in splits["train"]]
    renamed = [replace(p, task_id=f"q/{i}", prompt=f"{p.prompt}\n", test="u") for i, p in enumerate(problems)]
    assert [p.prompt.strip() for p in split_by_hash(renamed, 0.3, "x")["test"]] == [p.prompt for p in splits["test"]]


def test_problems_that_ask_the_same_are_in_one_split() -> None:
    problems = [Problem(f"p/{i}", f"do {i % 10}{' ' * (i // 10)}", test=f"t{i}") for i in range(30)]
    splits = split_by_hash(problems, 0.2, "x")
    asked = {split: {" ".join(p.prompt.split()) for p in members} for split, members in splits.items()}
    assert not asked["train"] & asked["test"]
    assert len(splits["test"]) == 6
    assert {len(split_by_hash(problems, frac, "x")["test"]) for frac in (0.1, 0.14, 0.2, 0.23)} == {3, 6, 9}
    with pytest.raises(ValueError, match="leaves a split empty"):
        split_by_hash([Problem("a", "same"), Problem("b", " same")], 0.5, "x")


def test_a_problem_that_is_there_twice_is_taken_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(i, prompt=f'def f(x):\n    """Return {i}."""\n') for i in range(4)]
    again = [{**rows[0], "task_id": "mine/again"}, {**rows[1], "task_id": "mine/other", "test": rows[1]["test"] + "#"}]
    source = jsonl(tmp_path / "mine.jsonl", [*rows, *again])
    splits = HumanEval(kind="humaneval", source=source).load()
    ids = {split: {p.task_id for p in members} for split, members in splits.items()}
    assert set.union(*ids.values()) == {f"mine/{i}" for i in range(4)} | {"mine/other"}
    assert {"mine/1", "mine/other"} in [members & {"mine/1", "mine/other"} for members in ids.values()]
    assert "skipped 1 duplicate problems" in caplog.text


def test_a_split_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match=r"problems\.test_frac: 0\.2 of 2 problems leaves a split empty"):
        split_by_hash([Problem("a", "1"), Problem("b", "2")], 0.2, "x")
    with pytest.raises(ValueError, match="x: task_id 'a' occurs more than once"):
        split_by_hash([Problem("a", ""), Problem("a", "")], 0.5, "x")


# -------------------------------------------------------------------------------------------------------- HumanEval
def test_humaneval_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        splits = HumanEval(kind="humaneval", source=str(HUMANEVAL)).load()
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 131, "test": 33}
    assert "131 problems of the public test split of HumanEval" in caplog.text
    for problem in splits["test"][:5]:
        passes(problem)


def test_problems_of_your_own_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(i, canonical_solution=... if i else "    return x\n") for i in range(4)]
    source = jsonl(tmp_path / "mine.jsonl", rows)
    splits = HumanEval(kind="humaneval", source=source, test_frac=0.5).load()
    assert not caplog.text
    assert {len(problems) for problems in splits.values()} == {2}
    CoopHumanEval(kind="coophumaneval", source=source, test_frac=0.5).load()
    assert "of the public test split of CoopHumanEval" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ...}, r"mine\.jsonl:2: has no field 'prompt'; its fields are task_id, entry_point"),
        ({"prompt": 3}, r"mine\.jsonl:2: field 'prompt' must be a string, not 3"),
        ({"prompt": " \n"}, r"mine\.jsonl:2: field 'prompt' is empty"),
        ({"task_id": ...}, r"mine\.jsonl:2: has no field 'task_id'"),
        ({"task_id": None}, r"mine\.jsonl:2: field 'task_id' must be a string, not None"),
        ({"entry_point": "class"}, r"mine\.jsonl:2: entry_point 'class' is not the name of a function"),
        ({"entry_point": "f(x)"}, r"mine\.jsonl:2: entry_point 'f\(x\)' is not the name of a function"),
        ({"test": "def check(:"}, r"mine\.jsonl:2: field 'test' is not Python: .*\(line 1\)"),
        ({"test": "assert f(1) == 1"}, r"mine\.jsonl:2: test does not define check\(candidate\)"),
        ({"prompt": "x" * 5_000_000}, r"mine\.jsonl:2: field 'prompt' has 5,000,000 characters; at most 4,000,000"),
        ({"test": "assert f(1)\n" * 20_000}, r"mine\.jsonl:2: field 'test' has 20,000 asserts; at most 10,000"),
        (
            {"test": f"def check(f):\n  assert {'(' * 3000}"},
            r"2: field 'test' is not Python: too many nested",
        ),
        ({"test": f"def check(f):\n  assert {'-' * 3000}1"}, r"mine\.jsonl:2: field 'test' is not Python: too deeply"),
        (
            {"test": f"def check(f):\n  assert {'-' * 300}1"},
            r"not Python: nested deeper than 150 levels",
        ),
        (
            {"entry_point": "x" * 10**5 + "("},
            r"2: entry_point 'x*... \(100003 characters\) is not the name",
        ),
    ],
)
def test_an_unusable_field_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = jsonl(tmp_path / "mine.jsonl", [row(0), row(1, **changes)])
    with pytest.raises(ValueError, match=message):
        HumanEval(kind="humaneval", source=source, test_frac=0.5).load()


def test_entry_points_that_no_prompt_defines_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(i, **({"entry_point": "g"} if i == 2 else {})) for i in range(4)]
    HumanEval(kind="humaneval", source=jsonl(tmp_path / "mine.jsonl", rows), test_frac=0.5).load()
    assert "the prompts of 1 of 4 problems do not define their entry_point; the first is mine/2" in caplog.text


# ------------------------------------------------------------------------------------------------------------- MBPP
def mbpp(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A row of MBPP with CRLF line ends, quotes and a second function; fields changed to ``...`` are left out."""
    whole = {
        "task_id": number,
        "prompt": f'Write a function to say whether a number is "round".{numbered(number)}',
        "code": (
            "import math\r\nLIMIT = 2\r\ndef scale(n):\r\n  return n * LIMIT\r\n"
            "def check(n: int, *, k=2) -> bool:\r\n  # a comment\r\n  return scale(n) % k == 0\r\n"
        ),
        "test_imports": ["import math"],
        "test_list": [
            "assert check(4) == True",
            "assert check(\n  3, k=4) == False",
            "assert math.isclose(check(2), 1)",
        ],
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not ...}


def test_mbpp_becomes_the_humaneval_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    splits = Mbpp(kind="mbpp", source=jsonl(tmp_path / "m.jsonl", [mbpp(i) for i in range(4)]), test_frac=0.5).load()
    assert "2 problems of the public test split of MBPP" in caplog.text
    problem = next(p for problems in splits.values() for p in problems if p.task_id == "MBPP/0")
    assert problem.prompt == (
        "import math\n\n\ndef check(n: int, *, k=2) -> bool:\n"
        '    """Write a function to say whether a number is "round"."""\n'
    )
    assert problem.canonical_solution == (
        "    return scale(n) % k == 0\n\n\nLIMIT = 2\n\n\ndef scale(n):\n    return n * LIMIT\n"
    )
    assert problem.entry_point == "check"
    assert problem.test == (
        "import math\ndef check(candidate):\n    check = candidate\n    assert check(4) == True\n"
        "    assert check(3, k=4) == False\n    assert math.isclose(check(2), 1)\n"
    )
    passes(problem)


def test_what_the_tests_need_of_the_solution_is_shown(tmp_path: Path) -> None:
    values = mbpp(
        prompt=...,
        text='Say "hi"',
        code="class Pair:\n    def __init__(self, a):\n        self.a = a\ndef hi(p):\n    '''Own.'''\n    return p.a",
        test_list=["assert hi(Pair(3)) == 3"],
        test_imports=...,
        test_setup_code="",
    )
    splits = Mbpp(kind="mbpp", source=jsonl(tmp_path / "m.jsonl", [values, mbpp(1)]), test_frac=0.5).load()
    problem = next(p for problems in splits.values() for p in problems if p.task_id == "MBPP/0")
    assert problem.prompt.startswith("class Pair:")
    assert problem.prompt.endswith('def hi(p):\n    """Say "hi" """\n')
    names: dict[str, Any] = {}
    exec(problem.prompt + problem.canonical_solution + problem.test, names)
    names["check"](names["hi"])


def test_what_the_setup_and_the_signature_need_of_the_solution_is_shown(tmp_path: Path) -> None:
    values = mbpp(
        code="class Base: ...\nclass Node(Base): ...\nTOP = 2\nTOP += 1\nLOW = 1\n"
        "def clip(x, top=TOP):\n    return max(min(x, top), LOW)",
        test_setup_code="root = Node()",
        test_list=["assert clip(7) == 3"],
    )
    splits = Mbpp(kind="mbpp", source=jsonl(tmp_path / "m.jsonl", [values, mbpp(1)]), test_frac=0.5).load()
    problem = next(p for problems in splits.values() for p in problems if p.task_id == "MBPP/0")
    above = "class Base:\n    ...\nclass Node(Base):\n    ...\nTOP = 2\nTOP += 1\n\n\n"
    assert problem.prompt.startswith(f"{above}def clip(x, top=TOP):")
    assert "TOP" not in problem.canonical_solution.replace("top", "")
    assert "LOW = 1" in problem.canonical_solution
    names: dict[str, Any] = {}
    exec(problem.prompt + problem.canonical_solution + problem.test, names)
    names["check"](names["clip"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": "def f(:"}, r"m\.jsonl:1: field 'code' is not Python: .*\(line 1\)"),
        ({"test_list": ["assert"]}, r"m\.jsonl:1: field 'test_list' is not Python"),
        ({"test_list": "assert check(4)"}, r"m\.jsonl:1: field 'test_list' must be a list of strings"),
        ({"test_list": ["assert g(4)"]}, r"m\.jsonl:1: no test calls a function .* it defines scale, check"),
        ({"prompt": ...}, r"m\.jsonl:1: has no field 'prompt' or 'text'"),
    ],
)
def test_an_unusable_mbpp_row_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mbpp(kind="mbpp", source=jsonl(tmp_path / "m.jsonl", [mbpp(0, **changes), mbpp(1)]), test_frac=0.5).load()


def test_every_kind_in_the_table_loads() -> None:
    for kind in TABLES["problems"]:
        assert build_plugin("problems", {"kind": kind}).kind == kind
