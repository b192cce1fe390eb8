"""Answers in every environment: who writes when, what is joined, run and priced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from magrpo.asking.answers import INCOMPLETE, NO_TESTS, SANDBOX_FAILED, Answer, AskedAgents, open_asked_agents
from magrpo.asking.problems import load_asked_problems, write_problem
from magrpo.asking.teams import AskedTeam, find_asked_team
from magrpo.errors import ConfigError
from magrpo.run.store import RunStore
from magrpo.types import PENDING, Case, ExecutionReport, Observation, PastTurn, Problem
from tests.asking.runs import CONFIGS, SMALL, make_run
from tests.fakes import LengthEnv, ScriptedSandbox

SCRIPTED = 'sandbox={kind = "tests.plugins:Sandbox"}'


@contextmanager
def open_team(
    folder: Path, config: Path, *overrides: str, untrained: bool = True
) -> Iterator[tuple[AskedTeam, AskedAgents]]:
    """Yield a team from the last checkpoint of a new run in ``folder``, and its agents, which close with the block."""
    run = make_run(config, folder / "runs", overrides)
    asked = find_asked_team(run.run_id, folder / "runs")
    with open_asked_agents(asked, with_untrained=untrained) as agents:
        yield asked, agents


def last(agents: AskedAgents, problem: Problem, seed: int | None = None) -> Answer:
    return [*agents.answer_problem(agents.trained, problem, seed)][-1]


def test_two_programmers_and_their_untrained_selves(tmp_path: Path) -> None:
    with open_team(tmp_path, CONFIGS / "embedded.toml", *SMALL) as (asked, agents):
        problem = next(iter(load_asked_problems(asked).values()))
        assert problem.tags["split"] == "test"
        assert agents.untrained is not None
        [answer] = agents.answer_problem(agents.untrained, problem)
        assert list(answer.texts) == ["helper", "main"]
        assert answer.texts["helper"] in answer.program
        assert answer.report is not None
        assert answer.report.level != "none", "the real sandbox ran it"
        assert answer.report.tests_total == 5
        assert answer.reward.parts["structure"] == 1.0
        assert not answer.unmeasured

        assert answer.texts != last(agents, problem).texts, "the trained weights are others"
        assert last(agents, problem).texts == last(agents, problem).texts
        assert len({tuple(last(agents, problem, seed).texts.values()) for seed in range(4)}) > 1

        own = write_problem(problem.prompt, [], asked.config.reward, asked.config.problems)
        [unmeasured] = agents.answer_problem(agents.untrained, own)
        assert unmeasured.unmeasured == NO_TESTS
        assert unmeasured.program == answer.program
        assert (unmeasured.reward, unmeasured.report) == (PENDING, None)
        tested = replace(own, test=problem.test)
        [measured] = agents.answer_problem(agents.untrained, tested)
        assert measured.reward == answer.reward


@pytest.mark.parametrize(
    ("config", "agents_by_turn"),
    [
        ("embedded_two_turns", [["helper", "main"]] * 2),
        ("embedded_grpo", [["solo"]]),
        ("team", [["helper1", "helper2", "main"]]),
        ("sequential", [["helper"], ["main"]]),
    ],
)
def test_programmers_of_every_environment(tmp_path: Path, config: str, agents_by_turn: list[list[str]]) -> None:
    with open_team(tmp_path, CONFIGS / f"{config}.toml", *SMALL, SCRIPTED, untrained=False) as (asked, agents):
        assert agents.untrained is None
        problem = next(iter(load_asked_problems(asked).values()))
        answers = [*agents.answer_problem(agents.trained, problem)]
        assert [[*answer.steps[-1].actions] for answer in answers] == agents_by_turn
        assert all(answer.unmeasured == INCOMPLETE for answer in answers[: -1 if config == "sequential" else 0])
        assert answers[-1].unmeasured == ""
        assert set(answers[-1].texts) == {agent for turn in agents_by_turn for agent in turn}
        if config == "embedded_two_turns":  # whose feedback needs tests
            [answer] = agents.answer_problem(agents.trained, replace(problem, test=""))
            assert answer.unmeasured == NO_TESTS
            assert set(answer.texts) == {"helper", "main"}


def test_two_authors_are_priced_without_tests(tmp_path: Path) -> None:
    small = ("problems.num_train=12", "problems.num_test=4")
    with open_team(tmp_path, CONFIGS / "writing_embedded.toml", *small) as (asked, agents):
        note = next(iter(load_asked_problems(asked).values()))
        answer = last(agents, write_problem(note.prompt, [], asked.config.reward, asked.config.problems))
        assert list(answer.texts) == ["summary", "elaboration"]
        assert (answer.unmeasured, answer.program, answer.report) == ("", "", None)
        assert set(answer.reward.parts) == set(asked.config.reward.maxima)


class SilentService(LengthEnv):
    def observe(self, problem: Problem, role: str, history: Sequence[PastTurn], agent: str) -> Observation:
        raise ConnectionError("http://127.0.0.1:1: it does not answer; start the server")


@pytest.fixture(scope="module")
def scripted(run: RunStore) -> Iterator[AskedAgents]:
    """The agents of a run whose problems, environment and reward are scripted."""
    asked = find_asked_team(run.run_id, run.path.parent)
    with open_asked_agents(asked, with_untrained=False) as agents:
        yield agents


def test_a_service_that_does_not_answer_is_the_users_to_mend(scripted: AskedAgents) -> None:
    silent = replace(scripted, trained=replace(scripted.trained, env=SilentService()))
    with pytest.raises(ConfigError, match="it does not answer; start the server"):
        last(silent, Problem("t", "p", "f", "t"))


def test_a_program_that_fails_is_an_answer_without_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing.py").write_text("def solve(problem, agents):\n    raise ValueError('out of luck')\n")
    monkeypatch.chdir(tmp_path)
    program = 'env={kind = "program", run = "failing:solve", writes = ["helper", "main"]}'
    overrides = (*SMALL, "rollout.joint_mode=aligned", program)
    with open_team(tmp_path, CONFIGS / "embedded.toml", *overrides, untrained=False) as (
        asked,
        agents,
    ):
        answer = last(agents, next(iter(load_asked_problems(asked).values())))
    assert answer.unmeasured.startswith("the program failed: ")
    assert answer.unmeasured.endswith("ValueError: out of luck")


def test_a_failed_sandbox_measures_nothing(scripted: AskedAgents) -> None:
    failed = replace(scripted, sandbox=ScriptedSandbox(lambda _: "infra_error"))
    assert last(failed, Problem("t", "p", "f", "t")).unmeasured == SANDBOX_FAILED


def test_hidden_tests_count_in_an_answer(scripted: AskedAgents) -> None:
    answer = last(scripted, Problem("t", "p", "f", "t"))
    reports = {
        "program": ExecutionReport("pass", (Case("pass"),), "none"),
        "program_hidden": ExecutionReport("wrong", (Case("pass"), Case("pass"), Case("wrong")), "none"),
    }
    [step] = answer.steps
    step = replace(step, turn=replace(step.turn, reports=reports))
    report = replace(answer, steps=(step,)).report
    assert report is not None
    assert (report.tests_passed, report.tests_total) == (3, 4)


def test_a_checkpoint_before_training_has_no_other_untrained_agents(run: RunStore) -> None:
    asked = find_asked_team(run.run_id, run.path.parent, checkpoint=0)
    with open_asked_agents(asked) as agents:
        assert agents.untrained is None
