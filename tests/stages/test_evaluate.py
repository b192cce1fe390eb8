from __future__ import annotations

from types import SimpleNamespace

import pytest

from magrpo.config import AgentConfig, EvalConfig, RolloutConfig
from magrpo.envs.writing import WritingEnv
from magrpo.registry import ConfigError
from magrpo.report import columns_of
from magrpo.rewards.writing import WritingReward
from magrpo.sandboxes.none import NoSandbox
from magrpo.stages.evaluate import evaluate
from magrpo.stages.play import Arena
from magrpo.types import EvalReport, Execution, Problem
from tests.fakes import LengthEnv, PassReward, ScriptedEngine, ScriptedSandbox, TurnsEnv, render

AGENTS = (AgentConfig(name="helper", role="helper", model="m"), AgentConfig(name="main", role="main", model="m"))
SPLITS = {
    "train": [Problem("never", "n")],
    "test": [Problem("a", "easy"), Problem("b", "hard")],
    "ood": [Problem("c", "easy")],
}


def run(
    engine: ScriptedEngine, num_turns: int, env: type[LengthEnv] = LengthEnv, **rollout_options: float
) -> EvalReport:
    arena = Arena(
        engine=engine,
        sandbox=ScriptedSandbox(lambda execution: "pass" if "good" in execution.source else "wrong"),
        render=render,
        cache={},
    )
    game = SimpleNamespace(agents=AGENTS, env=env(num_turns), reward=PassReward())
    report, kept = evaluate(
        arena, game, SPLITS, EvalConfig(num_samples=4), RolloutConfig(group_size=8, **rollout_options), policy_version=3
    )
    assert len(kept) == 3 * 2, "one of each problem and mode"
    return report


def answer(request) -> str:
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
    assert sampled["response_tokens"].mean == pytest.approx((8 + 6) / 2)
    assert report.summary["ood/greedy"]["return"].mean == 1.0
    assert len(report.rows) == 3 * (4 + 1)


def test_the_last_turn_counts_and_each_trajectory_is_continued_once() -> None:
    engine = ScriptedEngine(answer)
    report = run(engine, 2)
    assert [len(batch) for batch in engine.batches] == [30, 30]
    assert report.summary["test/sampled"]["return"].mean == 1.0
    hard = next(row for row in report.rows if row.task_id == "b" and row.mode == "sampled" and row.index == 2)
    assert hard.returns == (0.0, 2.0)
    assert hard.passed == (False, True)
    assert (hard.response_tokens, hard.generated_tokens) == (8, 6 + 8)


def test_a_trajectory_above_the_threshold_stops() -> None:
    engine = ScriptedEngine(answer)
    report = run(engine, 2, termination_threshold=1.5)
    assert [len(batch) for batch in engine.batches] == [30, 10]
    assert {len(row.returns) for row in report.rows if row.task_id == "a"} == {1}


def test_agents_that_take_turns() -> None:
    engine = ScriptedEngine(answer)
    report = run(engine, 2, TurnsEnv, termination_threshold=-1.0)
    assert [{request.agent for request in batch} for batch in engine.batches] == [{"helper"}, {"main"}]
    row = next(row for row in report.rows if row.task_id == "b" and row.mode == "greedy")
    assert row.texts == {"helper": "bad", "main": "good"}
    assert (row.returns, row.passed) == ((0.0, 2.0), (False, True))


def test_texts_are_judged_without_a_sandbox_and_there_is_no_pass_at_k() -> None:
    reward = WritingReward()
    arena = Arena(
        engine=ScriptedEngine(lambda request: " ".join(["word"] * (20 if request.agent == "elaboration" else 9))),
        sandbox=NoSandbox().open(),
        render=render,
        cache={},
    )
    agents = [AgentConfig(name=role, role=role, model="m") for role in ("summary", "elaboration")]
    game = SimpleNamespace(agents=agents, env=WritingEnv(kind="writing"), reward=reward)
    report, _ = evaluate(arena, game, SPLITS, EvalConfig(num_samples=4), RolloutConfig(), policy_version=0)
    summary = report.summary["test/sampled"]
    assert summary["structure"].mean == summary["length_ratio"].mean == 1.0
    assert columns_of(summary, reward.maxima) == [*reward.maxima, "return", "response_tokens"]


def test_a_reward_that_runs_programs_needs_a_sandbox() -> None:
    with pytest.raises(ConfigError, match=r"kind 'none' runs no programs .* choose 'pool'"):
        NoSandbox().open().run([Execution("", "f", "")])
