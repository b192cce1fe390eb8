"""Which trajectories of a run become traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.run.files import read_evaluation
from magrpo.training.recorder import spread_evenly
from tests.pipelines.micro import run_locally, write_config


@pytest.mark.parametrize(
    ("items", "count", "taken"), [(10, 3, [0, 3, 6]), (2, 3, [0, 1]), (0, 3, []), (7, 1, [0]), (5, 5, [0, 1, 2, 3, 4])]
)
def test_a_sample_is_spread_over_all(items: int, count: int, taken: list[int]) -> None:
    assert list(spread_evenly(range(items), count)) == taken


def test_evaluations_leave_traces_of_held_out_problems(tmp_path: Path) -> None:
    settings = ["tracking.traces=2", "eval.every=2", "env.num_turns=2", "rollout.tree=full"]
    config = load_config(write_config(tmp_path, iterations=3), settings)
    store, tracker, outcome = run_locally(config)
    assert [(step, trajectory.split) for step, trajectory in tracker.traces] == [
        (step, "test") for step in (0, 0, 2, 2, 3, 3)
    ]
    report = read_evaluation(store.folder(outcome.evaluations[3]))
    rows = {row.task_id: row for row in report.rows if (row.split, row.mode, row.index) == ("test", "sampled", 0)}
    for step, trajectory in tracker.traces[-2:]:
        row = rows[trajectory.problem.task_id]
        assert tuple(taken.turn.reward.total for taken in trajectory.steps) == row.returns
        assert {agent: action.text for agent, action in trajectory.steps[-1].actions.items()} == row.texts
        versions = {action.policy_version for taken in trajectory.steps for action in taken.actions.values()}
        assert versions == {step}
    assert len({trajectory.problem.task_id for _, trajectory in tracker.traces[-2:]}) == 2
