from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from magrpo.python_source import check_depth, parse_python

SOURCE = "\n".join(
    f"def f{i}(a, b):\n    return [x * {i} for x in a if x > b] + [({i}, (a, (b, (a, b))))]" for i in range(20)
)


class Cycle:
    """Garbage that runs Python, during which another thread may take its turn, when it is collected."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns, and garbage is collected, as often as can be."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def count_functions(_: int) -> int:
    Cycle()
    return len(parse_python(SOURCE).body)


@pytest.mark.usefixtures("hurried")
def test_threads_parse_at_once() -> None:
    """Of as many calls of ``ast.parse`` about fifty fail on Python 3.11."""
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(count_functions, range(400))) == {20}


@pytest.mark.parametrize("source", ["(" * 3000, "-" * 3000 + "1", "+".join("1" * 5000), "\ud800", "x" + "()" * 3000])
def test_what_python_cannot_parse_is_a_syntax_error(source: str) -> None:
    with pytest.raises(SyntaxError):
        parse_python(source)


def test_depth_is_counted_whatever_the_stack() -> None:
    tree = parse_python("-" * 100 + "1")
    check_depth(tree, 200)
    with pytest.raises(SyntaxError, match="nested deeper than 50 levels"):
        check_depth(tree, 50)


def test_warnings_about_a_source_reach_nobody(recwarn: pytest.WarningsRecorder) -> None:
    """From Python 3.12 on they would be printed, for every completion with such a text."""
    warnings.simplefilter("always")
    assert parse_python(r's = "\d"').body
    assert not recwarn.list
