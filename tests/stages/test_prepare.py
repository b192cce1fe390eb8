from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.config.agents import AgentConfig
from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.process.environment import shorten_path
from magrpo.run.files import split_file
from magrpo.run.store import RunStore, write_records
from magrpo.stages.backend import Team
from magrpo.stages.prepare import Room, draw_problems, list_trained_before, prepare
from magrpo.types import Observation, Problem
from tests.fakes import LengthEnv, PassReward, render
from tests.pipelines.micro import write_config


class Listed:
    def __init__(self, **splits: list[str]) -> None:
        self.splits = splits

    def load(self) -> dict[str, list[Problem]]:
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
def test_what_a_run_cannot_use_is_refused(splits: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(Listed(**splits), 2)


class Bytes:
    """A lineup whose tokens are bytes."""

    def max_length(self, agent: str) -> int:
        return {"h": 30, "m": 40}[agent]

    def render(self, agent: str, observation: Observation) -> tuple[int, ...]:
        assert len(observation.messages[0].content) < 10**5, "too long to be worth counting"
        return render(agent, observation)


AGENTS = [AgentConfig(name=name, role=role, model="m") for name, role in (("h", "helper"), ("m", "main"))]
ROOM = Room(Bytes(), [(Team(AGENTS, LengthEnv(), PassReward()), 10)])


class Sized:
    """Problems named after the length of their prompts, before which an environment writes the role."""

    def __init__(self, train: list[int], test: list[int]) -> None:
        self.sizes = {"train": train, "test": test}

    def load(self) -> dict[str, list[Problem]]:
        return {split: [Problem(f"of {n}", "x" * n) for n in sizes] for split, sizes in self.sizes.items()}


def test_problems_that_agents_were_trained_on_are_found_among_the_held_out_ones(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    earlier = RunStore.create(config, "earlier")

    def write(folder: Path) -> dict[str, float]:
        write_records(folder / split_file("train"), [Problem("a", "one  text"), Problem("b", "another")])
        return {}

    earlier.commit("00000/prepare", "key", write)
    weights = earlier.path / "agents" / "helper"
    weights.mkdir(parents=True)
    agents = tuple(agent.model_copy(update={"start_from": weights}) for agent in config.agents)
    config = config.model_copy(update={"agents": agents})
    train, asked, new = Problem("c", "another"), Problem("d", "one text"), Problem("e", "new")
    assert list_trained_before(config, {"train": [train], "test": [asked, new]}) == {shorten_path(earlier.path): ["d"]}
    assert list_trained_before(config, {"train": [train], "test": [new]}) == {}
    (earlier.stage_folder("00000/prepare") / split_file("train")).write_bytes(b"damaged")
    assert list_trained_before(config, {"train": [train], "test": [asked, new]}) == {}


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (
            [1, 13, 14],
            [2],
            r"'of 14': the prompt of agent 'h' has 21 tokens, which do not fit the context window of 30",
        ),
        ([1], [14, 200], r"'of 14': .* a completion of 10 \(and 1 more problems do not fit\); set rollout.leave"),
        ([1, 10**6], [2], r"'of 1000000': the prompt of agent 'h' has 1,000,007 bytes"),
    ],
)
def test_a_problem_that_does_not_fit_is_named_before_training(train: list[int], test: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(Sized(train, test), 1, ROOM)
    assert "\n" not in str(caught.value)


def test_problems_that_do_not_fit_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    splits = prepare(Sized([1, 13, 14, 10**6], [2, 50]), 2, ROOM, leave_out_long=True)
    assert {split: [p.task_id for p in members] for split, members in splits.items()} == {
        "train": ["of 1", "of 13"],
        "test": ["of 2"],
    }
    assert "skipped 3 problems: 'of 14': the prompt of agent 'h' has 21 tokens" in caplog.text
    with pytest.raises(ConfigError, match=r"rollout\.problems_per_iteration = 3, but the train split has only 2"):
        prepare(Sized([1, 13, 14, 10**6], [2, 50]), 3, ROOM, leave_out_long=True)
    with pytest.raises(
        ConfigError, match=r"'train' is empty without the problems that .*; lower rollout\.max_new_tokens"
    ):
        prepare(Sized([14, 50], [2]), 1, ROOM, leave_out_long=True)


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
