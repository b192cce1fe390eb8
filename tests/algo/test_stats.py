"""pass@k and bootstrap intervals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.algo.stats import (
    bootstrap_difference,
    bootstrap_interval,
    crossed_interval,
    pass_at_k,
    seed_interval,
)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 0, 1, 0.0),
        (4, 1, 1, 0.25),
        (4, 4, 3, 1.0),
        (4, 2, 2, 5 / 6),  # of the 6 pairs only the one of both failures fails
        (5, 1, 3, 0.6),  # 1 - C(4, 3) / C(5, 3) = 1 - 4 / 10
        (5, 3, 3, 1.0),  # two failures cannot fill three places
        (200, 100, 1, 0.5),
    ],
)
def test_pass_at_k_golden(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_success(case: tuple[int, int, int]) -> None:
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)])
def test_pass_at_k_refuses_the_impossible(n: int, c: int, k: int) -> None:
    with pytest.raises(AssertionError):
        pass_at_k(n, c, k)


def test_interval_of_two_problems() -> None:
    # A resample of (0, 1) has mean 0, 0.5 or 1 with chances 1/4, 1/2, 1/4: both tails are wider than 2.5 %.
    interval = bootstrap_interval([[0.0, 0.0], [1.0]], seed=0)
    assert (interval.mean, interval.low, interval.high) == (0.5, 0.0, 1.0)


def test_interval_agrees_with_the_normal_approximation() -> None:
    # 400 problems, half 0 and half 1: the standard error is 0.5 / 20, so the interval is 0.5 +- 1.96 * 0.025.
    interval = bootstrap_interval([[float(i % 2)] for i in range(400)], seed=3, num_resamples=4000)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.451, abs=0.006)
    assert interval.high == pytest.approx(0.549, abs=0.006)


def test_problems_weigh_the_same_however_many_values_they_hold() -> None:
    assert bootstrap_interval([[1.0], [0.0] * 9], seed=0).mean == 0.5


VALUES = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=1, max_size=12)


@given(VALUES, st.integers(0, 2**63 - 1))
def test_interval_properties(values: list[list[float]], seed: int) -> None:
    interval = bootstrap_interval(values, seed, num_resamples=200)
    means = [sum(problem) / len(problem) for problem in values]
    assert min(means) - 1e-9 <= interval.low <= interval.high <= max(means) + 1e-9
    assert interval == bootstrap_interval([problem[::-1] for problem in values], seed, num_resamples=200)
    moved = bootstrap_interval([[2 * value + 3 for value in problem] for problem in values], seed, num_resamples=200)
    for name in ("mean", "low", "high"):
        assert getattr(moved, name) == pytest.approx(2 * getattr(interval, name) + 3, abs=1e-9)


def test_the_seed_moves_the_interval_and_not_the_mean() -> None:
    values = [[0.1 * i] for i in range(20)]
    first, second = bootstrap_interval(values, seed=1), bootstrap_interval(values, seed=2)
    assert first.mean == second.mean
    assert (first.low, first.high) != (second.low, second.high)


@pytest.mark.parametrize("values", [[], [[1.0], []]])
def test_interval_refuses_nothing(values: list[list[float]]) -> None:
    with pytest.raises(AssertionError):
        bootstrap_interval(values, seed=0)


def test_bootstrap_difference_is_that_of_independent_samples() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.normal(1.0, 1.0, 400).tolist(), generator.normal(0.0, 2.0, 100).tolist()
    value = bootstrap_difference(a, b, seed=0)
    assert value.mean == pytest.approx(np.mean(a) - np.mean(b))
    expected = 1.96 * np.sqrt(np.var(a) / 400 + np.var(b) / 100)
    assert value.high - value.mean == pytest.approx(expected, rel=0.12)
    assert value.mean - value.low == pytest.approx(expected, rel=0.12)
    assert bootstrap_difference(a, b, seed=0) == value


def test_seed_interval_is_students() -> None:
    # 1, 2 and 3: deviation 1, so 4.303 / sqrt(3) around 2; the quantile with two degrees of freedom is 4.303.
    value = seed_interval([1.0, 2.0, 3.0])
    assert value.mean == 2.0
    assert (value.low, value.high) == (pytest.approx(2 - 2.4843, abs=1e-4), pytest.approx(2 + 2.4843, abs=1e-4))
    assert seed_interval([0.5, 0.5]).high == 0.5
    with pytest.raises(AssertionError):
        seed_interval([1.0])


def test_seed_interval_holds_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    for number in (3, 5, 30):
        intervals = [seed_interval(generator.normal(0.0, 1.0, number).tolist()) for _ in range(4000)]
        held = sum(interval.low <= 0.0 <= interval.high for interval in intervals) / len(intervals)
        assert held == pytest.approx(0.95, abs=0.012), number


def test_an_interval_over_seeds_and_problems() -> None:
    """Against the variance by hand: that of the seeds' means, of the problems' means, and of what is left of both."""
    generator = np.random.default_rng(1)
    seeds, problems = generator.normal(0, 1.0, (40, 1)), generator.normal(0, 2.0, 300)
    found = crossed_interval((seeds + problems).tolist(), 0, num_resamples=4000)
    spread = np.sqrt(seeds.var() / 40 + problems.var() / 300)  # no interaction
    assert found.mean == pytest.approx(seeds.mean() + problems.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.05)


def test_with_one_seed_or_equal_seeds_the_interval_is_over_problems() -> None:
    values = [0.0, 0.25, 1.0, 0.5]
    alone = bootstrap_interval([[value] for value in values], 0)
    assert crossed_interval([values], 0) == alone
    twice = crossed_interval([values, values], 0)
    assert (twice.low, twice.high) == pytest.approx((alone.low, alone.high), abs=0.07)
    seeds_only = crossed_interval([[0.0, 0.0], [1.0, 1.0]], 0)
    assert (seeds_only.low, seeds_only.high) == (0.0, 1.0)


def test_pairing_is_tighter_than_two_samples() -> None:
    theirs = {str(i): i / 50 for i in range(50)}
    ours = {key: value + 0.1 for key, value in theirs.items()}
    paired = bootstrap_interval([[ours[key] - theirs[key]] for key in ours], 0)
    unpaired = bootstrap_difference(list(ours.values()), list(theirs.values()), 0)
    assert (paired.low, paired.high) == pytest.approx((0.1, 0.1))
    assert unpaired.low < 0 < unpaired.high
