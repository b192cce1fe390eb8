from __future__ import annotations

from magrpo.reports.budget import Budget, build_ledger
from magrpo.reports.figures import format_budget
from magrpo.text import format_count


def test_a_ledger_by_hand() -> None:
    metrics = [
        (2, "update", {"time/update_s": 1.0}),
        (1, "rollout.0", {"rollout/tokens": 10.0, "rollout/joint_actions": 4.0, "time/rollout_s": 0.5}),
        (1, "rollout.1", {"rollout/tokens": 30.0, "rollout/joint_actions": 16.0, "time/rollout_s": 0.25}),
        (1, "score.0", {"sandbox/executions": 3.0, "time/score_s": 0.25}),
        (2, "rollout.0", {"sandbox/probe_executions": 2.0}),
        (1, "score.1", {"sandbox/executions": 9.0}),
        (1, "credit", {"time/credit_s": 1.0}),
        (1, "update", {"time/update_s": 2.0}),
        (2, "rollout.0", {"rollout/tokens": 5.0, "rollout/joint_actions": 4.0}),
        (0, "evaluate", {"eval/sandbox/executions": 99.0, "time/evaluate_s": 9.0}),
        (0, "update", {"time/update_s": 9.0}),  # the untrained weights
        (1, "evaluate", {"time/evaluate_s": 9.0}),
        (3, "rollout.0", {"rollout/tokens": 7.0}),  # an iteration under way
    ]
    budgets = build_ledger(metrics)
    assert budgets == [
        Budget(),
        Budget(1, tokens=40, joint_actions=20, executions=12, updates=1, seconds=4.0),
        Budget(2, tokens=45, joint_actions=24, executions=14, updates=2, seconds=5.0),
    ]
    assert build_ledger([]) == [Budget()]


def test_one_of_a_thing_is_singular() -> None:
    budget = Budget(1, tokens=1, joint_actions=1, executions=1, updates=1)
    assert format_budget(budget) == "1 token generated, 1 answer set scored (joint actions), 1 program run, 1 update"
    budget = Budget(1, tokens=1234, joint_actions=2, executions=0, updates=2)
    assert format_budget(budget) == "1,234 tokens generated, 2 answer sets scored (joint actions), 2 updates"
    assert [format_count(number, "held-out problems") for number in (1, 2)] == [
        "1 held-out problem",
        "2 held-out problems",
    ]
