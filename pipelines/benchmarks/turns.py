"""Timing several ways to do the same, in turns."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from rich.console import Console
from rich.progress import track

ResultT = TypeVar("ResultT")


def time_call(run: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    started = perf_counter()
    run()
    return perf_counter() - started


def run_by_turns(ways: Sequence[Callable[[], ResultT]], rounds: int) -> list[list[tuple[float, ResultT]]]:
    """Run each way once in every round; return its seconds and its result, by round and way.

    Every other round begins with the last way, and a round before them warms up. A terminal shows how far it is.
    """
    measured = []
    # Drawn once a second, so as not to take time from what is measured.
    bar = track(range(rounds + 1), "timing rounds", console=Console(stderr=True), transient=True, refresh_per_second=1)
    for number in bar:
        row: dict[int, tuple[float, ResultT]] = {}
        for way in range(len(ways)) if number % 2 else reversed(range(len(ways))):
            started = perf_counter()
            result = ways[way]()
            row[way] = (perf_counter() - started, result)
        measured.append([row[way] for way in range(len(ways))])
    return measured[1:]
