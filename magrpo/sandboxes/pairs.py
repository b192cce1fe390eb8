"""Tests given as input/output pairs, converted to the form that the sandbox runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from magrpo.sandboxes.jail.recorder import SAME


def pairs_as_test(pairs: Iterable[tuple[Sequence[Any], Any]], tolerance: float = 1e-6) -> str:
    """Test source with one assert for each ``(arguments, expected)``.

    Outputs must have the same exact types at every level (``True`` is not 1, 1 is not 1.0); floats are compared with a
    relative or absolute ``tolerance``.

    Raises:
        ValueError: a value is not a literal of plain data.
    """
    lines = []
    for arguments, expected in pairs:
        passed = ", ".join(_literal(argument) for argument in arguments)
        lines.append(f"assert {SAME}(candidate({passed}), {_literal(expected)}, {tolerance!r})")
    return "\n".join(lines)


def _literal(value: Any) -> str:
    text = repr(value)
    try:
        if repr(ast.literal_eval(text)) == text:
            return text
    except (ValueError, SyntaxError):
        pass
    raise ValueError(f"{text[:100]} is not plain data: use numbers, strings, lists, tuples, sets and dicts")
