from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from magrpo.checks.rewards import check_maxima, compute_price, judge_passed, request_executions
from magrpo.config.run import load_config
from magrpo.errors import ConfigError, PluginFailed
from magrpo.rewards.coding import CodingReward
from magrpo.types import Execution, ExecutionReport, JointReward, Problem
from tests.plugins import CONFIG

PROBLEM = Problem("add/2", "p", "f", "t")
TEXTS = {"helper": "h", "main": "m"}
REPORT = ExecutionReport("pass", (), "none")


@dataclass
class Brief:
    """A reward as a user might write it: ``price``, ``executions`` and ``passed`` return what they are given."""

    returned: Any
    maxima: Any = None

    def __post_init__(self) -> None:
        self.maxima = {"tests": 1.0, "brevity": 0.5} if self.maxima is None else self.maxima

    def fraction(self, total: float) -> float:
        return total / 1.5

    def executions(self, *_: object) -> Any:
        return self.returned

    def price(self, *_: object) -> Any:
        return self.returned

    def passed(self, _: object) -> Any:
        return self.returned


async def promise() -> JointReward:
    return JointReward(0.0, {"tests": 0.0, "brevity": 0.0})


def price(reward: Any) -> JointReward:
    return compute_price(reward, PROBLEM, TEXTS, {})


def full(**parts: Any) -> dict[str, Any]:
    return {"tests": 0.0, "brevity": 0.0, **parts}


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        (None, "returned None for problem 'add/2'; it must return a JointReward"),
        (0.5, "returned 0.5 for problem 'add/2'; it must return a JointReward"),
        ((1.0, {}), "returned (1.0, {}) for problem 'add/2'; it must return a JointReward"),
        (JointReward(None, full()), "returned a JointReward with total = None for problem 'add/2'; "),
        (JointReward("1", full()), "returned a JointReward with total = '1' for problem"),
        (JointReward(1.0, None), "returned a JointReward with parts = None for problem"),
        (JointReward(1.0, full(tests="1")), "returned a JointReward with parts['tests'] = '1' for problem"),
        (JointReward(1.0, full(tests=np.ones(3))), "returned a JointReward with parts['tests'] = array("),
        (JointReward(0.0, full(), None), "returned a JointReward with local = None for problem 'add/2'"),
        (JointReward(0.0, full(), {"ada": 1.0}), "gave 'ada' a local reward for problem 'add/2'; "),
        (
            JointReward(1.0, full(test=1.0)),
            "gave the part 'test' for problem 'add/2'; maxima has no such part: did you mean 'tests'?",
        ),
        (JointReward(1.0, {"tests": 1.0}), "left out 'brevity' for problem 'add/2'; it must give every part in maxima"),
        (JointReward(1.0, {}), "left out 'tests', 'brevity' for problem 'add/2'"),
        (JointReward(1.5, full(tests=1.5)), "gave the part 'tests' = 1.5 for problem 'add/2'; its maximum in maxima"),
        (JointReward(9.0, full(tests=1.0)), "gave the total 9, 600% of the maximum for problem 'add/2'; fraction("),
    ],
)
def test_an_unusable_price_is_one_line_with_class_method_and_problem(returned: object, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        price(Brief(returned))
    [line] = str(raised.value).splitlines()
    assert line.startswith(f"reward tests.checks.test_rewards:Brief: price() {fault}")


def test_a_coroutine_is_named_and_closed() -> None:
    """A coroutine that is left open would be a warning, which fails a test."""
    with pytest.raises(ConfigError, match=r"price\(\) returned a coroutine .*: write def instead of async def"):
        price(Brief(promise()))


def test_numbers_of_numpy_and_torch_become_floats() -> None:
    given = JointReward(np.float32(1.5), full(tests=torch.tensor(1.0), brevity=True and 0.5), {"main": 1})
    priced = price(Brief(given))
    assert priced == JointReward(1.5, {"tests": 1.0, "brevity": 0.5}, {"main": 1.0})
    assert {type(value) for value in (priced.total, *priced.parts.values(), *priced.local.values())} == {float}


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (0.25, -3.0), (100.0, 7.0), (1e-3, 1e6), (1.0, 1e12)])
def test_the_largest_total_follows_scale_and_shift(scale: float, shift: float) -> None:
    """A total is allowed up to ``scale * sum(maxima) + shift``, and a rounding error above."""

    class Scaled(Brief):
        def fraction(self, total: float) -> float:
            return (total - shift) / (scale * 1.5)

    parts = {"tests": 1.0, "brevity": 0.5}
    largest = scale * 1.5 + shift
    for total in (largest, math.nextafter(largest, math.inf), shift - 5 * scale):
        assert price(Scaled(JointReward(total, parts))).total == total
    with pytest.raises(ConfigError, match="of the maximum for problem 'add/2'"):
        price(Scaled(JointReward(largest + 0.01 * scale + 8 * math.ulp(largest), parts)))


def test_a_sum_in_float32_may_exceed_the_maximum_by_its_rounding() -> None:
    total = float(np.float32(1.5) + np.float32(2e-7))
    assert total > 1.5
    assert price(Brief(JointReward(total, full(tests=1.0 + 1e-7, brevity=0.5)))).total == total


