"""MBPP (arXiv 2108.07732) in the HumanEval form: signature from the reference solution, asserts as one ``check``."""

from __future__ import annotations

import ast
from typing import ClassVar

from magrpo.plugins import ConfigError
from magrpo.problems.files import FileProblems, format_docstring, format_signature, indent_body
from magrpo.problems.rows import Row
from magrpo.types import Problem


class Mbpp(FileProblems):
    """Sanitized MBPP: ``task_id, prompt, code, test_imports, test_list``. The full set's ``text`` works too."""

    benchmark: ClassVar[str] = "MBPP"

    source: str = "google-research-datasets/mbpp"
    """A .jsonl, .jsonl.gz, .json or .parquet file, or a hub id (its configuration ``sanitized``)."""
    hub_split: str = "train+validation+prompt+test"
    """Splits to read if ``source`` is a hub id."""

    def parse(self, row: Row) -> Problem:
        """The problem in the HumanEval form.

        The entry point is the function of the reference solution that the tests call. Imports of the solution, and
        classes that the tests name, go into the prompt above it; the solution's other definitions go below its body.
        """
        code = _parse_field(row, "code", row.read_text("code"))
        tests = [node for text in row.read_texts("test_list") for node in _parse_field(row, "test_list", text).body]
        entry = _find_entry_point(row, code, tests)
        tested = {node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)}
        above: list[str] = []
        below: list[str] = []
        for node in code.body:
            if node is entry:
                continue
            shown = isinstance(node, ast.Import | ast.ImportFrom) or (
                isinstance(node, ast.ClassDef) and node.name in tested
            )
            (above if shown else below).append(ast.unparse(node))
        body = "\n".join(ast.unparse(node) for node in entry.body)
        return Problem(
            task_id=f"MBPP/{row.values.get('task_id', row.where)}",
            prompt="".join(f"{text}\n" for text in above)
            + ("\n\n" if above else "")
            + f"{format_signature(entry)}\n{indent_body(format_docstring(row.read_text('prompt', 'text')))}",
            entry_point=entry.name,
            test=_write_check(row, entry.name, tests),
            canonical_solution=indent_body(body) + "".join(f"\n\n{text}\n" for text in below),
        )


def _parse_field(row: Row, field: str, text: str) -> ast.Module:
    try:
        return ast.parse(text.replace("\r\n", "\n"))
    except SyntaxError as error:
        raise ConfigError(f"{row.where}: field {field!r} is not Python: {error.msg} (line {error.lineno})") from None


def _find_entry_point(row: Row, code: ast.Module, tests: list[ast.stmt]) -> ast.FunctionDef:
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


def _write_check(row: Row, name: str, tests: list[ast.stmt]) -> str:
    imports = [*row.read_texts("test_imports"), *str(row.values.get("test_setup_code") or "").splitlines()]
    lines = [f"{name} = candidate", *(ast.unparse(test) for test in tests)]
    return "".join(f"{line}\n" for line in imports) + "def check(candidate):\n" + indent_body("\n".join(lines))
