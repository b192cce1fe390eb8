"""Mutated files of problems and completions, of every loader and format: read whole, or refused in short lines."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ArrowException, parquet

from magrpo.plugins import build_plugin
from magrpo.run.store import write_records
from magrpo.stages.prepare import prepare
from pipelines.commands.score import score_files
from tests.fuzz.mutations import count_outcomes, dump_lines, mutate_bytes, mutate_tree, with_counts
from tests.problems.test_evalplus import LOOP, check, mbpp_plus
from tests.problems.test_files import mbpp, row
from tests.problems.test_livecodebench import lcb, lcb_method

NUM_ROWS = 4
ROWS: Mapping[str, Sequence[Callable[[int], dict[str, Any]]]] = {
    "humaneval": [row],
    "humanevalplus": [lambda i: row(i, test=check(LOOP))],
    "mbpp": [mbpp],
    "mbppplus": [mbpp_plus],
    "livecodebench": [lcb, lcb_method],
    "tldr": [lambda i: {"prompt": f"SUBREDDIT: r/x\nTITLE: t{i}\nPOST: {'word ' * 20}{i}\nTL;DR:"}],
    "arxiv": [lambda i: {"abstract_text": f"{'word ' * 20}{i}"}],
}
"""A row by its number, of every loader of files."""
FORMATS = ("jsonl", "jsonl.gz", "json", "parquet")
COMPLETIONS = [
    {
        "task_id": f"T/{i % 3}",
        "completions": {"helper": "def aux(x):\n    return x", "main": f"def f(x):\n  return {i}"},
    }
    for i in range(6)
]
PROBLEMS = [
    {"task_id": f"T/{i}", "prompt": "def f(x):\n", "entry_point": "f", "test": f"assert f({i}) == {i}"}
    for i in range(3)
]


def write_rows(rows: Any, form: str, path: Path) -> None:
    """Write rows in a format; a mutant that is no rows, or rows that no Parquet file holds, as JSON."""
    data = dump_lines(rows if isinstance(rows, list) else [rows])
    if form == "json":
        data = json.dumps(rows, ensure_ascii=False).encode("utf-8", "surrogatepass")
    elif form == "jsonl.gz":
        data = gzip.compress(data, mtime=0)
    elif form == "parquet":
        try:
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
            return
        except (ArrowException, TypeError, AttributeError, UnicodeEncodeError, OverflowError):
            pass
    path.write_bytes(data)


def load_problems(kind: str, path: Path) -> None:
    """Load and write problems as the stage ``prepare`` does."""
    plugin = build_plugin("problems", {"kind": kind, "source": str(path), "test_frac": 0.5})
    for split, problems in prepare(plugin, 1).items():
        write_records(path.with_name(f"{split}.gz"), problems)


@pytest.mark.parametrize("kind", ROWS)
@with_counts
def test_problem_files(kind: str, tmp_path: Path, count: int) -> None:
    def use(rng: random.Random) -> None:
        form = rng.choice(FORMATS)
        path = tmp_path / f"mutant.{form}"
        rows: Any = [rng.choice(ROWS[kind])(i) for i in range(NUM_ROWS)]
        if rng.random() < 0.6:
            write_rows(mutate_tree(rows, rng), form, path)
        else:
            write_rows(rows, form, path)
            path.write_bytes(mutate_bytes(path.read_bytes(), rng))
        load_problems(kind, path)

    assert count_outcomes(f"problem files of {kind}", use, count // 2).total() == count // 2


@with_counts
def test_files_to_score(tmp_path: Path, count: int) -> None:
    def use(rng: random.Random) -> None:
        paths = [tmp_path / "problems.jsonl", tmp_path / "completions.jsonl"]
        contents: list[Any] = [PROBLEMS, COMPLETIONS]
        mutant = rng.choice((0, 1, 1))
        if rng.random() < 0.6:
            contents[mutant] = mutate_tree(contents[mutant], rng)
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(dump_lines(content if isinstance(content, list) else [content]))
        if contents == [PROBLEMS, COMPLETIONS]:
            paths[mutant].write_bytes(mutate_bytes(paths[mutant].read_bytes(), rng))
        options = ["sandbox.kind=tests.plugins:Sandbox"]
        assert score_files(*options, problems=paths[0], completions=paths[1], output=tmp_path / "out.jsonl") == 0

    assert count_outcomes("files to score", use, count).total() == count
