"""A set of functions compared by their results on fixed inputs, however they are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Function = Callable[[Any], Any]
"""A function of one argument; returns None where it is undefined."""

_NUM_KEYS = 2
"""Number of inputs whose results form the lookup key; functions with equal keys are compared on all inputs."""


class SeenFunctions:
    """A set of functions by behaviour. ``inputs``: for each kind of argument, the inputs that distinguish functions.

    Two functions are equal if they agree on every input on which both are defined. The first two inputs of a kind form
    the lookup key, so equal functions must be defined on the same ones of them.
    """

    def __init__(self, inputs: Mapping[str, Sequence[Any]]) -> None:
        self._inputs = inputs
        self._seen: dict[Hashable, list[Function]] = defaultdict(list)

    def add_function(self, kind: str, function: Function) -> None:
        """Add a function of an argument of ``kind``."""
        self._seen[self._make_key(kind, function)].append(function)

    def has_equal(self, kind: str, function: Function) -> bool:
        """Whether the set holds an equal function."""
        alike = self._seen.get(self._make_key(kind, function), [])
        return any(self._agree(kind, function, other) for other in alike)

    def _make_key(self, kind: str, function: Function) -> Hashable:
        return kind, repr([function(value) for value in self._inputs[kind][:_NUM_KEYS]])

    def _agree(self, kind: str, one: Function, other: Function) -> bool:
        pairs = ((one(value), other(value)) for value in self._inputs[kind])
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)
