"""The watched function of a program behaves as in plain Python."""

from __future__ import annotations

from magrpo.sandboxes.jail.candidate import CandidateProgram

RECURSIVE = """
def aux(n):
    return 1 + aux(n - 1) if n else 0

def f(n):
    return 2 * aux(n)
"""
CACHED = """
from functools import lru_cache

@lru_cache(None)
def aux(n):
    return n

def f(n):
    aux.cache_clear()
    return [aux(n), aux(n), aux.cache_info().hits, aux.__name__]
"""


def load(source: str) -> CandidateProgram:
    program = CandidateProgram(source, "f", "aux")
    program.load()
    program.tracer.running = True
    return program


def test_it_calls_itself_as_deeply() -> None:
    program = load(RECURSIVE)
    for calls in (1, 2):
        assert program.function(700) == 1400
        assert program.tracer.calls == calls, "outermost ones"


def test_it_keeps_its_attributes() -> None:
    assert load(CACHED).function(3) == [3, 3, 1, "aux"]
