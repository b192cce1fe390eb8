from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magrpo.algo.advantages import group_advantages, tabulate_returns
from magrpo.config.run import AlgoConfig
from magrpo.types import Estimator, Sample

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
returns = st.lists(st.floats(-10, 10, allow_nan=False, width=32), min_size=1, max_size=8)


def test_the_config_offers_the_same_estimators() -> None:
    assert get_args(AlgoConfig.model_fields["estimator"].annotation) == ESTIMATORS


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("magrpo", [-2.0, 0.0, 2.0]),  # the mean is 3
        ("marloo", [-3.0, 0.0, 3.0]),  # 1 - (3 + 5) / 2, 3 - (1 + 5) / 2, 5 - (1 + 3) / 2
        ("maremax", [-4.0, -2.0, 0.0]),
        ("mareinforce", [1.0, 3.0, 5.0]),
    ],
)
def test_estimators_by_hand(estimator: Estimator, expected: list[float]) -> None:
    assert group_advantages([[1.0, 3.0, 5.0]], estimator) == [pytest.approx(expected)]


def test_std_divides_by_the_population_deviation() -> None:
    deviation = math.sqrt(8 / 3)
    assert group_advantages([[1.0, 3.0, 5.0]], "magrpo", "std") == [
        pytest.approx([-2 / deviation, 0.0, 2 / deviation], rel=1e-5)
    ]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("normalize", ["none", "std"])
def test_equal_returns_have_exactly_no_advantage_over_a_baseline(estimator: Estimator, normalize: str) -> None:
    groups = [[0.1, 0.1, 0.1], [1.0, 2.0], [3.7], []]
    equal, _, single, empty = group_advantages(groups, estimator, normalize)  # type: ignore[arg-type]
    keeps = estimator == "mareinforce" and normalize == "none"
    assert equal == ([pytest.approx(0.1)] * 3 if keeps else [0.0, 0.0, 0.0])
    assert single == ([3.7] if keeps else [0.0])
    assert empty == []


@given(st.lists(returns, min_size=1, max_size=5))
def test_groups_do_not_mix(groups: list[list[float]]) -> None:
    for estimator in ESTIMATORS:
        together = group_advantages(groups, estimator)
        assert together == [group_advantages([group], estimator)[0] for group in groups]


@given(returns, st.floats(-100, 100, allow_nan=False, width=32))
def test_advantages_sum_to_zero_and_ignore_an_added_constant(group: list[float], constant: float) -> None:
    shifted = [value + constant for value in group]
    for estimator in ("magrpo", "marloo"):
        (advantages,) = group_advantages([group], estimator)  # type: ignore[arg-type]
        assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    for estimator in ("magrpo", "marloo", "maremax"):
        (advantages,), (moved,) = (group_advantages([g], estimator) for g in (group, shifted))  # type: ignore[arg-type]
        if (max(group) == min(group)) == (max(shifted) == min(shifted)):
            assert moved == pytest.approx(advantages, abs=1e-9)


@given(returns, st.randoms(use_true_random=False))
def test_order_does_not_matter(group: list[float], rng: object) -> None:
    order = list(range(len(group)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    for estimator in ESTIMATORS:
        (advantages,) = group_advantages([group], estimator)
        (permuted,) = group_advantages([[group[i] for i in order]], estimator)
        assert permuted == pytest.approx([advantages[i] for i in order], abs=1e-9)


def _samples(returns: list[float], advantages: list[float], group: int) -> list[Sample]:
    return [
        Sample((1,), (2,), (-1.0,), value, advantage, group, 0)
        for value, advantage in zip(returns, advantages, strict=True)
    ]


def test_the_table_of_returns_holds_what_gives_the_stored_advantages_back() -> None:
    """Two agents of one adapter count their groups apart; samples of a group may lie apart, or be missing."""
    first = _samples([1.0, 3.0], [-1.0, 1.0], 0), _samples([2.0, 4.0], [-2.0, 0.0], 1)
    mixed = [first[0][0], first[1][0], first[0][1], first[1][1]]
    other = [*_samples([1.0, 5.0], [-4.0, 0.0], 0), *_samples([7.0], [-2.0], 1), *_samples([0.0], [math.nan], 2)]
    table = tabulate_returns({"a": mixed, "b": other}, {"a": "magrpo", "b": "maremax"}, "none")
    assert table.returns.tolist()[:7] == [1.0, 3.0, -2.0, 0.0, 1.0, 5.0, -2.0]
    assert table.returns[7].isnan()
    assert table.bounds.tolist() == [0, 2, 4, 6, 7, 8]
    assert table.estimators.tolist() == [0, 4, 2, 4, 4]  # given: another estimator's, incomplete, no number
    assert table.sequences.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    assert tabulate_returns({"a": []}, {"a": "magrpo"}, "std").bounds.tolist() == [0]
    assert table.returns.dtype == torch.float64
