from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magrpo.problems.humaneval import HumanEvalPlus
from magrpo.problems.mbpp import MbppPlus
from magrpo.rewards.coding import SoloReward
from magrpo.sandboxes.pool import Pool
from magrpo.stages.score import score_texts
from magrpo.types import Problem
from tests.problems.test_files import jsonl, mbpp, row
from tests.sandbox.conftest import open_pool

TEST = """\
import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float)

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
"""
LOOP = """\
inputs = [[1], [2], [3.0], [-4], [50]]
results = [2, 4, 6.0000000001, -8, 100]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(@(*inp), exp, 0)
"""
AGAINST_REFERENCE = """\
def ref_func(x):
    return x + x

def check(candidate):
    inputs = [[1], [2], [3], [4]]
    for i, inp in enumerate(inputs):
        assertion(candidate(*inp), ref_func(*inp), 0)

check(f)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A sandbox with the package that the tests of EvalPlus import."""
    pool = open_pool(workers=1, packages=("numpy",))
    yield pool
    pool.close()


def check(body: str) -> str:
    return "def check(candidate):\n" + "".join(f"    {line}\n" for line in body.replace("@", "candidate").splitlines())


def mbpp_plus(number: int = 0, **changes: Any) -> dict[str, Any]:
    asserts = ["assert twice(1) == 2", "assert twice(2) == 4"]
    own = {"code": "def twice(x):\n    return 2 * x\n", "test_list": asserts, "test_imports": []}
    return mbpp(number, **own, test=TEST + LOOP.replace("@", "twice"), **changes)


def first(problems: dict[Any, list[Problem]], task_id: str) -> Problem:
    return next(problem for split in problems.values() for problem in split if problem.task_id == task_id)


def passed(pool: Pool, problem: Problem, *bodies: str) -> list[tuple[int, int]]:
    """Tests passed, those that may be shown and hidden ones, by functions of one argument with these bodies."""
    texts = [f"def {problem.entry_point}(x):\n    {body}\n" for body in bodies]
    items = [(problem, {"solo": text}) for text in texts]
    scored, _ = score_texts(items, reward=SoloReward(), sandbox=pool, cache={})
    for result in scored:
        both = result.reports["program"].cases + result.reports["program_hidden"].cases
        assert result.reward.parts["tests"] == sum(case.status == "pass" for case in both) / len(both)
        assert SoloReward().passed(result.reports) == all(case.status == "pass" for case in both)
    return [(r.reports["program"].tests_passed, r.reports["program_hidden"].tests_passed) for r in scored]


def test_mbpp_plus_hides_the_tests_of_evalplus(pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = jsonl(tmp_path / "m.jsonl", [mbpp_plus(i) for i in range(4)])
    problem = first(MbppPlus(kind="mbppplus", source=source, test_frac=0.5).load(), "MBPP/0")
    assert "of the public test split of MBPP+" in caplog.text
    assert problem.test == (
        "def check(candidate):\n    twice = candidate\n    assert twice(1) == 2\n    assert twice(2) == 4\n"
    )
    only_shown = "return 2 * x if x in (1, 2) else 'other'"
    assert passed(pool, problem, "return 2 * x", only_shown, "return x[0]") == [(2, 5), (2, 2), (0, 0)]
    limited = first(MbppPlus(kind="mbppplus", source=source, test_frac=0.5, max_tests=3).load(), "MBPP/0")
    assert passed(pool, limited, "return 2 * x") == [(2, 3)]


def test_humaneval_plus_shows_the_first_tests(pool: Pool, tmp_path: Path) -> None:
    rows = [row(0, test=TEST + check(LOOP)), row(1, test=TEST + AGAINST_REFERENCE), row(2, test=TEST + check(LOOP))]
    source = jsonl(tmp_path / "h.jsonl", rows)
    problems = HumanEvalPlus(kind="humanevalplus", source=source, test_frac=0.5).load()
    assert passed(pool, first(problems, "mine/0"), "return 2 * x", "return 2.0 * abs(x)") == [(3, 2), (3, 1)]
    assert passed(pool, first(problems, "mine/1"), "return 2 * x", "return 2") == [(3, 1), (1, 0)]
    few = HumanEvalPlus(kind="humanevalplus", source=source, test_frac=0.5, max_tests=1).load()
    assert passed(pool, first(few, "mine/0"), "return 2 * x") == [(3, 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": ...}, r"m\.jsonl:1: has no field 'test'"),
        ({"test": "inputs = ["}, r"m\.jsonl:1: field 'test' is not Python"),
        ({"test": "assert twice(1) == 2"}, r"m\.jsonl:1: field 'test' has no list 'inputs'"),
    ],
)
def test_an_unusable_row_is_named_with_its_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    rows = [{key: value for key, value in (mbpp_plus(0) | changes).items() if value is not ...}, mbpp_plus(1)]
    with pytest.raises(ValueError, match=message):
        MbppPlus(kind="mbppplus", source=jsonl(tmp_path / "m.jsonl", rows), test_frac=0.5).load()
