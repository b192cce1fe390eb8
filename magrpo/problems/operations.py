"""The operations of ``coopcode``: integer, list and string functions of one argument.

An operation is a phrase for the docstring and an expression for the solution. ``{k}`` stands for its constant, one
character, and ``{v}`` for its argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
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


def _operations(takes: Kind, gives: Kind, *rows: tuple[Any, ...]) -> list[Operation]:
    return [Operation(name, takes, gives, phrases, *rest) for name, phrases, *rest in rows]


_DIGITS = "23456789"
_LETTERS = "aeorst"
_ALL = [
    *_operations(
        "int",
        "int",
        ("plus", ("add {k}", "increase by {k}"), "{v} + {k}", _DIGITS),
        ("minus", ("subtract {k}", "decrease by {k}"), "{v} - {k}", _DIGITS),
        ("times", ("multiply by {k}", "take {k} times that"), "{v} * {k}", _DIGITS),
        ("over", ("divide by {k} and round down", "take the quotient by {k}"), "{v} // {k}", _DIGITS),
        ("modulo", ("take the remainder by {k}", "reduce modulo {k}"), "{v} % {k}", _DIGITS),
        ("square", ("square", "raise to the power of two"), "{v} ** 2"),
        ("negate", ("negate", "flip the sign"), "-{v}"),
        ("magnitude", ("take the absolute value", "drop the sign"), "abs({v})"),
        ("atleast", ("raise to at least {k}", "take the larger of that and {k}"), "max({v}, {k})", _DIGITS),
        ("atmost", ("lower to at most {k}", "take the smaller of that and {k}"), "min({v}, {k})", _DIGITS),
        ("digitsum", ("add up the digits", "take the sum of the digits"), "sum(int(c) for c in str({v}))", "", True),
    ),
    *_operations(
        "int",
        "list",
        ("digits", ("list the digits", "split into digits"), "[int(c) for c in str({v})]", "", True),
        ("upto", ("list the numbers from 1 up to that", "count up from 1 to that"), "list(range(1, {v} + 1))"),
        (
            "divisors",
            ("list the divisors", "find all divisors"),
            "[d for d in range(1, {v} + 1) if {v} % d == 0]",
            "",
            True,
        ),
    ),
    *_operations(
        "list",
        "list",
        ("evens", ("keep the even numbers", "remove the odd numbers"), "[x for x in {v} if x % 2 == 0]", "", True),
        ("odds", ("keep the odd numbers", "remove the even numbers"), "[x for x in {v} if x % 2 == 1]", "", True),
        (
            "above",
            ("keep the numbers above {k}", "keep what is greater than {k}"),
            "[x for x in {v} if x > {k}]",
            _DIGITS,
            True,
        ),
        (
            "below",
            ("keep the numbers below {k}", "keep what is less than {k}"),
            "[x for x in {v} if x < {k}]",
            _DIGITS,
            True,
        ),
        (
            "without",
            ("remove every {k}", "drop all numbers equal to {k}"),
            "[x for x in {v} if x != {k}]",
            "2345",
            True,
        ),
        ("shift", ("add {k} to every number", "increase each number by {k}"), "[x + {k} for x in {v}]", _DIGITS),
        ("scale", ("multiply every number by {k}", "take each number {k} times"), "[x * {k} for x in {v}]", _DIGITS),
        (
            "residues",
            ("reduce every number modulo {k}", "take the remainder of each number by {k}"),
            "[x % {k} for x in {v}]",
            _DIGITS,
        ),
        ("squares", ("square every number", "replace each number by its square"), "[x ** 2 for x in {v}]"),
        ("negatives", ("negate every number", "flip the sign of each number"), "[-x for x in {v}]"),
        ("sizes", ("take the absolute value of every number", "drop the sign of each number"), "[abs(x) for x in {v}]"),
        ("mirror", ("reverse the list", "turn the list around"), "{v}[::-1]"),
        ("ascending", ("sort the list", "order the numbers from low to high"), "sorted({v})"),
        (
            "descending",
            ("sort the list in falling order", "order the numbers from high to low"),
            "sorted({v}, reverse=True)",
        ),
        ("distinct", ("remove repeated numbers", "keep the first of equal numbers"), "list(dict.fromkeys({v}))"),
        ("first", ("take the first {k} numbers", "keep only the first {k}"), "{v}[:{k}]", "2345"),
        ("skip", ("skip the first {k} numbers", "drop the first {k}"), "{v}[{k}:]", "2345"),
        ("final", ("take the last {k} numbers", "keep only the last {k}"), "{v}[-{k}:]", "2345"),
        ("alternate", ("take every second number", "keep every other number"), "{v}[::2]"),
        (
            "running",
            ("take the running sums", "replace each number by the sum so far"),
            "[sum({v}[:i + 1]) for i in range(len({v}))]",
            "",
            True,
        ),
        (
            "gaps",
            ("take the differences of neighbours", "subtract each number from the next"),
            "[b - a for a, b in zip({v}, {v}[1:])]",
            "",
            True,
        ),
    ),
    *_operations(
        "list",
        "int",
        ("total", ("add up the numbers", "take the sum"), "sum({v})"),
        ("largest", ("take the largest number", "find the maximum"), "max({v})"),
        ("smallest", ("take the smallest number", "find the minimum"), "min({v})"),
        ("amount", ("count the numbers", "take the length of the list"), "len({v})"),
        ("spread", ("take the largest minus the smallest", "find the range of the numbers"), "max({v}) - min({v})"),
        ("tally", ("count how often {k} occurs", "count the numbers equal to {k}"), "{v}.count({k})", "2345"),
        (
            "exceeding",
            ("count the numbers above {k}", "count what is greater than {k}"),
            "sum(x > {k} for x in {v})",
            _DIGITS,
            True,
        ),
    ),
    *_operations(
        "str",
        "str",
        ("upper", ("turn into capitals", "write in upper case"), "{v}.upper()"),
        ("lower", ("turn into small letters", "write in lower case"), "{v}.lower()"),
        ("swap", ("swap upper and lower case", "exchange small and capital letters"), "{v}.swapcase()"),
        ("backward", ("reverse the text", "read the text backwards"), "{v}[::-1]"),
        ("repeat", ("repeat the text {k} times", "write the text {k} times"), "{v} * {k}", "2345"),
        ("prefix", ("take the first {k} letters", "cut off all after letter {k}"), "{v}[:{k}]", "2345"),
        ("suffix", ("take the last {k} letters", "keep only the last {k} letters"), "{v}[-{k}:]", "2345"),
        ("chop", ("drop the first {k} letters", "cut off the first {k} letters"), "{v}[{k}:]", "2345"),
        ("alphabetic", ("sort the letters", "order the letters"), "''.join(sorted({v}))"),
        ("remove", ("remove every {k}", "delete the letter {k}"), "{v}.replace('{k}', '')", _LETTERS),
        ("dashed", ("replace every {k} by a dash", "write a dash for each {k}"), "{v}.replace('{k}', '-')", _LETTERS),
        ("append", ("append the letter {k}", "put {k} at the end"), "{v} + '{k}'", _LETTERS),
        ("prepend", ("put {k} in front", "start with the letter {k}"), "'{k}' + {v}", _LETTERS),
        ("odd", ("take every second letter", "keep every other letter"), "{v}[::2]"),
        ("double", ("double every letter", "write each letter twice"), "''.join(c * 2 for c in {v})", "", True),
        (
            "consonants",
            ("remove the vowels", "drop all vowels"),
            "''.join(c for c in {v} if c not in 'aeiou')",
            "",
            True,
        ),
    ),
    *_operations(
        "str",
        "int",
        ("size", ("count the letters", "take the length of the text"), "len({v})"),
        ("occurrences", ("count the letter {k}", "count how often {k} occurs"), "{v}.count('{k}')", _LETTERS),
        ("vowels", ("count the vowels", "find the number of vowels"), "sum(c in 'aeiou' for c in {v})", "", True),
        ("words", ("count the words", "find the number of words"), "len({v}.split())"),
    ),
    *_operations(
        "str",
        "list",
        ("lengths", ("list the lengths of the words", "measure each word"), "[len(w) for w in {v}.split()]", "", True),
        ("codes", ("list the character codes", "turn letters into codes"), "[ord(c) for c in {v}]", "", True),
    ),
]

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _ALL}
"""All operations by name."""
