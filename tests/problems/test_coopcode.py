from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.embedded.conventions import AUX, WEIGHTS, write_completion
from infra.embedded.warm_start import WarmStartConfig
from magrpo.problems.coopcode import CoopCode, make_problem
from magrpo.problems.operations import OPERATIONS, Composition, parse_composition, parse_operation
from magrpo.types import Problem, Split

Splits = dict[Split, list[Problem]]

# (step, argument, result), worked out by hand, one for every operation.
GOLDENS = [
    ("plus:3", 4, 7),
    ("minus:3", 4, 1),
    ("times:3", 4, 12),
    ("over:3", -4, -2),
    ("modulo:3", -4, 2),
    ("square", -4, 16),
    ("negate", 4, -4),
    ("magnitude", -4, 4),
    ("atleast:5", 4, 5),
    ("atmost:3", 4, 3),
    ("digitsum", 407, 11),
    ("digits", 407, [4, 0, 7]),
    ("upto", 3, [1, 2, 3]),
    ("divisors", 6, [1, 2, 3, 6]),
    ("evens", [1, 2, -4], [2, -4]),
    ("odds", [1, 2, -3], [1, -3]),
    ("above:3", [3, 4], [4]),
    ("below:3", [2, 3], [2]),
    ("without:2", [2, 3, 2], [3]),
    ("shift:2", [1, -1], [3, 1]),
    ("scale:2", [1, -1], [2, -2]),
    ("residues:3", [4, -1], [1, 2]),
    ("squares", [2, -3], [4, 9]),
    ("negatives", [2, -3], [-2, 3]),
    ("sizes", [2, -3], [2, 3]),
    ("mirror", [1, 2, 3], [3, 2, 1]),
    ("ascending", [2, 3, 1], [1, 2, 3]),
    ("descending", [2, 3, 1], [3, 2, 1]),
    ("distinct", [2, 1, 2], [2, 1]),
    ("first:2", [1, 2, 3], [1, 2]),
    ("skip:2", [1, 2, 3], [3]),
    ("final:2", [1, 2, 3], [2, 3]),
    ("alternate", [1, 2, 3], [1, 3]),
    ("running", [1, 2, 3], [1, 3, 6]),
    ("gaps", [1, 4, 2], [3, -2]),
    ("total", [1, 4, 2], 7),
    ("largest", [1, 4, 2], 4),
    ("smallest", [1, 4, 2], 1),
    ("amount", [1, 4, 2], 3),
    ("spread", [1, 4, 2], 3),
    ("tally:2", [2, 4, 2], 2),
    ("exceeding:2", [2, 4, 3], 2),
    ("upper", "aB", "AB"),
    ("lower", "aB", "ab"),
    ("swap", "aB", "Ab"),
    ("backward", "abc", "cba"),
    ("repeat:2", "ab", "abab"),
    ("prefix:2", "abc", "ab"),
    ("suffix:2", "abc", "bc"),
    ("chop:2", "abc", "c"),
    ("alphabetic", "cab", "abc"),
    ("remove:a", "abca", "bc"),
    ("dashed:a", "abca", "-bc-"),
    ("append:e", "ab", "abe"),
    ("prepend:e", "ab", "eab"),
    ("odd", "abc", "ac"),
    ("double", "ab", "aabb"),
    ("consonants", "bade", "bd"),
    ("size", "abc", 3),
    ("occurrences:a", "aba", 2),
    ("vowels", "baE", 1),
    ("words", "ab c", 2),
    ("lengths", "ab c", [2, 1]),
    ("codes", "ab", [97, 98]),
]


@pytest.fixture(scope="module")
def splits() -> Splits:
    return CoopCode(kind="coopcode").load()


def run(source: str, problem: Problem) -> str:
    """``pass``, or the name of the exception that the tests end in. Programs here are our own, nobody else's."""
    names: dict[str, object] = {}
    exec(source + "\n" + problem.test, names)
    check = names["check"]
    assert callable(check)
    try:
        check(names[problem.entry_point])
    except Exception as error:  # noqa: BLE001 - any failure of the program is the result
        return type(error).__name__
    return "pass"


