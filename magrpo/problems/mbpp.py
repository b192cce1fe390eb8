"""MBPP (arXiv 2108.07732) in the HumanEval form: the reference solution gives the signature, asserts form ``check``.

MBPP+ (EvalPlus, arXiv 2305.01210) adds hidden tests.
"""

import ast
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from magrpo.errors import ConfigError
from magrpo.problems.files import FileProblems, format_docstring, format_signature, indent_body
from magrpo.problems.humaneval import select_tests
from magrpo.problems.rows import DatasetRow
from magrpo.types import Problem


class Mbpp(FileProblems):
    """Sanitized MBPP: ``task_id, prompt, code, test_imports, test_list``. The full set's ``text`` works too."""

    benchmark: ClassVar[str] = "MBPP"

    source: str = "google-research-datasets/mbpp"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, or a hub id (of which the configuration ``sanitized`` is
    read)."""
    hub_split: str = "train+validation+prompt+test"
    """Splits to read if ``source`` is a hub id."""

    def parse(self, row: DatasetRow) -> Problem:
        """Make the problem in the HumanEval form.

        The entry point is the function of the reference solution that the tests call. Imports of the solution, classes
        that the tests or their setup name, and what its signature names go into the prompt above it. The other
        definitions of the solution go below its body.
        """
        code = row.parse_python("code", row.read_text("code"))
        tests = [node for text in row.read_texts("test_list") for node in row.parse_python("test_list", text).body]
        entry = _find_entry_point(row, code, tests)
        setup = str(row.values.get("test_setup_code") or "")
        tested = _list_names([*tests, *row.parse_python("test_setup_code", setup).body])
        needed = _list_names([entry.args, *entry.decorator_list, *filter(None, [entry.returns])])
        above = below = ""
        for node in reversed(code.body):  # a definition that goes above takes those that it needs along
            tested_class = isinstance(node, ast.ClassDef) and node.name in tested
            is_needed = node.lineno < entry.lineno and bool(_list_bound_names(node) & needed)
            if tested_class or is_needed or isinstance(node, ast.Import | ast.ImportFrom):
                above = f"{ast.unparse(node)}\n{above}"
                needed |= _list_names([node])
            elif node is not entry:
                below = f"\n\n{ast.unparse(node)}\n{below}"
        docstring = format_docstring(row.read_text("prompt", "text"))
        imports = [*row.read_texts("test_imports"), *setup.splitlines()]
        check = "\n".join([f"{entry.name} = candidate", *map(ast.unparse, tests)])
        if above:
            above += "\n\n"
        return Problem(
            task_id=f"MBPP/{row.values.get('task_id', row.where)}",
            prompt=f"{above}{format_signature(entry)}\n{indent_body(docstring)}",
            entry_point=entry.name,
            test="\n".join([*imports, f"def check(candidate):\n{indent_body(check)}"]),
            canonical_solution=indent_body("\n".join(map(ast.unparse, entry.body))) + below,
        )


class MbppPlus(Mbpp):
    """MBPP+: feedback may show the asserts of MBPP (``test_list``); those of EvalPlus (``test``) are hidden.

    Many tests import numpy: set ``sandbox.packages = ["numpy"]``.
    """

    benchmark: ClassVar[str] = "MBPP+"
    hidden_tests: ClassVar[bool] = True

    source: str = "evalplus/mbppplus"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""
    hub_split: str = "test"
    """Split to read if ``source`` is a hub id."""
    max_tests: int | None = Field(None, ge=1)
    """Maximum number of hidden tests per problem, from the first. None: all, which are about a hundred."""

    def parse(self, row: DatasetRow) -> Problem:
        """Read the row as one of MBPP, with the field ``test`` as hidden tests."""
        return replace(super().parse(row), hidden_test=select_tests(row, slice(self.max_tests)))


def _list_names(trees: Iterable[ast.AST]) -> set[str]:
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _list_bound_names(node: ast.stmt) -> set[str]:
    """The names that a definition or an assignment binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return _list_names(node.targets)
    return _list_names([node.target]) if isinstance(node, ast.AnnAssign | ast.AugAssign) else set()


def _find_entry_point(row: DatasetRow, code: ast.Module, tests: list[ast.stmt]) -> ast.FunctionDef:
    functions = {node.name: node for node in code.body if isinstance(node, ast.FunctionDef)}
    called = [
        node.func.id
        for test in tests
        for node in ast.walk(test)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions
    ]
    if not called:
        raise ConfigError(
            f"{row.where}: no test calls a function of the solution; it defines {', '.join(functions) or 'none'}"
        )
    return functions[max(called, key=called.count)]
