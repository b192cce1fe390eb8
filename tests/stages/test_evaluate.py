from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from magrpo.config.agents import AgentConfig
from magrpo.config.sections import EvalConfig, RolloutConfig
from magrpo.envs.writing import WritingEnv
from magrpo.errors import ConfigError
from magrpo.problems.coopcode import CoopCode
from magrpo.problems.notes import Notes
from magrpo.reports.figures import shown_quantities
from magrpo.rewards.writing import WritingReward
from magrpo.sandboxes.none import NoSandbox
from magrpo.stages.backend import Backend, Team
from magrpo.stages.evaluate import evaluate, spread_problems, write_eval_report
from magrpo.types import EvalReport, Execution, Problem, Request
from tests.fakes import LengthEnv, PassReward, ScriptedEngine, ScriptedSandbox, TurnsEnv, render

AGENTS = (AgentConfig(name="helper", role="helper", model="m"), AgentConfig(name="main", role="main", model="m"))
SPLITS = {
    "train": [Problem("never", "n")],
    "test": [Problem("a", "easy"), Problem("b", "hard")],
    "ood": [Problem("c", "easy")],
}


def run(
    engine: ScriptedEngine,
    num_turns: int,
    env: type[LengthEnv] = LengthEnv,
    stop_above: float | None = None,
    **sampling: Any,
) -> EvalReport:
    """The report of an evaluation of ``SPLITS`` under a training threshold that must not end its trajectories early."""
    backend = Backend(
        engine=engine,
        sandbox=ScriptedSandbox(lambda execution: "pass" if "good" in execution.source else "wrong"),
        render=render,
    )
    team = Team(AGENTS, env(num_turns), PassReward())
    config = EvalConfig(num_samples=4, stop_above=stop_above)
    rollout_config = RolloutConfig(group_size=8, termination_threshold=-1.0, **sampling)
    report, kept = evaluate(team, backend, SPLITS, config, rollout_config, policy_version=3)
    assert len(kept) == 3 * 2, "one of each problem and mode"
    return report


def answer(request: Request) -> str:
    prompt = bytes(request.prompt_ids).decode()
    return "good" if "easy" in prompt or "|" in prompt else "bad"


def test_no_support_is_recorded_where_nothing_trains() -> None:
    engine = ScriptedEngine(answer)
    run(engine, 1, top_p=0.9, keep_support=True)
    assert {request.sampling.top_p for request in engine.batches[0]} == {0.9, 1.0}, "as in training, and greedy"
    assert not any(request.sampling.keep_support for request in engine.batches[0])


def test_single_turn_summary_by_hand() -> None:
    engine = ScriptedEngine(answer)
    report = run(engine, 1)
    assert len(engine.batches) == 1
    assert not any(
        b"never" in bytes(request.prompt_ids) or b":n" in bytes(request.prompt_ids) for request in engine.batches[0]
    )
    sampled, greedy = report.summary["test/sampled"], report.summary["test/greedy"]
    assert sampled["return"].mean == greedy["return"].mean == 0.5
    assert sampled["pass_at_1"].mean == sampled["pass_at_3"].mean == 0.5
    assert "pass_at_5" not in sampled
    assert "pass_at_3" not in greedy
    assert sampled["return"].low <= 0.5 <= sampled["return"].high
    assert sampled["generated_tokens"].mean == pytest.approx((8 + 6) / 2)
    assert report.summary["ood/greedy"]["return"].mean == 1.0
    assert len(report.rows) == 3 * (4 + 1)


def test_an_evaluation_without_any_judged_answer_says_what_to_mend(tmp_path: Path) -> None:
    backend = Backend(engine=ScriptedEngine(answer), sandbox=ScriptedSandbox(lambda _: "test_error"), render=render)
    report = EvalReport(0, (), {"ood/greedy": {}})
    with pytest.raises(ConfigError, match=r"no answer to a held-out problem could be judged: .* sandbox\.packages"):
        write_eval_report(tmp_path, report, backend)


