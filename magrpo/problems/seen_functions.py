"""Functions that were seen before, found again whatever they are written as, by what they do to fixed inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

Function = Callable[[Any], Any]
"""Of one argument; None where it is not defined."""

_NUM_KEYS = 2
"""Inputs that look a function up; all others are compared with the few that are found."""


class SeenFunctions:
    """A set of functions by behaviour. ``inputs``: for each kind of argument those that tell functions apart.

    Two functions are equal if they agree on every input on which both are defined. The first two inputs of a kind look
    them up, so on these a function has to be defined wherever an equal one is.
    """

    def __init__(self, inputs: Mapping[str, Sequence[Any]]) -> None:
        self._inputs = inputs
        self._seen: dict[Hashable, list[Function]] = defaultdict(list)

    def add_function(self, kind: str, function: Function) -> None:
        """Take in a function of an argument of ``kind``."""
        self._seen[self._key(kind, function)].append(function)

    def has_equal(self, kind: str, function: Function) -> bool:
        """Whether a function was taken in that does the same."""
        alike = self._seen.get(self._key(kind, function), [])
        return any(self._agree(kind, function, other) for other in alike)

    def _key(self, kind: str, function: Function) -> Hashable:
        return kind, repr([function(value) for value in self._inputs[kind][:_NUM_KEYS]])

    def _agree(self, kind: str, one: Function, other: Function) -> bool:
        pairs = ((one(value), other(value)) for value in self._inputs[kind])
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)
