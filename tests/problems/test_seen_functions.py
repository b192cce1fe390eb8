from __future__ import annotations

from magrpo.problems.coopcode import SeenFunctions


def test_functions_are_found_by_what_they_do() -> None:
    seen = SeenFunctions({"int": [1, 2, 3, 40], "str": ["a", "b", "c"]})
    seen.add_function("int", lambda n: 2 * n)
    seen.add_function("int", lambda n: n + 1)
    assert seen.has_equal("int", lambda n: n + n)
    assert not seen.has_equal("int", lambda n: 2 * n if n < 40 else 0), "alike on the inputs that look it up only"
    assert seen.has_equal("int", lambda n: n + 1 if n < 40 else None), "not defined is not different"
    assert not seen.has_equal("str", lambda text: 2 * text), "of another kind of argument"
