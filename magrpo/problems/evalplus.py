"""HumanEval+ and MBPP+ (EvalPlus, arXiv 2305.01210): many tests for each problem, most of them hidden."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from magrpo.plugins import ConfigError
from magrpo.problems.humaneval import HumanEval
from magrpo.problems.mbpp import Mbpp
from magrpo.problems.rows import Row
from magrpo.types import Problem

_LISTS = ("inputs", "results")


class MbppPlus(Mbpp):
    """MBPP+: feedback may show the asserts of MBPP (``test_list``); those of EvalPlus (``test``) are hidden.

    Many tests import numpy: set ``sandbox.packages = ["numpy"]``.
    """

    benchmark: ClassVar[str] = "MBPP+"
    hidden_tests: ClassVar[bool] = True

    source: str = "evalplus/mbppplus"
    """A .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""
    hub_split: str = "test"
    """Split to read if ``source`` is a hub id."""
    max_tests: int | None = Field(None, ge=1)
    """Maximum number of hidden tests of a problem, from the first. None: all, about a hundred."""

    def parse(self, row: Row) -> Problem:
        """The row as one of MBPP, with its field ``test`` as hidden tests."""
        return replace(super().parse(row), hidden_test=_select_tests(row, slice(self.max_tests)))


class HumanEvalPlus(HumanEval):
    """HumanEval+: feedback may show the first inputs of ``test``; the others are hidden.

    Many tests import numpy: set ``sandbox.packages = ["numpy"]``.
    """

    benchmark: ClassVar[str] = "HumanEval+"
    hidden_tests: ClassVar[bool] = True

    source: str = "evalplus/humanevalplus"
    """A .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""
    shown_tests: int = Field(3, ge=1)
    """Number of tests of a problem, from the first, that feedback may show."""
    max_tests: int | None = Field(None, ge=1)
    """Maximum number of hidden tests of a problem, taken after the shown ones. None: all, several hundred."""

    def parse(self, row: Row) -> Problem:
        """The row as one of HumanEval, its ``test`` split into shown and hidden tests."""
        end = None if self.max_tests is None else self.shown_tests + self.max_tests
        shown, hidden = _select_tests(row, slice(self.shown_tests)), _select_tests(row, slice(self.shown_tests, end))
        return replace(super().parse(row), test=shown, hidden_test=hidden)


def _select_tests(row: Row, chosen: slice) -> str:
    """The field ``test`` with only the chosen ``inputs`` and ``results``; empty if no input is left.

    Calls of ``check``, which some versions end with, are removed: the sandbox calls it.
    """
    try:
        tree = ast.parse(row.read_text("test"))
    except SyntaxError as error:
        raise ConfigError(f"{row.where}: field 'test' is not Python: {error.msg} (line {error.lineno})") from None
    lists_by_name: dict[str, ast.List] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            lists_by_name |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    if "inputs" not in lists_by_name:
        raise ConfigError(f"{row.where}: field 'test' has no list 'inputs'; every row of EvalPlus has one")
    for name in lists_by_name.keys() & set(_LISTS):
        lists_by_name[name].elts = lists_by_name[name].elts[chosen]
    tree.body = [node for node in tree.body if not _calls_check(node)]
    return f"{ast.unparse(tree)}\n" if lists_by_name["inputs"].elts else ""


def _calls_check(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "check"