def test_the_last_turn_counts_and_each_trajectory_is_continued_once() -> None:
    """Whatever ends trajectories of training: the tests are no oracle of an evaluation."""
    engine = ScriptedEngine(answer)
    report = run(engine, 2)
    assert [len(batch) for batch in engine.batches] == [30, 30]
    assert report.summary["test/sampled"]["return"].mean == 1.0
    hard = next(row for row in report.rows if row.task_id == "b" and row.mode == "sampled" and row.index == 2)
    assert hard.returns == (0.0, 2.0)
    assert hard.passed == (False, True)
    assert sum(stats.tokens for stats in hard.answers.values()) == 8, "of the last turn"
    assert hard.generated_tokens == 6 + 8


def test_an_oracle_that_is_asked_for_stops_a_trajectory() -> None:
    engine = ScriptedEngine(answer)
    report = run(engine, 2, stop_above=1.5)
    assert [len(batch) for batch in engine.batches] == [30, 10]
    assert {len(row.returns) for row in report.rows if row.task_id == "a"} == {1}


def test_agents_that_take_turns() -> None:
    engine = ScriptedEngine(answer)
    report = run(engine, 2, TurnsEnv, stop_above=-1.0)
    assert [{request.agent for request in batch} for batch in engine.batches] == [{"helper"}, {"main"}]
    row = next(row for row in report.rows if row.task_id == "b" and row.mode == "greedy")
    assert row.texts == {"helper": "bad", "main": "good"}
    assert (row.returns, row.passed) == ((0.0, 2.0), (False, True))


def test_some_problems_of_many_are_spread_over_the_split() -> None:
    problems = [Problem(str(i), "") for i in range(10)]
    assert [p.task_id for p in spread_problems(problems, 3)] == ["1", "5", "8"]
    assert [p.task_id for p in spread_problems(problems, 1)] == ["5"]
    for number in (None, 10, 11):
        assert spread_problems(problems, number) == problems


@pytest.fixture(scope="module")
def compositions() -> list[Problem]:
    return CoopCode(kind="coopcode").load()["test"]


@pytest.mark.parametrize("number", [3, 6, 8, 15, 48])
def test_some_problems_are_of_all_levels_alike(compositions: list[Problem], number: int) -> None:
    chosen = spread_problems(compositions, number)
    counts = Counter(problem.tags["level"] for problem in chosen)
    assert len({problem.task_id for problem in chosen}) == number
    assert set(counts) == {"1", "2", "3"}
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [problem for problem in compositions if problem in chosen] == chosen, "in the order of the split"


@pytest.mark.parametrize("number", [10, 20])
def test_some_notes_are_of_all_topics_though_topics_alternate(number: int) -> None:
    chosen = spread_problems(Notes(kind="notes", num_test=100).load()["test"], number)
    assert len({problem.tags["topic"] for problem in chosen}) == 10


def test_texts_are_judged_without_a_sandbox_and_there_is_no_pass_at_k() -> None:
    reward = WritingReward()
    backend = Backend(
        engine=ScriptedEngine(lambda request: " ".join(["word"] * (20 if request.agent == "elaboration" else 9))),
        sandbox=NoSandbox().open(),
        render=render,
    )
    agents = [AgentConfig(name=role, role=role, model="m") for role in ("summary", "elaboration")]
    team = Team(agents, WritingEnv(kind="writing"), reward)
    report, _ = evaluate(team, backend, SPLITS, EvalConfig(num_samples=4), RolloutConfig(), policy_version=0)
    summary = report.summary["test/sampled"]
    assert summary["structure"].mean == summary["length_ratio"].mean == 1.0
    assert shown_quantities(summary, reward.maxima) == [*reward.maxima, "return", "generated_tokens"]


def test_a_reward_that_runs_programs_needs_a_sandbox() -> None:
    with pytest.raises(ConfigError, match=r"kind = 'none' runs no programs, .*run_code.* set sandbox.kind = 'pool'"):
        NoSandbox().open().run([Execution("", "f", "")])
