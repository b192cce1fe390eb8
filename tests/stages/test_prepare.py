from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.plugins import ConfigError
from magrpo.stages.prepare import draw_problems, prepare
from magrpo.types import Problem


class Listed:
    def __init__(self, **splits: list[str]) -> None:
        self.splits = splits

    def load(self):
        return {split: [Problem(task_id, "p") for task_id in ids] for split, ids in self.splits.items()}


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": ["a"], "test": []}, "'test' is empty"),
        ({"train": ["a"], "test": ["b"]}, "problems_per_iteration"),
        ({"train": ["a", "b"], "test": ["b"]}, "'b' is both in train and in test"),
        ({"train": ["a", "a"], "test": ["b"]}, "'a' is both in train and in train"),
    ],
)
def test_what_a_run_cannot_use_is_refused(splits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(Listed(**splits), 2)


@given(size=st.integers(1, 30), count=st.integers(1, 30), seed=st.integers(0, 5))
def test_an_epoch_uses_each_problem_at_most_once(size: int, count: int, seed: int) -> None:
    count = min(count, size)
    problems = [Problem(str(i), "p") for i in range(size)]
    per_epoch = size // count
    for epoch in range(2):
        drawn = [
            p.task_id for i in range(per_epoch) for p in draw_problems(problems, epoch * per_epoch + i + 1, count, seed)
        ]
        assert len(drawn) == len(set(drawn)) == per_epoch * count
    assert draw_problems(problems, 3, count, seed) == draw_problems(problems, 3, count, seed)
