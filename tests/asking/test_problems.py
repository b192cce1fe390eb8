"""Problems of a run by id, and problems written from a user's words."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent, indent

import pytest

from magrpo.asking.problems import explain_words, find_problem, write_problem
from magrpo.errors import ConfigError
from magrpo.problems.coopcode import CoopCode
from magrpo.problems.notes import Notes
from magrpo.rewards.coding import CodingReward
from magrpo.rewards.writing import WritingReward
from magrpo.types import Problem

CODING, WRITING = CodingReward(), WritingReward()
COOPCODE, OTHERS = CoopCode(kind="coopcode"), Notes(kind="notes")
PROBLEMS = {name: Problem(name, "") for name in ("coopcode/plus:9/minus:3", "coopcode/plus:9/over:3", "coopcode/total")}


def test_a_problem_is_found_by_a_part_of_its_id() -> None:
    assert find_problem(PROBLEMS, "coopcode/total").task_id == "coopcode/total"
    assert find_problem(PROBLEMS, "Over").task_id == "coopcode/plus:9/over:3"
    with pytest.raises(ConfigError, match="problem 'plus': 2 ids contain this text, such as coopcode/plus:9/minus:3, "):
        find_problem(PROBLEMS, "plus")
    with pytest.raises(ConfigError, match="no problem 'coopcode/totel'; similar ids: coopcode/total"):
        find_problem(PROBLEMS, "coopcode/totel")


@pytest.mark.parametrize(
    ("sentence", "argument"), [("Sort the list.", "xs"), ("Reverse the text.", "s"), ("Add one.", "n")]
)
def test_a_sentence_becomes_a_function(sentence: str, argument: str) -> None:
    problem = write_problem(sentence, [], CODING, OTHERS)
    assert problem.prompt == f'def solve({argument}):\n    """{sentence}"""\n'
    assert (problem.entry_point, problem.test) == ("solve", "")


@pytest.mark.parametrize("sentence", ['Return the word "yes"', 'Say """a""" and \'b\'', "Split at \\d", "End with \\"])
def test_a_sentence_with_quotes_and_backslashes_stays_one_docstring(sentence: str) -> None:
    problem = write_problem(sentence, [], CODING, OTHERS)
    [function] = ast.parse(problem.prompt).body
    assert isinstance(function, ast.FunctionDef)
    assert str(ast.get_docstring(function)).rstrip() == sentence


def test_a_sentence_takes_the_name_that_its_tests_call() -> None:
    problem = write_problem("Double it.", ["assert abs(twice(2)) == 4"], CODING, OTHERS)
    assert problem.prompt.startswith("def twice(n):")
    assert problem.test == "def check(candidate):\n    twice = candidate\n    assert abs(twice(2)) == 4\n"


@pytest.mark.parametrize(
    ("test", "signature"),
    [
        ("assert gcd2(12, 18) == 6", "def gcd2(a, b):"),
        ("assert candidate(12, base=2) == 6", "def solve(a, base):"),
        ("assert power(5, a=2) == 25", "def power(b, a):"),
        ("assert log(8) == log(8, 2)", "def log(a, b):"),
        ("assert now() > 0", "def now():"),
        ("assert all_of(*range(3))", "def all_of(n):"),
    ],
)
def test_a_sentence_takes_as_many_parameters_as_its_test_passes(test: str, signature: str) -> None:
    problem = write_problem("Return something.", [test], CODING, OTHERS)
    assert problem.prompt.startswith(signature)


def test_a_sentence_takes_the_name_that_its_examples_call() -> None:
    problem = write_problem("Add one.\n\n>>> add_one(1)\n2\n", [], CODING, OTHERS)
    assert problem.entry_point == "add_one"
    assert "assert add_one(1) == 2" in problem.test


@pytest.mark.parametrize("test", ["assert f([1,\n  2]) == 3", "assert(f([1, 2]) == 3)", "assert f(\n[1, 2]\n) == 3"])
def test_an_assert_may_go_on_in_further_lines(test: str) -> None:
    problem = write_problem(f'def f(x):\n    """Add."""\n{test}\n\n# more', [], CODING, OTHERS)
    assert "assert f([1, 2]) == 3" in problem.test
    assert problem.prompt == 'def f(x):\n    """Add."""\n\n# more\n'


def test_tests_may_call_the_candidate() -> None:
    problem = write_problem("Double it.", ["assert candidate(2) == 4"], CODING, OTHERS)
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
    problem = write_problem(text, ["assert f(5) == 6"], CODING, OTHERS)
    assert problem.entry_point == "f"
    assert problem.prompt.startswith("import math\n")
    assert "assert" not in problem.prompt
    assert problem.test.splitlines()[2:] == [f"    assert f({i}) == {i + 1}" for i in (3, 5, 1)]


@pytest.mark.parametrize(
    ("examples", "tests"),
    [
        (">>> f(3)\n\n>>> f(1000)\n...\n>>> f(10)\n[0, 1, ...]\n>>> f(2)\n'...'", ["assert f(2) == '...'"]),
        (">>> f(1)\n(1, 2)\n[0]\n>>> f(2)\n-1\n-2\n>>> f(3)\n'a'\n'b'", []),
        (
            ">>> f(1)\nhello\n>>> f(2)\nnan\n>>> f(3)\nFraction(1, 2)\n>>> f(4)  # a set\nset()",
            ["assert f(4) == set()"],
        ),
        (">>> f(1)  # doctest: +SKIP\n2\n>>> f(0)\nTraceback (most recent call last):\nValueError: 0", []),
        (">>> f(2)\n[[1, 0],\n [0, 1]]", ["assert f(2) == [[1, 0], [0, 1]]"]),
        (">>> print(f(2))\n[0, 1]\n>>> n = 3\n>>> f(n)\n4\n>>> abs(f(1))\n2", ["assert abs(f(1)) == 2"]),
        (">>> [f(n) for n in (1, 2)]\n[2, 3]\n>>> [n for m in f(1)]\n[2]", ["assert [f(n) for n in (1, 2)] == [2, 3]"]),
        (">>> max((1, 2), key=lambda n: f(n))\n2", ["assert max((1, 2), key=lambda n: f(n)) == 2"]),
    ],
)
def test_examples_become_tests_that_a_correct_function_can_pass(examples: str, tests: list[str]) -> None:
    docstring = indent(f'"""Count.\n\n{examples}\n"""', "    ")
    test = write_problem(f"def f(n):\n{docstring}\n", [], CODING, OTHERS).test
    assert [line.removeprefix("    ") for line in test.splitlines()[2:] if line.strip()] == tests


def test_a_function_may_stand_on_one_line() -> None:
    problem = write_problem('def f(x: int) -> int: """Add: one."""', [], CODING, OTHERS)
    assert problem.prompt == 'def f(x: int) -> int:\n    """Add: one."""\n'


def test_a_function_may_be_indented() -> None:
    text = 'def f(x):\n    """Add one.\n\n    >>> f(1)\n    2\n    """\nassert f(3) == 4\n'
    expected = write_problem(text, [], CODING, OTHERS)
    assert expected.entry_point == "f"
    assert write_problem(indent(text, "    "), [], CODING, OTHERS) == expected
    assert write_problem(f"\n{indent(text, chr(9))}", [], CODING, OTHERS) == expected


def test_indented_asserts_behind_a_sentence_are_tests() -> None:
    problem = write_problem("Double it:\n    assert twice(2) == 4\n  assert twice(3) == 6", [], CODING, OTHERS)
    assert problem.prompt == 'def twice(n):\n    """Double it:"""\n'
    assert problem.test.splitlines()[2:] == ["    assert twice(2) == 4", "    assert twice(3) == 6"]


def test_an_assert_in_a_function_is_no_test() -> None:
    text = "def f(x):\n    assert x > 0\n"
    assert write_problem(text, [], CODING, OTHERS) == Problem("yours", text, "f")


def test_a_signature_is_enough() -> None:
    assert write_problem("def f(a, b):", [], CODING, OTHERS) == Problem("yours", "def f(a, b):\n", "f")


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (["assert ("], r"test 'assert \(': is not Python"),
        (["f(1)"], r"test 'f\(1\)': write an assert"),
        (["assert 1 == 1"], "no test calls 'f', the problem's function"),
    ],
)
def test_an_unusable_test_is_refused(tests: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_problem("def f(x):", tests, CODING, OTHERS)


def test_a_text_for_authors_is_taken_as_it_is() -> None:
    assert write_problem("\nA post.\n\nIts end.\n", [], WRITING, OTHERS) == Problem("yours", "A post.\n\nIts end.")
    with pytest.raises(ConfigError, match="--test: these agents write texts, which have no tests"):
        write_problem("A post.", ["assert f(1)"], WRITING, OTHERS)
    with pytest.raises(ConfigError, match="the problem is empty"):
        write_problem(" \n", [], WRITING, OTHERS)


@pytest.mark.parametrize(
    ("typed", "signature", "sentence"),
    [
        (
            "keep the even numbers THEN multiply every number by 2",
            "def evens_scale(xs):",
            "Keep the even numbers, then multiply every number by 2.",
        ),
        (
            "Keep the numbers above 3, replace each number by its square, and then reverse the list.",
            "def above_squares_mirror(xs):",
            "Keep the numbers above 3, replace each number by its square, then reverse the list.",
        ),
        (
            "Remove every a. Then reverse the text.",
            "def remove_backward(s):",
            "Remove every a, then reverse the text.",
        ),
    ],
)
def test_a_sentence_in_the_words_of_the_problem_set_gets_its_name_and_tests(
    typed: str, signature: str, sentence: str
) -> None:
    problem = write_problem(typed, [], CODING, COOPCODE)
    assert problem.prompt == f'{signature}\n    """{sentence}"""\n'
    assert problem.test.count("    assert candidate(") == 5
    assert explain_words(problem, COOPCODE) == ""


def test_a_sentence_is_named_as_the_training_problem_with_these_words_is() -> None:
    for problem in CoopCode(kind="coopcode", num_train=30, num_test=3, num_ood=3).load()["train"]:
        [sentence] = re.findall('"""(.+)"""', problem.prompt)
        assert write_problem(sentence, [], CODING, COOPCODE).prompt == problem.prompt


def test_tests_of_ones_own_replace_those_of_the_problem_set() -> None:
    sentence = "Sort the list, then reverse the list."
    problem = write_problem(sentence, ["assert candidate([1, 2]) == [2, 1]"], CODING, COOPCODE)
    assert problem.entry_point == "ascending_mirror"
    assert problem.test.count("assert") == 1
    problem = write_problem(sentence, ["assert down([1, 2]) == [2, 1]"], CODING, COOPCODE)
    assert problem.prompt.startswith("def down(xs):")


@pytest.mark.parametrize(
    ("sentence", "remark"),
    [
        (
            "Keep the numbers over 3, then reverse the list.",
            "no training problem says 'keep the numbers over 3'; closest: 'keep the numbers above K', K one of 2, 3, ",
        ),
        ("Keep the numbers above 12, then sort the list.", "no training problem says 'keep the numbers above 12'"),
        ("Sort the list.", "a problem has two or three steps, but this one has 1"),
        (
            "Sort the list, then reverse the text.",
            "its steps do not fit together: one returns a number, a list or a text",
        ),
        ("Square, then drop the sign.", "no five tests distinguish it from its parts"),
    ],
)
def test_a_sentence_in_other_words_says_so(sentence: str, remark: str) -> None:
    problem = write_problem(sentence, [], CODING, COOPCODE)
    assert (problem.entry_point, problem.test) == ("solve", "")
    assert explain_words(problem, COOPCODE).startswith(remark)
    assert explain_words(problem, OTHERS) == "", "problems that read no sentences"


def test_the_sentences_of_the_documents_are_in_the_words_of_the_problem_set() -> None:
    root = Path(__file__).parents[2]
    texts = [(root / name).read_text() for name in ("README.md", "docs/using-agents.md", "docs/cli.md")]
    texts.append((root / "pipelines" / "cli.py").read_text())
    for text in texts:
        sentences = re.findall(r'magrpo ask \S+ "([^"]+)"', text)
        assert sentences
        for sentence in sentences:
            assert write_problem(sentence, [], CODING, COOPCODE).tags, sentence
    [showcase] = re.findall(r'^\*"(Keep .+?)"\*', texts[0], re.MULTILINE)
    assert write_problem(showcase, [], CODING, COOPCODE).tags
