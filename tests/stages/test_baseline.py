"""A row of the table of baselines: what is drawn, what a vote keeps, what is timed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from magrpo.config.agents import AgentConfig
from magrpo.config.run import BaselineRow
from magrpo.config.sections import EvalConfig, RolloutConfig
from magrpo.plugins import Plugin
from magrpo.stages.backend import Backend
from magrpo.stages.baseline import Behaviour, baseline, count_votes, elect_rows, time_answers
from magrpo.types import EvalReport, EvalRow, Interval, Problem, Request, TimedAnswer
from tests.fakes import ScriptedEngine, ScriptedSandbox, render
from tests.plugins import Env, Reward, TakingTurns

SPLITS = {"train": [Problem("never", "n")], "test": [Problem("a", "easy"), Problem("b", "hard")], "ood": []}


def answer(request: Request) -> str:
    prompt = bytes(request.prompt_ids).decode()
    return "good" if "easy" in prompt or request.seed % 3 == 0 else "bad"


def run(engine: ScriptedEngine, env: Plugin | None = None, **options: object) -> tuple[EvalReport, list[TimedAnswer]]:
    """The report and timed answers of a row, under thresholds for training and evaluation that must not stop it."""
    row = BaselineRow(
        name="row",
        title="a row",
        env=env or Env(kind="tests.plugins:Env", num_turns=2),
        reward=Reward(kind="tests.plugins:Reward"),
        agents=tuple(AgentConfig(name=name, role=name, model="m") for name in ("helper", "main")),
        max_new_tokens=9,
        **options,
    )
    backend = Backend(
        engine=engine,
        sandbox=ScriptedSandbox(lambda execution: "pass" if "good" in execution.source else "wrong"),
        render=render,
    )
    config, rollout_config = EvalConfig(num_samples=4, stop_above=-1.0), RolloutConfig(termination_threshold=-1.0)
    num_votes = 1 if row.votes == "none" else 3
    report = baseline(row, backend, SPLITS, config, rollout_config, num_votes)
    return report, time_answers(row, backend, SPLITS["test"], config, rollout_config, num_votes)


def test_every_trajectory_takes_all_turns_and_problems_are_timed_alone() -> None:
    engine = ScriptedEngine(answer)
    report, timed = run(engine)
    two_agents, trajectories = 2, 2 * (4 + 1)
    assert [len(batch) for batch in engine.batches[:2]] == [two_agents * trajectories] * 2
    assert [len(batch) for batch in engine.batches[2:]] == [2] * (3 * 2), "one not timed, two timed, of two turns each"
    assert {len(row.returns) for row in report.rows} == {2}
    assert {request.sampling.max_new_tokens for batch in engine.batches for request in batch} == {9}
    assert [one.task_id for one in timed] == ["a", "b"]
    assert timed[0].tokens == 2 * 2 * len("good")
    assert all(one.seconds > 0 for one in timed)


def test_a_row_that_votes_draws_more_and_keeps_one() -> None:
    engine = ScriptedEngine(answer)
    report, timed = run(engine, votes="best")
    assert len(engine.batches[0]) == 2 * 2 * 4 * 3
    assert {row.mode for row in report.rows} == {"sampled"}
    assert [row.index for row in report.rows if row.task_id == "b"] == [0, 1, 2, 3]
    assert timed[0].tokens == 3 * 2 * 2 * len("good")
    single, _ = run(ScriptedEngine(answer))
    assert report.summary["test/sampled"]["return"].mean >= single.summary["test/sampled"]["return"].mean


def test_a_row_with_an_oracle_stops_where_the_reward_is_above_it() -> None:
    engine = ScriptedEngine(lambda request: "good" if b"easy" in bytes(request.prompt_ids) else "bad")
    report, _ = run(engine, stop_above=1.9)
    assert [len(batch) for batch in engine.batches[:2]] == [2 * 2 * 5, 2 * 5], "the easy problem takes one turn"
    assert {(row.task_id, len(row.returns)) for row in report.rows} == {("a", 1), ("b", 2)}


def test_a_row_that_tries_again_starts_anew_where_the_reward_is_not_above() -> None:
    engine = ScriptedEngine(answer)
    once = Env(kind="tests.plugins:Env", num_turns=1)
    report, timed = run(engine, once, stop_above=1.9, max_tries=3)
    assert {row.mode for row in report.rows} == {"sampled"}, "greedy tries would all be the same"
    tried = [row for row in report.rows if row.task_id == "b"]
    assert {len(row.returns) for row in tried} > {1, 3}
    for row in tried:
        assert all(value <= 1.9 for value in row.returns[:-1])
        assert row.returns[-1] > 1.9 or len(row.returns) == 3
    [first, second, third] = [[r for r in batch if b"hard" in bytes(r.prompt_ids)] for batch in engine.batches[:3]]
    assert [len(second), len(third)] == [2 * sum(len(row.returns) > k for row in tried) for k in (1, 2)]
    assert {r.prompt_ids for r in [*second, *third]} == {r.prompt_ids for r in first}, "no feedback, no memory"
    seeds = [r.seed for r in [*first, *second, *third]]
    assert len(set(seeds)) == len(seeds), "each try is a new sample"
    sampled = sum(len(answer(r)) for r in [*first, *second, *third])
    assert sum(row.generated_tokens for row in tried) == sampled, "those of all tries"
    assert timed[0].tokens == 2 * len("good")


def test_a_try_is_as_many_turns_as_the_environment_has() -> None:
    engine = ScriptedEngine(lambda _: "bad")
    env = TakingTurns(kind="tests.plugins:TakingTurns")
    report, _ = run(engine, env, stop_above=-1.0 + 1e-6, max_tries=2)
    assert {len(row.returns) for row in report.rows} == {2}, "a helper alone has no price yet"
    report, _ = run(engine, env, stop_above=1.9, max_tries=2)
    assert {len(row.returns) for row in report.rows} == {4}
    batches = engine.batches[-4:]
    assert [{r.agent for r in batch} for batch in batches] == [{"helper"}, {"main"}] * 2
    assert [{bytes(r.prompt_ids) for r in batch} for batch in batches[:2]] == [
        {bytes(r.prompt_ids) for r in batch} for batch in batches[2:]
    ]


def row(index: int, value: float, text: str) -> EvalRow:
    return EvalRow("t", "test", "sampled", index, (value,), ({},), (value > 0,), {"m": text}, {}, 10 + index)


BALLOT = [row(0, 0.0, "x"), row(1, 1.0, "y"), row(2, 0.5, "x"), row(3, 1.0, "none"), row(4, 0.0, "z"), row(5, 0.2, "z")]


@pytest.mark.parametrize(
    ("behaviour", "elected"),
    [
        (lambda one: one.texts["m"], ["x", "z"]),  # two of three each
        (lambda one: None if one.texts["m"] in ("x", "z") else one.texts["m"], ["y", "none"]),
        (lambda _: None, ["x", "none"]),  # nobody has a vote: the first
        (None, ["y", "none"]),  # the oracle takes the largest return
    ],
)
def test_votes_by_hand(behaviour: Behaviour | None, elected: Sequence[str]) -> None:
    kept = elect_rows(BALLOT, 3, behaviour)
    assert [one.texts["m"] for one in kept] == elected
    assert [(one.index, one.generated_tokens) for one in kept] == [(0, 10 + 11 + 12), (1, 13 + 14 + 15)]


def test_as_many_votes_as_the_costliest_row_pays_for() -> None:
    def costs(tokens: float) -> EvalReport:
        return EvalReport(0, (), {"test/sampled": {"generated_tokens": Interval(tokens, tokens, tokens)}})

    assert count_votes({"single": costs(20.0), "naive": costs(40.0), "discussion": costs(91.0)}, "single") == 5
    assert count_votes({"single": costs(50.0), "naive": costs(20.0)}, "single") == 1
