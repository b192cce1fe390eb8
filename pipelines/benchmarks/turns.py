"""Timing several ways to do the same, in turns."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

ResultT = TypeVar("ResultT")


def run_by_turns(ways: Sequence[Callable[[], ResultT]], rounds: int) -> list[list[tuple[float, ResultT]]]:
    """Run each way once in every round; return its seconds and its result, by round and way.

    Every other round begins with the last way, and a round before them warms up.
    """
    measured = []
    for number in range(rounds + 1):
        row: dict[int, tuple[float, ResultT]] = {}
        for way in range(len(ways)) if number % 2 else reversed(range(len(ways))):
            started = perf_counter()
            result = ways[way]()
            row[way] = (perf_counter() - started, result)
        measured.append([row[way] for way in range(len(ways))])
    return measured[1:]
