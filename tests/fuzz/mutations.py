"""Mutations of files and configurations, drawn from a fixed seed, and what any use of a mutant may end in."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from magrpo.errors import ConfigError

with_counts = pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
"""For tests of ``count`` mutants; the many begin with the few."""
LONGEST_LINE = 2000
"""Characters of a line of a message, with the paths that it names."""
MOST_LINES = 25
NESTED: Any = "leaf"
for _ in range(60):
    NESTED = [NESTED]
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, 10**18, 2**63, 10**30, -(10**40)),
    *(0.0, -0.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"), 0.5),
    *("", " ", "x", "x" * 5000, "\x00", "\ud800", "\u202e", "../../x", "/", "a.b", "[/x]", "{}", "%s", "None"),
    *("coding", "tests.plugins:Engine", "no.such:Thing", "..:x", "os:system", "'", '"', "\\", "\n", "-" * 400 + "1"),
    *([], {}, [[]], {"": ""}, {"kind": "coding"}, ["x"] * 300, NESTED, {"x" * 3000: {"y": None}}),
]
ODD_BYTES = [
    *(b"\x00", b"\xff", b"\xfe\xff", b"\xed\xa0\x80", b"[" * 3000, b"9" * 5000),
    *(b'"', b"\\", b"\n", b"{", b"NaN", b"\x1f\x8b"),
]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A text or an archive with one to three places flipped, cut, doubled or filled with something odd."""
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        start = rng.randrange(len(mutant) + 1)
        end = min(len(mutant), start + rng.choice((1, 1, 4, 30, 300)))
        action = rng.randrange(5)
        if action == 0 and start < len(mutant):
            mutant[start] ^= 1 << rng.randrange(8)
        elif action == 1:
            del mutant[start:end]
        elif action == 2:
            mutant[start:start] = mutant[start:end]
        elif action == 3:
            del mutant[start:]
        else:
            mutant[start:end] = rng.choice(ODD_BYTES)
    return bytes(mutant)


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of plain JSON, with one to three of its values replaced, dropped, doubled or given another name."""
    mutant = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_list_places(mutant))
        if not places:
            return rng.choice(ODD_VALUES)
        parent, key = rng.choice(places)
        action = rng.randrange(7)
        if action <= 1:
            parent[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif action == 2:
            parent[key] = _change_value(parent[key], rng)
        elif action == 3:
            del parent[key]
        elif action == 4 and isinstance(parent, dict):
            parent[f"{key}{rng.choice(('x', '', '.', ' ', '0'))}"] = parent.pop(key)
        else:
            other_parent, other_key = rng.choice(places)
            parent[key] = copy.deepcopy(other_parent[other_key])
    return mutant


def _change_value(value: Any, rng: random.Random) -> Any:
    """A value of the same type, often one that could be meant."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * rng.choice((-1, 0, 2, 10, 1000, 10**9)) + rng.choice((0, 1))
    if isinstance(value, str) and value:
        start = rng.randrange(len(value))
        return value[:start] + rng.choice(("", "x", " ", "é", ":", value)) + value[start + rng.randrange(2) :]
    return value


def _list_places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container inside ``tree`` with each of its keys, so that a caller can replace or delete any value."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys: list[Any] = []
        if isinstance(node, dict):
            keys = list(node)
        elif isinstance(node, list):
            keys = list(range(len(node)))
        for key in keys:
            yield node, key
            waiting.append(node[key])


def dump_lines(rows: list[Any]) -> bytes:
    """Rows as JSON lines, lone surrogates as bytes that no UTF-8 has."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def count_outcomes(
    seed: str,
    use: Callable[[random.Random], object],
    count: int,
    errors: tuple[type[Exception], ...] = (ConfigError,),
) -> Counter[str]:
    """Use ``count`` mutants, each drawn by ``use`` from a generator of its own; how many were accepted and refused.

    Whatever else a mutant raises fails the test, and so does a message that is empty, long, or of many lines.
    """
    outcomes: Counter[str] = Counter()
    for number in range(count):
        try:
            use(random.Random(f"{seed} {number}"))
        except errors as error:
            lines = str(error).splitlines()
            assert 0 < len(lines) <= MOST_LINES, f"{seed} {number}: {len(lines)} lines"
            assert max(map(len, lines)) <= LONGEST_LINE, f"{seed} {number}: {max(map(len, lines))} characters"
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(f"mutant {seed!r} {number}")
            raise
        else:
            outcomes["accepted"] += 1
    print(f"{seed}: {dict(outcomes)}")
    return outcomes