@pytest.mark.parametrize(("step", "value", "result"), GOLDENS, ids=[golden[0] for golden in GOLDENS])
def test_an_operation_computes_what_its_phrase_says(step: str, value: object, result: object) -> None:
    assert parse_operation(step)(value) == result


def test_every_operation_has_a_golden() -> None:
    assert [step.partition(":")[0] for step, _, _ in GOLDENS] == list(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))
def test_phrases_differ_and_name_the_constant(operation: object) -> None:
    op = OPERATIONS[operation.name]  # type: ignore[attr-defined]
    assert len(set(op.phrases)) == 2
    assert all(("{k}" in phrase) == bool(op.constants) for phrase in op.phrases)
    assert ("{k}" in op.expression) == bool(op.constants)


def test_one_problem_in_full() -> None:
    problem = make_problem(Composition((parse_operation("above:3"), parse_operation("total"))), "train")
    assert problem is not None
    assert problem.task_id == "coopcode/above:3/total"
    assert problem.entry_point == "above_total"
    assert problem.prompt.startswith('def above_total(xs):\n    """Keep ')
    assert problem.canonical_solution == "    ys = [x for x in xs if x > 3]\n    return sum(ys)\n"
    assert problem.tags == {"level": "2", "steps": "above:3 total", "split": "train"}
    assert problem.test.count("    assert candidate([") == 5
    assert compute(parse_composition(problem), [1, 4, 5]) == 9


