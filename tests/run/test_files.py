"""Files of stages: scores with and without the completions they belong to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from magrpo.errors import ConfigError
from magrpo.run.files import GROUPS, SCORES, read_scored, write_scores
from magrpo.run.store import write_records
from magrpo.types import Action, JointReward, Observation, Problem, Prompt, RolloutGroup, ScoredTurn, Turn

GROUP = RolloutGroup(
    Problem("t/0", "p"),
    (1,),
    (),
    {"a": Prompt(Observation(()), (1, 2))},
    {"a": (Action("a", "x", (5,), (-0.25,), "stop", 7), Action("a", "y", (6,), (-0.5,), "stop", 7))},
    (Turn({"a": 1}), Turn({"a": 0})),
)
SCORED = GROUP.with_scores(
    (ScoredTurn({"a": 1}, JointReward(1.0, {"tests": 1.0}), {}), ScoredTurn({"a": 0}, JointReward(0.0, {}), {}, True))
)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    rollout, score = tmp_path / "rollout.1", tmp_path / "score.1"
    for folder in (rollout, score):
        folder.mkdir()
    write_records(rollout / GROUPS, [GROUP])
    return rollout, score


def test_scores_are_read_with_the_completions_of_their_rollout(folders: tuple[Path, Path]) -> None:
    rollout, score = folders
    write_scores(score, [SCORED])
    assert read_scored(score) == [SCORED]
    assert (score / SCORES).stat().st_size < (rollout / GROUPS).stat().st_size


@pytest.mark.parametrize("change", [{"path": (2,)}, {"turns": GROUP.turns[:1]}, {"turns": GROUP.turns[::-1]}])
def test_scores_of_another_rollout_are_refused(folders: tuple[Path, Path], change: dict[str, tuple[object]]) -> None:
    rollout, score = folders
    write_scores(score, [SCORED])
    write_records(rollout / GROUPS, [replace(GROUP, **change)])
    with pytest.raises(ConfigError, match=r"score\.1: .*rollout\.1 was sampled again"):
        read_scored(score)
