"""Problem sets in the HumanEval form: HumanEval (arXiv 2107.03374), CoopHumanEval (arXiv 2508.04652), or your own."""

from __future__ import annotations

import ast
from typing import ClassVar

from magrpo.plugins import ConfigError
from magrpo.problems.files import FileProblems
from magrpo.problems.rows import Row
from magrpo.types import Problem


class HumanEval(FileProblems):
    """Problems in the HumanEval form: ``task_id, prompt, entry_point, test, canonical_solution``.

    ``prompt`` ends in the docstring of ``entry_point``, ``test`` defines ``check(candidate)``, and
    ``canonical_solution``, which may be missing, continues ``prompt``.
    """

    benchmark: ClassVar[str] = "HumanEval"
    ids: ClassVar[str] = "HumanEval/"

    source: str = "openai/openai_humaneval"
    """A .jsonl, .jsonl.gz or .parquet file, or a hub id."""

    def parse(self, row: Row) -> Problem:
        solution = row.values.get("canonical_solution")
        problem = Problem(
            task_id=str(row.values["task_id"]) if "task_id" in row.values else row.read_text("task_id"),
            prompt=row.read_text("prompt"),
            entry_point=row.read_text("entry_point"),
            test=row.read_text("test"),
            canonical_solution="" if solution is None else row.read_text("canonical_solution"),
        )
        if not problem.entry_point.isidentifier():
            raise ConfigError(f"{row.where}: entry_point {problem.entry_point!r} is not the name of a function")
        try:
            tree = ast.parse(problem.test)
        except SyntaxError as error:
            raise ConfigError(
                f"{row.where}: test is not Python: {error.msg} (line {error.lineno} of the test)"
            ) from None
        if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
            raise ConfigError(f"{row.where}: test does not define check(candidate)")
        return problem


class CoopHumanEval(HumanEval):
    """CoopHumanEval: problems in the HumanEval form that divide naturally between two writers."""

    benchmark: ClassVar[str] = "CoopHumanEval"
    ids: ClassVar[str] = ""

    source: str = "OpenMLRL/CoopHumanEval"
    """A .jsonl, .jsonl.gz or .parquet file, or a hub id."""
