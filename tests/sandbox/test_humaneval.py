"""HumanEval: every canonical solution passes everything, and each with its last ``return`` broken passes less."""

from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path
from typing import Any

from magrpo.sandboxes.pool import Pool
from magrpo.types import Execution

HUMANEVAL = Path(__file__).parents[1] / "data" / "HumanEval.jsonl.gz"


def read_problems() -> list[dict[str, Any]]:
    with gzip.open(HUMANEVAL, "rt") as lines:
        return [json.loads(line) for line in lines]


def execution(problem: dict[str, Any], source: str) -> Execution:
    """The problem's helpers go into the test: it is trusted, the program is not."""
    preamble = problem["prompt"][: problem["prompt"].index(f"def {problem['entry_point']}(")]
    return Execution(source, problem["entry_point"], preamble + problem["test"])


def with_last_return_broken(source: str) -> str:
    tree = ast.parse(source)
    returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value]
    max(returns, key=lambda node: node.lineno).value = ast.Constant(None)
    return ast.unparse(tree)


def test_canonical_and_broken_solutions(pool: Pool) -> None:
    given = read_problems()
    sources = [problem["prompt"] + problem["canonical_solution"] for problem in given]
    broken = [with_last_return_broken(source) for source in sources]
    reports = pool.run(
        [execution(problem, source) for problem, source in zip(given * 2, sources + broken, strict=True)]
    )
    for problem, good, bad in zip(given, reports[:164], reports[164:], strict=True):
        assert good.status == "pass", (problem["task_id"], good.cases)
        assert good.tests_passed == good.tests_total > 0
        assert bad.tests_passed < bad.tests_total, problem["task_id"]
        assert bad.tests_total >= good.tests_total, problem["task_id"]
        assert not good.forgeable
    assert len(given) == 164


def test_helpers_that_only_the_program_defines_make_the_verdict_forgeable(pool: Pool) -> None:
    given = {problem["task_id"]: problem for problem in read_problems()}
    problem = given["HumanEval/38"]
    source = problem["prompt"] + problem["canonical_solution"]
    [report] = pool.run([Execution(source, problem["entry_point"], problem["test"])])
    assert (report.status, report.tests_total, report.forgeable) == ("pass", 100, True)
