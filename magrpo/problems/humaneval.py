"""Problem sets in the HumanEval form: HumanEval, CoopHumanEval, HumanEval+, or your own.

Sources: HumanEval arXiv 2107.03374, CoopHumanEval arXiv 2508.04652, HumanEval+ (EvalPlus) arXiv 2305.01210.
"""

import ast
import keyword
import logging
import re
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from magrpo.errors import ConfigError, quote_value
from magrpo.problems.files import FileProblems
from magrpo.problems.rows import DatasetRow
from magrpo.types import Problem, Split

log = logging.getLogger(__name__)
SHOWN_TESTS = 3
"""Number of tests of a problem of HumanEval+, from the first, that feedback may show."""


class HumanEval(FileProblems):
    """Problems in the HumanEval form: ``task_id, prompt, entry_point, test, canonical_solution``.

    ``prompt`` ends in the docstring of ``entry_point``, ``test`` defines ``check(candidate)``, and
    ``canonical_solution``, which may be missing, continues ``prompt``.
    """

    benchmark: ClassVar[str] = "HumanEval"
    ids: ClassVar[str] = "HumanEval/"

    source: str = "openai/openai_humaneval"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""

    def load(self) -> dict[Split, list[Problem]]:
        """As for any file; warns if prompts do not define their entry point, for agents see its name there."""
        splits = super().load()
        problems = [problem for members in splits.values() for problem in members]
        undefined = [p.task_id for p in problems if not re.search(rf"\bdef\s+{p.entry_point}\b", p.prompt)]
        if undefined:
            message = "the prompts of %d of %d problems do not define their entry_point; the first is %s"
            log.warning(message, len(undefined), len(problems), undefined[0])
        return splits

    def parse(self, row: DatasetRow) -> Problem:
        has_solution = row.values.get("canonical_solution") is not None
        has_id = row.values.get("task_id") is not None
        problem = Problem(
            task_id=str(row.values["task_id"]) if has_id else row.read_text("task_id"),
            prompt=row.read_text("prompt"),
            entry_point=row.read_text("entry_point"),
            test=row.read_text("test"),
            canonical_solution=row.read_text("canonical_solution") if has_solution else "",
        )
        if not problem.prompt.strip():
            raise ConfigError(f"{row.where}: field 'prompt' is empty")
        if not problem.entry_point.isidentifier() or keyword.iskeyword(problem.entry_point):
            name = quote_value(problem.entry_point)
            raise ConfigError(f"{row.where}: entry_point {name} is not the name of a function")
        definitions = row.parse_python("test", problem.test).body
        if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in definitions):
            raise ConfigError(f"{row.where}: test does not define check(candidate)")
        return problem


class CoopHumanEval(HumanEval):
    """CoopHumanEval: problems in the HumanEval form that divide naturally between two writers."""

    benchmark: ClassVar[str] = "CoopHumanEval"
    ids: ClassVar[str] = ""

    source: str = "OpenMLRL/CoopHumanEval"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""


class HumanEvalPlus(HumanEval):
    """HumanEval+: feedback may show the first three inputs of ``test``; the others are hidden.

    Many tests import numpy: set ``sandbox.packages = ["numpy"]``.
    """

    benchmark: ClassVar[str] = "HumanEval+"
    hidden_tests: ClassVar[bool] = True

    source: str = "evalplus/humanevalplus"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""
    max_tests: int | None = Field(None, ge=1)
    """Maximum number of hidden tests per problem, taken after the shown ones. None: all, which are several hundred."""

    def parse(self, row: DatasetRow) -> Problem:
        """Read the row as one of HumanEval, with ``test`` split into shown and hidden tests."""
        end = None if self.max_tests is None else SHOWN_TESTS + self.max_tests
        shown = select_tests(row, slice(SHOWN_TESTS))
        hidden = select_tests(row, slice(SHOWN_TESTS, end))
        return replace(super().parse(row), test=shown, hidden_test=hidden)


def select_tests(row: DatasetRow, chosen: slice) -> str:
    """Keep only the chosen ``inputs`` and ``results`` of EvalPlus' field ``test``; empty if no input is left.

    Calls of ``check`` at the end of some versions are removed, because the sandbox calls it.
    """
    tree = row.parse_python("test", row.read_text("test"))
    lists: dict[str, ast.List] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            lists |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    if "inputs" not in lists:
        raise ConfigError(f"{row.where}: field 'test' has no list 'inputs'; every row of EvalPlus has one")
    for name in lists.keys() & {"inputs", "results"}:
        lists[name].elts = lists[name].elts[chosen]
    tree.body = [node for node in tree.body if not _calls_check(node)]
    return f"{ast.unparse(tree)}\n" if lists["inputs"].elts else ""


def _calls_check(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "check"
