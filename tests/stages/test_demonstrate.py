from __future__ import annotations

from collections import Counter

import pytest

from magrpo.envs.coding import CodingEnv
from magrpo.envs.diagnosis import BARE_LINES
from magrpo.problems.conventions import WEIGHTS, write
from magrpo.problems.coopcode import CoopCode, composition_of
from magrpo.rewards.coding import CodingReward
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.stages.demonstrate import ROLES, Example, all_texts, first_turns, revisions
from magrpo.types import Problem
from tests.fakes import ScriptedSandbox

ENV = CodingEnv(prompt="bare", num_turns=2)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return CoopCode(kind="coopcode", num_train=48, num_test=3, num_ood=3).load()["train"]


def conventions_of(problem: Problem, role: str, text: str) -> list[str]:
    known = next(r for r in ROLES if r == role)
    return [name for name in WEIGHTS[known] if write(composition_of(problem), known, name) == text]


def test_first_turns_follow_a_convention_of_each_role(problems: list[Problem]) -> None:
    examples = first_turns(problems, ENV, seed=0)
    assert len(examples) == 2 * len(problems)
    for i, example in enumerate(examples):
        problem, role = problems[i // 2], ROLES[i % 2]
        assert example.prompt == f"# {role}\n{problem.prompt}\n"
        assert conventions_of(problem, role, example.completion)


def test_conventions_are_drawn_in_their_shares_and_independently(problems: list[Problem]) -> None:
    pairs: Counter[tuple[str, str]] = Counter()
    for seed in range(40):
        examples = first_turns(problems, ENV, seed)
        for problem, helper, main in zip(problems, examples[::2], examples[1::2], strict=True):
            pairs[
                conventions_of(problem, "helper", helper.completion)[0],
                conventions_of(problem, "main", main.completion)[0],
            ] += 1
    total = sum(pairs.values())
    for helper, share in WEIGHTS["helper"].items():
        for main, other in WEIGHTS["main"].items():
            assert pairs[helper, main] / total == pytest.approx(share * other, abs=0.025)


def test_examples_follow_from_the_seed(problems: list[Problem]) -> None:
    assert first_turns(problems, ENV, 1) == first_turns(problems, ENV, 1) != first_turns(problems, ENV, 2)


def test_all_texts_hold_every_first_turn(problems: list[Problem]) -> None:
    texts = set(all_texts(problems, ENV))
    assert {text for example in first_turns(problems, ENV, 3) for text in (example.prompt, example.completion)} <= texts


def test_revisions_answer_the_feedback_that_the_first_turn_really_gets(problems: list[Problem]) -> None:
    sandbox = PoolSandbox(test_s=0.5, total_s=1.0).open()
    try:
        examples = revisions(problems, ENV, CodingReward(), sandbox, seed=0)
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
    examples: list[Example] = revisions(problems, ENV, CodingReward(), ScriptedSandbox(lambda _: "infra_error"), 0)
    assert all("\n# feedback\n" in example.prompt for example in examples)
    assert len(examples) < 2 * len(problems)
