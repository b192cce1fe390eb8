"""Which configurations give results that may be compared."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.rewards.coding import CodingReward
from magrpo.run.comparability import pass_alike, score_alike
from magrpo.types import ExecutionReport, JointReward, Problem
from pipelines.arguments import locate_config
from tests import plugins


class Generous(plugins.Reward):
    """Has the parts and fields of its base, and prices in another way."""

    def price(self, problem: Problem, texts: Mapping[str, str], reports: Mapping[str, ExecutionReport]) -> JointReward:
        return JointReward(1.0, {"tests": 1.0})


@pytest.mark.parametrize(
    ("example", "one", "other", "is_alike"),
    [
        ("arxiv", "reward.task=arxiv", "reward.task=arxiv_late", False),
        ("embedded", "reward.refuse_forgeable=true", "reward.refuse_forgeable=false", False),
        ("embedded", "reward.scale=1", "reward.scale=2", True),
        ("embedded", "reward.shift=0", "reward.shift=-1", True),
        ("embedded", "reward.local_weight=0", "reward.local_weight=0.5", True),
        ("embedded", "penalty.cut_off=0", "penalty.cut_off=0.1", False),
        ("embedded", "reward.kind=coding", "reward.kind=tests.plugins:Reward", False),
        ("embedded", "reward.kind=tests.plugins:Reward", "reward.kind=tests.plugins:WatchingReward", True),
        ("embedded", "reward.kind=tests.plugins:Reward", f"reward.kind={__name__}:Generous", False),
    ],
)
def test_returns_are_compared_if_equal_texts_earn_equal_shares(
    example: str, one: str, other: str, is_alike: bool
) -> None:
    configs = [load_config(locate_config(example), [change]) for change in (one, other)]
    assert score_alike(*configs) is is_alike
    assert score_alike(*reversed(configs)) is is_alike


def test_one_author_is_scored_like_two() -> None:
    two = load_config(locate_config("tldr_cpu"))
    author = "agents=[{name='author', role='solo', model='x'}]"
    one = load_config(locate_config("tldr_cpu"), [author, "env.kind=writing_solo", "reward.kind=writing_solo"])
    assert score_alike(one, two)


def test_programs_pass_alike_if_forgeable_tests_count_alike() -> None:
    def load(*changes: str) -> RunConfig:
        return load_config(locate_config("embedded"), changes)

    assert isinstance(load().reward, CodingReward)
    assert pass_alike(load(), load("penalty.cut_off=1", "reward.scale=2"))
    assert not pass_alike(load(), load("reward.refuse_forgeable=false"))
    assert pass_alike(load(), load_config(locate_config("embedded_grpo")))
