"""The operations of ``coopcode`` and their compositions: integer, list and string functions of one argument.

An operation has phrases for the docstring and an expression for the solution. ``{k}`` stands for its constant, a single
character, and ``{v}`` for its argument.
"""

import difflib
import functools
import itertools
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from magrpo.types import Problem

Kind = Literal["int", "list", "str"]
Difficulty = Literal["1", "2", "3"]

_VARIABLES: dict[Kind, tuple[str, ...]] = {"int": ("n", "m", "k"), "list": ("xs", "ys", "zs"), "str": ("s", "t", "u")}


@dataclass(frozen=True, slots=True)
class Operation:
    """A function of one argument of kind ``takes`` and, if ``constants`` is not empty, one constant.

    ``phrases``: two ways to ask for it. ``hard``: whether the expression is more than one call or operator.
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
    """An operation with its constant, which is empty if the operation has none."""

    operation: Operation
    constant: str

    @property
    def key(self) -> str:
        """``name`` or ``name:constant``; :func:`parse_operation` reads it back."""
        return f"{self.operation.name}:{self.constant}" if self.constant else self.operation.name

    def write_expression(self, variable: str) -> str:
        """Write the code that applies the operation to ``variable``."""
        return self.operation.expression.format(k=self.constant, v=variable)

    def __call__(self, value: Any) -> Any:
        return _compile_expression(self.operation.expression, self.constant)(value)


@functools.cache
def _compile_expression(expression: str, constant: str) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = eval(f"lambda v: {expression.format(k=constant, v='v')}")
    return function


@dataclass(frozen=True, slots=True)
class Composition:
    """Bound operations that are applied one after another, the first to the argument."""

    steps: tuple[BoundOperation, ...]

    @property
    def key(self) -> str:
        return " ".join(step.key for step in self.steps)

    @property
    def family(self) -> str:
        """The operations without their constants."""
        return " ".join(step.operation.name for step in self.steps)

    @property
    def entry_point(self) -> str:
        return self.family.replace(" ", "_")

    @property
    def level(self) -> Difficulty:
        """The level: 1 for two easy operations, 2 for two of which at least one is hard, 3 for three."""
        if len(self.steps) > 2:
            return "3"
        return "2" if any(step.operation.hard for step in self.steps) else "1"

    @property
    def argument_kind(self) -> Kind:
        return self.steps[0].operation.takes

    def compute(self, value: Any, largest: int, longest: int) -> Any:
        """Compute the result; None if it is undefined, or if a value on the way reaches ``largest`` or ``longest``."""
        try:
            for step in self.steps:
                value = step(value)
                if not _is_small(value, largest, longest):
                    return None
        except (TypeError, ValueError, AttributeError):
            return None
        return value

    def name_variables(self) -> tuple[str, ...]:
        """Choose variable names, by kind, for the argument and every intermediate value."""
        kinds = [step.operation.takes for step in self.steps]
        return tuple(_VARIABLES[kind][kinds[:i].count(kind)] for i, kind in enumerate(kinds))

    def write_function(self, name: str) -> str:
        """Write a function ``name`` with one statement for each step."""
        names = self.name_variables()
        lines = [f"def {name}({names[0]}):"]
        for i, step in enumerate(self.steps):
            target = f"{names[i + 1]} =" if i + 1 < len(names) else "return"
            lines.append(f"    {target} {step.write_expression(names[i])}")
        return "\n".join(lines)


def _is_small(value: Any, largest: int, longest: int) -> bool:
    if isinstance(value, int):
        return abs(value) < largest
    if len(value) >= longest or isinstance(value, str):
        return len(value) < longest
    # A loop, because a generator takes twice as long, and most of the time of generating problems is spent here.
    for item in value:  # noqa: SIM110
        if not isinstance(item, str) and abs(item) >= largest:
            return False
    return True


def parse_operation(key: str) -> BoundOperation:
    """Parse a :attr:`BoundOperation.key`."""
    name, _, constant = key.partition(":")
    return BoundOperation(OPERATIONS[name], constant)


def parse_composition(problem: Problem) -> Composition:
    """The composition that a ``coopcode`` problem was generated from."""
    return Composition(tuple(map(parse_operation, problem.tags["steps"].split())))


OPERATIONS = {
    name: Operation(name=name, **{**row, "phrases": tuple(row["phrases"])})
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""All operations by name, from ``operations.toml``."""


# ------------------------------------------------------------------------------------------------ reading sentences
_BETWEEN_STEPS = re.compile(r"\s*[,;.]?\s*\b(?:and )?then\b[\s,]*|\s*[,;.]\s*")
_MOST_STEPS = 3
"""Problems compose two or three operations."""


def split_phrases(text: str) -> list[str]:
    """Split a sentence into its phrases, in lower case, at commas, full stops and ``then``."""
    words = " ".join(text.lower().split())
    return [phrase for phrase in _BETWEEN_STEPS.split(words) if phrase]


def read_composition(text: str) -> tuple[Composition | None, str]:
    """Read the composition that a sentence asks for in phrases of operations; else return None and the reason."""
    phrases = split_phrases(text)
    readings = [_read_phrase(phrase) for phrase in phrases]
    unknown = [phrase for phrase, operations in zip(phrases, readings, strict=True) if not operations]
    if unknown:
        return None, "; ".join(map(_explain_phrase, unknown))
    if not 2 <= len(phrases) <= _MOST_STEPS:
        return None, f"a problem has two or three steps, but this one has {len(phrases)}"
    for steps in itertools.product(*readings):  # a phrase may fit a list or a text: its neighbours decide
        kinds = itertools.pairwise(step.operation for step in steps)
        if all(one.gives == following.takes for one, following in kinds):
            return Composition(steps), ""
    return (
        None,
        "its steps do not fit together: one returns a number, a list or a text, and the next expects another type",
    )


def _read_phrase(phrase: str) -> list[BoundOperation]:
    """The operations that a phrase asks for."""
    found = []
    for operation in OPERATIONS.values():
        for constant in operation.constants or ("",):
            if phrase in (one.format(k=constant).lower() for one in operation.phrases):
                found.append(BoundOperation(operation, constant))
    return found


def _explain_phrase(phrase: str) -> str:
    """The message that no operation has this phrase, with the closest phrase that there is."""
    constants = {one: operation.constants for operation in OPERATIONS.values() for one in operation.phrases}
    [closest] = difflib.get_close_matches(phrase, constants, n=1, cutoff=0.0)
    where = f", K one of {', '.join(constants[closest])}" if constants[closest] else ""
    return f"no training problem says {phrase!r}; closest: {closest.format(k='K')!r}{where}"
