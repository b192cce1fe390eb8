"""Advantage estimators: worked out by hand, then their properties for every name in the table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.algo.advantages import ESTIMATORS, group_advantages
from magrpo.algo.returns import exact_mean

returns = st.lists(st.floats(-10, 10, allow_nan=False, width=32), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("magrpo", [-2.0, 0.0, 2.0]),  # the mean is 3
        ("marloo", [-3.0, 0.0, 3.0]),  # 1 - (3 + 5) / 2, 3 - (1 + 5) / 2, 5 - (1 + 3) / 2
        ("maremax", [-4.0, -2.0, 0.0]),
        ("mareinforce", [1.0, 3.0, 5.0]),
        ("iac", [1.0, 3.0, 5.0]),  # the critic's value is already subtracted
        ("maac", [1.0, 3.0, 5.0]),
    ],
)
def test_estimators_by_hand(estimator: str, expected: list[float]) -> None:
    assert group_advantages([1.0, 3.0, 5.0], estimator) == pytest.approx(expected)


def test_std_divides_by_the_population_deviation() -> None:
    deviation = math.sqrt(8 / 3)
    expected = [-2 / deviation, 0.0, 2 / deviation]
    assert group_advantages([1.0, 3.0, 5.0], "magrpo", "std") == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("normalize", ["none", "std"])
def test_equal_returns_have_exactly_no_advantage_over_a_baseline(estimator: str, normalize: str) -> None:
    keeps = not ESTIMATORS[estimator].has_baseline and normalize == "none"
    for group in ([0.1, 0.1, 0.1], [3.7], []):  # the mean of the first is not 0.1
        found = group_advantages(group, estimator, normalize)
        assert found == (group if keeps else [0.0] * len(group))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_std_does_not_make_rounding_an_advantage(estimator: str) -> None:
    """Crossed means of pairs that earn 0.8 and 0.0, or 0.7 and 0.1, differ in their last bit."""
    first, second = exact_mean([0.8, 0.0]), exact_mean([0.7, 0.1])
    assert first != second
    assert group_advantages([first, second, first, first], estimator, "std") == [0.0] * 4
    tied = group_advantages([first, second, 1.0], estimator, "std")
    assert tied[0] == tied[1] != tied[2]
    shifted = group_advantages([0.1 + 0.2 - 0.3, 0.0], estimator, "std")
    assert shifted == [0.0, 0.0], "near 0, where no digit of the difference is significant"


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("normalize", ["none", "std"])
def test_groups_that_can_train_are_those_that_may_have_an_advantage(estimator: str, normalize: str) -> None:
    for size in (1, 2, 5):
        group = [float(value) for value in range(1, size + 1)]
        found = group_advantages(group, estimator, normalize)
        assert any(found) == ESTIMATORS[estimator].can_train(size, normalize)


@given(returns, st.floats(-100, 100, allow_nan=False, width=32))
def test_a_baseline_takes_an_added_constant_away(group: list[float], constant: float) -> None:
    shifted = [value + constant for value in group]
    for name, estimator in ESTIMATORS.items():
        moved, advantages = group_advantages(shifted, name), group_advantages(group, name)
        if not estimator.has_baseline:
            assert moved == shifted
        elif (max(group) == min(group)) == (max(shifted) == min(shifted)):
            assert moved == pytest.approx(advantages, abs=1e-9)


@given(returns)
def test_advantages_over_a_mean_sum_to_zero(group: list[float]) -> None:
    for estimator in ("magrpo", "marloo"):
        assert sum(group_advantages(group, estimator)) == pytest.approx(0.0, abs=1e-9)


@given(returns, st.randoms(use_true_random=False))
def test_order_does_not_matter(group: list[float], rng: object) -> None:
    order = list(range(len(group)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    for estimator in ESTIMATORS:
        advantages = group_advantages(group, estimator)
        permuted = group_advantages([group[i] for i in order], estimator)
        assert permuted == pytest.approx([advantages[i] for i in order], abs=1e-9)