def test_splits_have_the_sizes_asked_for_and_share_no_problem(splits: Splits) -> None:
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 1536, "test": 96, "ood": 96}
    ids = [problem.task_id for problems in splits.values() for problem in problems]
    assert len(set(ids)) == len(ids)
    for split, problems in splits.items():
        assert {problem.tags["split"] for problem in problems} == {split}
        levels = Counter(problem.tags["level"] for problem in problems)
        assert set(levels.values()) == {len(problems) // 3}


def compute(composition: Composition, value: object) -> object:
    return functools.reduce(lambda given, step: step(given), composition.steps, value)


def behaviour(composition: Composition) -> str:
    """What a composition does to 100 inputs of its kind; independent of how the problem set tells functions apart."""
    rng = random.Random(99)
    draws: dict[str, Callable[[], object]] = {
        "int": lambda: rng.randint(-30, 130),
        "list": lambda: [rng.randint(-9, 19) for _ in range(rng.randint(5, 8))],
        "str": lambda: "".join(rng.choice("aeiorstbdAER  ") for _ in range(rng.randint(5, 15))),
    }
    results = []
    for _ in range(100):
        value = draws[composition.argument_kind]()
        try:
            results.append(compute(composition, value))
        except (ValueError, TypeError):
            results.append(None)
    return f"{composition.argument_kind} {results}"


@pytest.mark.slow
def test_no_held_out_problem_is_one_that_was_trained_on_in_another_order(splits: Splits) -> None:
    """Neither one to train on nor one that the embedded base saw, whose recipe's problems are the first 6144."""
    assert WarmStartConfig().num_problems == 6144
    seen = CoopCode(kind="coopcode", num_train=6144, num_test=3, num_ood=3).load()
    assert {problem.task_id for problem in splits["train"]} < {problem.task_id for problem in seen["train"]}
    known = {behaviour(parse_composition(problem)) for problem in seen["train"]}
    again = Composition(
        (parse_operation("squares"), parse_operation("skip:4"))
    )  # coopcode/skip:4/squares is among them
    assert behaviour(again) in known
    for split in ("test", "ood"):
        assert [p.task_id for p in splits[split] if behaviour(parse_composition(p)) in known] == [], split


def test_problems_are_what_they_were(splits: Splits) -> None:
    """The shipped base was made with those to train on, which others do not change, and runs are reproducible."""
    texts = {split: repr([(p.task_id, p.prompt, p.test) for p in problems]) for split, problems in splits.items()}
    digests = {split: hashlib.sha256(text.encode()).hexdigest()[:16] for split, text in texts.items()}
    assert digests["train"] == "230c88666ac820a9"
    assert digests == {**digests, "test": "f34587fe119db33b", "ood": "561e6351462b5e50"}
    other = CoopCode(kind="coopcode", num_test=300, num_ood=3).load()
    assert other["train"] == splits["train"]
    assert other["test"][:32] == splits["test"][:32], "more problems come after the same ones"


def test_test_varies_constants_and_ood_varies_compositions(splits: Splits) -> None:
    trained = {parse_composition(problem).family for problem in splits["train"]}
    assert all(parse_composition(problem).family in trained for problem in splits["test"])
    pairs = {pair for family in trained for pair in itertools.pairwise(family.split())}
    for problem in splits["ood"]:
        family = parse_composition(problem).family
        assert family not in trained
        assert any(pair not in pairs for pair in itertools.pairwise(family.split()))


def test_the_canonical_solution_passes_and_every_smaller_part_fails_every_test(splits: Splits) -> None:
    for problem in [*splits["train"][::16], *splits["test"], *splits["ood"]]:
        assert run(problem.prompt + problem.canonical_solution, problem) == "pass", problem.task_id
        steps = parse_composition(problem).steps
        asserts = problem.test.splitlines()[1:]
        for size in range(1, len(steps)):
            for part in itertools.combinations(steps, size):
                source = Composition(part).write_function(problem.entry_point)
                for line in asserts:
                    one = Problem("x", "", problem.entry_point, f"def check(candidate):\n{line}\n")
                    assert run(source, one) != "pass", (problem.task_id, source, line)


def test_agreeing_conventions_pass_and_disagreeing_ones_do_not(splits: Splits) -> None:
    for problem in splits["test"]:
        composition = parse_composition(problem)
        for helper, main in itertools.product(WEIGHTS["helper"], WEIGHTS["main"]):
            source = (
                write_completion(composition, "helper", helper) + "\n" + write_completion(composition, "main", main)
            )
            works = run(source, problem) == "pass"
            if main == "nothing" or helper == main:
                assert works, (problem.task_id, helper, main)
            elif helper == "nothing" or main == "all":
                assert not works, (problem.task_id, helper, main)


def test_what_each_convention_writes() -> None:
    composition = Composition((parse_operation("skip:2"), parse_operation("evens"), parse_operation("total")))
    written = {(role, name): write_completion(composition, role, name) for role in WEIGHTS for name in WEIGHTS[role]}
    assert written == {
        ("helper", "first"): "def aux(xs):\n    return xs[2:]",
        ("helper", "last"): "def aux(xs):\n    return sum(xs)",
        ("helper", "all"): (
            "def aux(xs):\n    ys = xs[2:]\n    zs = [x for x in ys if x % 2 == 0]\n    return sum(zs)"
        ),
        ("helper", "nothing"): "def aux(xs):\n    return xs",
        ("main", "first"): (
            "def skip_evens_total(xs):\n    ys = aux(xs)\n    zs = [x for x in ys if x % 2 == 0]\n    return sum(zs)"
        ),
        ("main", "last"): (
            "def skip_evens_total(xs):\n    ys = xs[2:]\n    zs = [x for x in ys if x % 2 == 0]\n    return aux(zs)"
        ),
        ("main", "all"): f"def skip_evens_total(xs):\n    return {AUX}(xs)",
        ("main", "nothing"): (
            "def skip_evens_total(xs):\n    ys = xs[2:]\n    zs = [x for x in ys if x % 2 == 0]\n    return sum(zs)"
        ),
    }


@given(st.sampled_from(sorted(OPERATIONS)), st.data())
def test_a_step_key_reads_back(name: str, data: st.DataObject) -> None:
    constant = data.draw(st.sampled_from(OPERATIONS[name].constants or [""]))
    step = parse_operation(f"{name}:{constant}" if constant else name)
    assert parse_operation(step.key) == step


def test_levels_can_be_chosen() -> None:
    splits = CoopCode(kind="coopcode", num_train=10, num_test=4, num_ood=4, levels=("2",)).load()
    assert {problem.tags["level"] for problems in splits.values() for problem in problems} == {"2"}


def test_a_level_is_named_once() -> None:
    with pytest.raises(ValueError, match="'1' is named more than once"):
        CoopCode(kind="coopcode", levels=("1", "2", "1"))


@pytest.mark.slow
def test_too_many_problems_are_refused_with_the_number_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"problems\.num_ood: there are \d+ problems of level 1 .* lower problems\.num_ood"
    ):
        CoopCode(kind="coopcode", num_train=3, num_test=3, num_ood=50_000, levels=("1",)).load()