@pytest.mark.parametrize(("value", "said"), [(None, "None"), ("half", "'half'")])
def test_a_fraction_must_be_a_number(value: object, said: str) -> None:
    class Fractionless(Brief):
        def fraction(self, total: float) -> Any:
            return value

    with pytest.raises(ConfigError, match=rf"Fractionless: fraction\(\) returned {said} for problem 'add/2'"):
        price(Fractionless(JointReward(1.0, full(tests=1.0))))


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        (None, "returned None for problem"),
        ([Execution("s", "f", "t")], "returned [Execution("),
        ({"program": "def f(): ..."}, "returned {'program': 'def f(): ...'} for problem 'add/2'; it must return a map"),
        ({"program": Execution(None, "f", "t")}, "returned an Execution whose source is None for problem"),
        (
            {"first": Execution("s", "f", "t")},
            "asked for 'first' again for problem 'add/2'; return only programs without a report",
        ),
    ],
)
def test_unusable_executions_are_refused(returned: object, fault: str) -> None:
    """A reward that asks for a report again would be asked for ever."""
    with pytest.raises(ConfigError, match=re.escape(f"reward tests.checks.test_rewards:Brief: executions() {fault}")):
        request_executions(Brief(returned), PROBLEM, TEXTS, {"first": REPORT})


def test_passed_is_true_false_or_none() -> None:
    assert [judge_passed(Brief(value), "add/2", {}) for value in (True, False, None)] == [True, False, None]
    with pytest.raises(ConfigError, match=r"Brief: passed\(\) returned 1 for problem 'add/2'; it must return True"):
        judge_passed(Brief(1), "add/2", {})


@pytest.mark.parametrize(
    ("maxima", "fault"),
    [
        ([1.0], "maxima is [1.0]; it must be a mapping"),
        ({}, "maxima is {}; it must be a mapping"),
        ({1: 1.0}, "maxima is {1: 1.0}; it must be a mapping"),
        ({"tests": 0.0}, "maxima gives the part 'tests' the maximum 0.0; it must be a finite number above 0"),
        ({"tests": "1"}, "maxima gives the part 'tests' the maximum '1'; "),
        ({"tests": math.inf}, "maxima gives the part 'tests' the maximum inf; "),
        *(
            ({name: 1.0}, f"maxima names a part {name!r}; metrics of magrpo have that name")
            for name in ("return", "Joint")
        ),
        ({"pass_at_1": 1.0}, "maxima names a part 'pass_at_1'; metrics of magrpo have that name"),
        ({"joint_turn_2": 1.0}, "maxima names a part 'joint_turn_2'; metrics of magrpo have that name"),
        ({"tests_constant": 1.0}, "maxima names a part 'tests_constant'; metrics of magrpo have that name"),
        *(
            ({name: 1.0}, f"maxima names a part: {name!r} cannot be used: a name consists of letters, digits, '_'")
            for name in ("mean@1", "100%", "Länge", "a/b", "helper/cut_off", "", " x", "..", "x" * 101)
        ),
    ],
)
def test_maxima_and_names_of_parts_are_checked(maxima: Any, fault: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_maxima(Brief(None, maxima))
    assert str(raised.value).startswith(f"tests.checks.test_rewards:Brief: {fault}")


def test_names_that_mlflow_accepts_may_be_used() -> None:
    reward = Brief(None, dict.fromkeys(("tests", "Tests 2", "f1.macro", "a-b_c", "returns", "joint2"), 1))
    assert check_maxima(reward) is reward
    assert check_maxima(CodingReward()).maxima == CodingReward.part_maxima


def test_names_are_refused_when_a_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG.replace("tests.plugins:Reward", "tests.checks.plugins:NamedReturn"))
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    said = "reward: tests.checks.plugins:NamedReturn: maxima names a part 'return'; metrics of magrpo have that name"
    assert str(raised.value) == f"{path}: {said}: choose another one"


class Broken(Brief):
    """Contains a mistake."""

    def price(self, *_: object) -> None:
        dict[str, int]()["missing"]

    executions = price


class Unreachable(Brief):
    """Asks a judge that does not answer."""

    def price(self, *_: object) -> None:
        raise ConnectionError("the judge at example.org does not answer")

    executions = price


@pytest.mark.parametrize("method", ["price", "executions"])
def test_an_exception_inside_is_one_block_that_names_the_problem(method: str) -> None:
    call: Callable[..., object] = compute_price if method == "price" else request_executions
    with pytest.raises(PluginFailed) as raised:
        call(Broken(None), PROBLEM, TEXTS, {})
    first, *frames = str(raised.value).splitlines()
    name = "reward tests.checks.test_rewards:{}: {}()"
    assert first == f"{name.format('Broken', method)} failed for problem 'add/2': KeyError: 'missing'"
    assert frames[0].startswith(f'  File "{__file__}", line ')
    assert frames[0].endswith("in price")
    assert 'dict[str, int]()["missing"]' in frames[1]
    assert "magrpo" not in "\n".join(frames).replace(__file__, ""), "none of the frames of this project"
    assert isinstance(raised.value.__cause__, KeyError)

    with pytest.raises(ConnectionError) as unavailable:  # another attempt may succeed
        call(Unreachable(None), PROBLEM, TEXTS, {})
    failed = "failed for problem 'add/2': the judge at example.org does not answer"
    assert str(unavailable.value) == f"{name.format('Unreachable', method)} {failed}"
