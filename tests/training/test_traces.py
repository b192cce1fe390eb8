"""Which trajectories of a run become traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.run.files import read_evaluation
from magrpo.training.recorder import first_trajectory, spread_evenly
from magrpo.types import Action, JointReward, Observation, Problem, Prompt, RolloutGroup, ScoredTurn
from tests.pipelines.micro import run_locally, write_config


def group(task_id: str, path: tuple[int, ...], count: int = 2) -> RolloutGroup[ScoredTurn]:
    """The node of a problem at ``path`` with ``count`` completions of one agent, whose rewards are their indices."""
    texts = [f"{task_id} {path} {i}" for i in range(count)]
    return RolloutGroup(
        Problem(task_id, "…"),
        path,
        (),
        {"one": Prompt(Observation(()), ())},
        {"one": tuple(Action("one", text, (), (), "stop", 1) for text in texts)},
        tuple(ScoredTurn({"one": i}, JointReward(i, {}), {}) for i in range(count)),
    )


def test_a_trajectory_follows_what_was_continued() -> None:
    levels = [
        [group("a", ()), group("b", ())],
        [group("b", (0,)), group("a", (1,))],
        [group("a", (0, 0)), group("a", (1, 1))],
    ]
    long, short = (first_trajectory(root, levels) for root in levels[0])
    assert (long.path, short.path) == ((1, 1, 0), (0, 0))
    assert [step.actions["one"].text for step in long.steps] == ["a () 1", "a (1,) 1", "a (1, 1) 0"]
    assert [step.turn.reward.total for step in long.steps] == [1, 1, 0]


@pytest.mark.parametrize(
    ("items", "count", "taken"), [(10, 3, [0, 3, 6]), (2, 3, [0, 1]), (0, 3, []), (7, 1, [0]), (5, 5, [0, 1, 2, 3, 4])]
)
def test_a_sample_is_spread_over_all(items: int, count: int, taken: list[int]) -> None:
    assert list(spread_evenly(range(items), count)) == taken


def test_evaluations_leave_traces_of_held_out_and_of_training_problems(tmp_path: Path) -> None:
    settings = ["tracking.traces=2", "eval.every=2", "env.num_turns=2", "rollout.tree=full"]
    config = load_config(write_config(tmp_path, iterations=3), settings)
    store, tracker, outcome = run_locally(config)
    expected = [
        (0, "test"),
        (0, "test"),
        (2, "train"),
        (2, "train"),
        (2, "test"),
        (2, "test"),
        (3, "train"),
        (3, "train"),
        (3, "test"),
        (3, "test"),
    ]
    assert [(step, trajectory.split) for step, trajectory in tracker.traces] == expected
    report = read_evaluation(store.folder(outcome.evaluations[3]))
    rows = {row.task_id: row for row in report.rows if (row.split, row.mode, row.index) == ("test", "sampled", 0)}
    for step, trajectory in tracker.traces[-2:]:
        row = rows[trajectory.problem.task_id]
        assert tuple(taken.turn.reward.total for taken in trajectory.steps) == row.returns
        assert {agent: action.text for agent, action in trajectory.steps[-1].actions.items()} == row.texts
        versions = {action.policy_version for taken in trajectory.steps for action in taken.actions.values()}
        assert versions == {step}
    assert len({trajectory.problem.task_id for _, trajectory in tracker.traces[-2:]}) == 2
