"""Problems of a run by id, and problems written from a user's words."""

from __future__ import annotations

from textwrap import dedent

import pytest

from magrpo.asking.problems import find_problem, write_problem
from magrpo.plugins import ConfigError
from magrpo.rewards.coding import CodingReward
from magrpo.rewards.writing import WritingReward
from magrpo.types import Problem

CODING, WRITING = CodingReward(), WritingReward()
PROBLEMS = {name: Problem(name, "") for name in ("coopcode/plus:9/minus:3", "coopcode/plus:9/over:3", "coopcode/total")}


def test_a_problem_is_found_by_a_part_of_its_id() -> None:
    assert find_problem(PROBLEMS, "coopcode/total").task_id == "coopcode/total"
    assert find_problem(PROBLEMS, "Over").task_id == "coopcode/plus:9/over:3"
    with pytest.raises(ConfigError, match="problem 'plus': 2 ids contain it, such as coopcode/plus:9/minus:3, "):
        find_problem(PROBLEMS, "plus")
    with pytest.raises(ConfigError, match="no problem 'coopcode/totel'; similar ids: coopcode/total"):
        find_problem(PROBLEMS, "coopcode/totel")


@pytest.mark.parametrize(
    ("sentence", "argument"), [("Sort the list.", "xs"), ("Reverse the text.", "s"), ("Add one.", "n")]
)
def test_a_sentence_becomes_a_function(sentence: str, argument: str) -> None:
    problem = write_problem(sentence, [], CODING)
    assert problem.prompt == f'def solve({argument}):\n    """{sentence}"""\n'
    assert (problem.entry_point, problem.test) == ("solve", "")


def test_a_sentence_takes_the_name_that_its_tests_call() -> None:
    problem = write_problem("Double it.", ["assert abs(twice(2)) == 4"], CODING)
    assert problem.prompt.startswith("def twice(n):")
    assert problem.test == "def check(candidate):\n    twice = candidate\n    assert abs(twice(2)) == 4\n"


def test_tests_may_call_the_candidate() -> None:
    problem = write_problem("Double it.", ["assert candidate(2) == 4"], CODING)
    assert problem.entry_point == "solve"
    assert problem.test.endswith("    solve = candidate\n    assert candidate(2) == 4\n")


def test_a_function_brings_asserts_and_examples() -> None:
    text = dedent('''\
        import math

        def f(x):
            """Add one.

            >>> f(1)
            2
            >>> y = f(1)
            """
        assert f(3) == 4
        ''')
    problem = write_problem(text, ["assert f(5) == 6"], CODING)
    assert problem.entry_point == "f"
    assert problem.prompt.startswith("import math\n")
    assert "assert" not in problem.prompt
    assert problem.test.splitlines()[2:] == [f"    assert f({i}) == {i + 1}" for i in (3, 5, 1)]


def test_a_function_may_stand_on_one_line() -> None:
    problem = write_problem('def f(x: int) -> int: """Add: one."""', [], CODING)
    assert problem.prompt == 'def f(x: int) -> int:\n    """Add: one."""\n'


def test_a_signature_is_enough() -> None:
    assert write_problem("def f(a, b):", [], CODING) == Problem("yours", "def f(a, b):\n", "f")


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (["assert ("], r"test 'assert \(': is not Python"),
        (["f(1)"], r"test 'f\(1\)': write an assert"),
        (["assert 1 == 1"], "no test calls 'f', the function of the problem"),
    ],
)
def test_an_unusable_test_is_refused(tests: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_problem("def f(x):", tests, CODING)


def test_a_text_for_authors_is_taken_as_it_is() -> None:
    assert write_problem("\nA post.\n\nIts end.\n", [], WRITING) == Problem("yours", "A post.\n\nIts end.")
    with pytest.raises(ConfigError, match="--test: the answers are texts, which have no tests"):
        write_problem("A post.", ["assert f(1)"], WRITING)
    with pytest.raises(ConfigError, match="the problem is empty"):
        write_problem(" \n", [], WRITING)
