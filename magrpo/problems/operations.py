"""The operations of ``coopcode``: integer, list and string functions of one argument.

An operation is a phrase for the docstring and an expression for the solution. ``{k}`` stands for its constant, one
character, and ``{v}`` for its argument.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["int", "list", "str"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A function of one argument of kind ``takes`` and, if ``constants`` is not empty, one constant.

    ``phrases``: two ways to ask for it; ``hard``: the expression is more than one call or operator.
    """

    name: str
    takes: Kind
    gives: Kind
    phrases: tuple[str, str]
    expression: str
    constants: str = ""
    hard: bool = False


@dataclass(frozen=True, slots=True)
class BoundOperation:
    """An operation with its constant."""

    operation: Operation
    constant: str = ""

    @property
    def key(self) -> str:
        """``name`` or ``name:constant``; :func:`parse_operation` reads it back."""
        return f"{self.operation.name}:{self.constant}" if self.constant else self.operation.name

    def format_phrase(self, variant: int) -> str:
        return self.operation.phrases[variant].format(k=self.constant)

    def expression(self, variable: str) -> str:
        """The code that applies it to ``variable``."""
        return self.operation.expression.format(k=self.constant, v=variable)

    def __call__(self, value: Any) -> Any:
        return _compile_expression(self.expression("v"))(value)


def parse_operation(key: str) -> BoundOperation:
    """The operation whose :attr:`BoundOperation.key` is ``key``."""
    name, _, constant = key.partition(":")
    return BoundOperation(OPERATIONS[name], constant)


@functools.cache
def _compile_expression(expression: str) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = eval(f"lambda v: {expression}")
    return function


def _read_operations() -> dict[str, Operation]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: Operation(name=name, **{**row, "phrases": tuple(row["phrases"])}) for name, row in table.items()}


OPERATIONS = _read_operations()
"""All operations by name, from ``operations.toml``."""
