"""Rewards that programs return: what is accepted, and what is refused with which words."""

from __future__ import annotations

import math
from typing import Any

import pytest

from magrpo.interfaces import Reward
from magrpo.rewards.returned import ReturnedReward
from magrpo.types import JointReward, Problem

AGENTS = ("planner", "coder")
PARTS = ReturnedReward(maxima={"tests": 2.0, "style": 0.5})


@pytest.mark.parametrize(
    ("result", "total", "local"),
    [
        (0.25, 0.25, {}),
        (1, 1.0, {}),
        (True, 1.0, {}),
        (-3.5, -3.5, {}),
        ({"reward": 0.5}, 0.5, {}),
        ({"reward": 0.5, "local": {"coder": -1}}, 0.5, {"coder": -1.0}),
        ({"parts": 0.5, "local": {}}, 0.5, {}),
        ({"parts": {"outcome": 0.5}}, 0.5, {}),
        ({"outcome": 0.5}, 0.5, {}),
    ],
)
def test_one_part(result: Any, total: float, local: dict[str, float]) -> None:
    reward = ReturnedReward()
    assert reward.read_returned(result, AGENTS) == JointReward(total, {"outcome": total}, local)
    assert reward.fraction(total) == total


@pytest.mark.parametrize(
    "result", [{"tests": 1, "style": 0.5}, {"parts": {"style": 0.5, "tests": 1.0}, "local": {"planner": 2.0}}]
)
def test_several_parts(result: Any) -> None:
    read = PARTS.read_returned(result, AGENTS)
    assert (read.total, read.parts) == (1.5, {"tests": 1.0, "style": 0.5})
    assert [*read.parts] == ["tests", "style"], "in the order of the configuration"
    assert PARTS.fraction(read.total) == 0.6


@pytest.mark.parametrize(
    ("reward", "result", "message"),
    [
        (ReturnedReward(), None, r"returned None for 'outcome'; it must be a finite number of at most 1 \(reward.max"),
        (ReturnedReward(), "0.5", "returned '0.5' for 'outcome'"),
        (ReturnedReward(), [1.0], r"returned \[1.0\] for 'outcome'"),
        (ReturnedReward(), math.nan, "returned nan for 'outcome'"),
        (ReturnedReward(), -math.inf, "returned -inf for 'outcome'"),
        (ReturnedReward(), 10**400, "for 'outcome'; it must be a finite number"),
        (ReturnedReward(), -1e300, r"returned -1e\+300 for 'outcome'; .* \(reward.maxima\) and at least -1e\+15"),
        (ReturnedReward(), {"reward": 1.0, "local": {"coder": 1e300}}, r"finite numbers of at most 1e\+15"),
        (ReturnedReward(), 1.01, "returned 1.01 for 'outcome'; it must be a finite number of at most 1"),
        (ReturnedReward(), {}, r"returned the parts \[\]; reward.maxima has outcome"),
        (ReturnedReward(), {"tests": 1.0}, r"returned the parts \['tests'\]; reward.maxima has outcome"),
        (ReturnedReward(), {"reward": 1.0, "locals": {}}, "a dict with locals; its keys are reward, parts, local"),
        (ReturnedReward(), {"reward": 1.0, "parts": {"outcome": 0.5}}, "both reward and parts; return one of them"),
        (ReturnedReward(), {"local": {}}, "returned None for 'outcome'"),
        (ReturnedReward(), {"reward": 1.0, "local": None}, "returned local = None; it must map agents to finite num"),
        (ReturnedReward(), {"reward": 1.0, "local": {"nobody": 1.0}}, "it must map agents to finite numbers"),
        (ReturnedReward(), {"reward": 1.0, "local": {"coder": "much"}}, "it must map agents to finite numbers"),
        (ReturnedReward(), {"reward": 1.0, "local": {"coder": 10**400}}, "it must map agents to finite numbers"),
        (PARTS, 1.0, "returned 1.0; reward.maxima has several parts: tests, style"),
        (PARTS, {"tests": 1.0}, r"returned the parts \['tests'\]; reward.maxima has tests, style"),
        (PARTS, {"tests": 1.0, "style": 0.6}, "returned 0.6 for 'style'; it must be a finite number of at most 0.5"),
    ],
)
def test_refusals(reward: ReturnedReward, result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward.read_returned(result, AGENTS)


def test_it_prices_nothing_itself() -> None:
    reward: Reward = ReturnedReward()
    assert reward.executions(Problem("task", ""), {}, {}) == {}
    assert reward.passed({}) is None
    with pytest.raises(TypeError):
        reward.price(Problem("task", ""), {}, {})
