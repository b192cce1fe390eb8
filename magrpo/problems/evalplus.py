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
    """MBPP+: the asserts of MBPP (``test_list``) may be shown, those of EvalPlus (``test``) are hidden.

    Many tests import numpy: set ``sandbox.packages = ["numpy"]``.
    """

    benchmark: ClassVar[str] = "MBPP+"
    hidden_tests: ClassVar[bool] = True

    source: str = "evalplus/mbppplus"
    """A .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""
    hub_split: str = "test"
    """Split to read of a hub id."""
    max_tests: int | None = Field(None, ge=1)
    """Hidden tests of a problem, the first ones. None: all, about a hundred."""

    def parse(self, row: Row) -> Problem:
        """The row as one of MBPP, and its field ``test``."""
        return replace(super().parse(row), hidden_test=_part(row, slice(self.max_tests)))


class HumanEvalPlus(HumanEval):
    """HumanEval+: the first inputs of ``test`` may be shown, the others are hidden.

    Many tests import numpy: set ``sandbox.packages = ["numpy"]``.
    """

    benchmark: ClassVar[str] = "HumanEval+"
    hidden_tests: ClassVar[bool] = True

    source: str = "evalplus/humanevalplus"
    """A .jsonl, .jsonl.gz, .json or .parquet file, or a hub id."""
    shown_tests: int = Field(3, ge=1)
    """Tests of a problem that feedback may show, the first ones."""
    max_tests: int | None = Field(None, ge=1)
    """Hidden tests of a problem, those after the shown ones. None: all, several hundred."""

    def parse(self, row: Row) -> Problem:
        """The row as one of HumanEval, its ``test`` cut in two."""
        end = None if self.max_tests is None else self.shown_tests + self.max_tests
        shown, hidden = _part(row, slice(self.shown_tests)), _part(row, slice(self.shown_tests, end))
        return replace(super().parse(row), test=shown, hidden_test=hidden)


def _part(row: Row, chosen: slice) -> str:
    """The field ``test`` with the chosen ``inputs`` and ``results`` only; empty if that leaves no input.

    A call of ``check`` goes, as some versions have it at the end: the sandbox calls it.
    """
    try:
        tree = ast.parse(row.read_text("test"))
    except SyntaxError as error:
        raise ConfigError(f"{row.where}: field 'test' is not Python: {error.msg} (line {error.lineno})") from None
    found: dict[str, ast.List] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    if "inputs" not in found:
        raise ConfigError(f"{row.where}: field 'test' has no list 'inputs'; rows in EvalPlus' form have one")
    for name in found.keys() & set(_LISTS):
        found[name].elts = found[name].elts[chosen]
    tree.body = [node for node in tree.body if not _calls_check(node)]
    return f"{ast.unparse(tree)}\n" if found["inputs"].elts else ""


def _calls_check(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "check"
