from __future__ import annotations

import re
from collections import Counter

import pytest

from infra.embedded.conventions import WEIGHTS, write_completion
from infra.embedded.demonstrations import RECIPES, Example, collect_texts, make_first_turns, make_revisions
from magrpo.envs.diagnosis import BARE_LINES
from magrpo.problems.coopcode import CoopCode
from magrpo.problems.notes import Notes
from magrpo.problems.operations import parse_composition
from magrpo.types import Problem
from tests.fakes import ScriptedSandbox

RECIPE, SANDBOX = RECIPES["coopcode"]
ROLES = RECIPE.conventions.roles


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return CoopCode(kind="coopcode", num_train=48, num_test=3, num_ood=3).load()["train"]


def conventions_of(problem: Problem, role: str, text: str) -> list[str]:
    return [name for name in WEIGHTS[role] if write_completion(parse_composition(problem), role, name) == text]


def test_first_turns_follow_a_convention_of_each_role(problems: list[Problem]) -> None:
    examples = make_first_turns(problems, RECIPE, seed=0)
    assert len(examples) == 2 * len(problems)
    for i, example in enumerate(examples):
        problem, role = problems[i // 2], ROLES[i % 2]
        assert example.prompt == f"# {role}\n{problem.prompt}\n"
        assert conventions_of(problem, role, example.completion)


def test_conventions_are_drawn_in_their_shares_and_independently(problems: list[Problem]) -> None:
    pairs: Counter[tuple[str, str]] = Counter()
    for seed in range(40):
        examples = make_first_turns(problems, RECIPE, seed)
        for problem, helper, main in zip(problems, examples[::2], examples[1::2], strict=True):
            pairs[
                conventions_of(problem, "helper", helper.completion)[0],
                conventions_of(problem, "main", main.completion)[0],
            ] += 1
    total = sum(pairs.values())
    for first, share in WEIGHTS["helper"].items():
        for second, other in WEIGHTS["main"].items():
            assert pairs[first, second] / total == pytest.approx(share * other, abs=0.025)


def test_examples_follow_from_the_seed(problems: list[Problem]) -> None:
    assert (
        make_first_turns(problems, RECIPE, 1)
        == make_first_turns(problems, RECIPE, 1)
        != make_first_turns(problems, RECIPE, 2)
    )


def test_all_texts_hold_every_first_turn(problems: list[Problem]) -> None:
    texts = set(collect_texts(problems, RECIPE))
    assert {
        text for example in make_first_turns(problems, RECIPE, 3) for text in (example.prompt, example.completion)
    } <= texts


def test_revisions_answer_the_feedback_that_the_first_turn_really_gets(problems: list[Problem]) -> None:
    sandbox = SANDBOX.open()
    try:
        examples = make_revisions(problems, RECIPE, sandbox, seed=0)
    finally:
        sandbox.close()
    assert len(examples) == 2 * len(problems)
    verdicts: Counter[str] = Counter()
    for i, example in enumerate(examples):
        problem, role = problems[i // 2], ROLES[i % 2]
        task, _, rest = example.prompt.partition("\n# previous\n")
        previous, _, feedback = rest.partition("\n# feedback\n")
        assert task == f"# {role}\n{problem.prompt}"
        lines = feedback.strip().splitlines()
        assert set(lines) <= set(BARE_LINES)
        verdicts.update(lines)
        if lines == ["all good"]:
            assert example.completion == previous
        else:
            assert conventions_of(problem, role, example.completion)
    assert {"all good", "no tests pass", "all tests pass"} <= set(verdicts)


def test_what_the_sandbox_failed_on_is_no_example(problems: list[Problem]) -> None:
    examples: list[Example] = make_revisions(problems, RECIPE, ScriptedSandbox(lambda _: "infra_error"), 0)
    assert all("\n# feedback\n" in example.prompt for example in examples)
    assert len(examples) < 2 * len(problems)


def test_authors_of_notes_revise_without_a_sandbox() -> None:
    recipe, plugin = RECIPES["notes"]
    notes = Notes(kind="notes", num_train=64).load()["train"]
    texts = set(collect_texts(notes, recipe))
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    verdicts: Counter[str] = Counter()
    for example in [*make_first_turns(notes, recipe, 0), *make_revisions(notes, recipe, plugin.open(), seed=0)]:
        task, _, rest = example.prompt.partition("\n# previous\n")
        assert f"{task.strip()}\n" in texts
        assert {*re.findall(r"\w+", example.completion)} <= words
        previous, _, feedback = rest.partition("\n# feedback\n")
        verdicts.update(feedback.strip().splitlines())
        assert example.completion == previous or feedback.strip() != "all good"
    assert {"length bad", "length ok", "ratio bad", "style bad"} <= set(verdicts)
