"""pass@k and intervals: over problems, and over seeds and problems."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.algo.stats import (
    adjust_holm,
    bootstrap_difference,
    bootstrap_interval,
    cross_play_values,
    crossed_interval,
    mean_over_budget,
    paired_p_value,
    pass_at_k,
    seed_interval,
)
from magrpo.seeds import derive_seed


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
    assert (value.low, value.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert seed_interval([0.5, 0.5]).high == 0.5
    with pytest.raises(AssertionError):
        seed_interval([1.0])


def test_seed_interval_holds_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    for number in (3, 5, 30):
        intervals = [seed_interval(generator.normal(0.0, 1.0, number).tolist()) for _ in range(4000)]
        held = sum(interval.low <= 0.0 <= interval.high for interval in intervals) / len(intervals)
        assert held == pytest.approx(0.95, abs=0.012), number


def test_an_interval_over_seeds_and_problems_by_hand() -> None:
    # Seeds' means 1 and 3, problems' means 0 and 4, no rest: MS of seeds 2 * 2 / 1 = 4, of problems 2 * 8 / 1 = 16, so
    # the variance of the mean is 20 / 4 = 5; one degree of freedom each, whose quantile is 12.706.
    value = crossed_interval([[-1.0, 3.0], [1.0, 5.0]], 0)
    assert value.mean == 2.0
    assert value.high - 2.0 == pytest.approx(12.706 * np.sqrt(5), rel=1e-4)
    assert value.low - 2.0 == pytest.approx(-12.706 * np.sqrt(5), rel=1e-4)


def test_many_seeds_and_problems_come_near_the_normal_distribution() -> None:
    generator = np.random.default_rng(1)
    seeds, problems = generator.normal(0, 1.0, (60, 1)), generator.normal(0, 2.0, 300)
    found = crossed_interval((seeds + problems).tolist(), 0)
    spread = np.sqrt(seeds.var() / 60 + problems.var() / 300)  # no interaction
    assert found.mean == pytest.approx(seeds.mean() + problems.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.05)


def test_with_one_seed_equal_seeds_or_one_problem() -> None:
    values = [0.0, 0.25, 1.0, 0.5]
    alone = bootstrap_interval([[value] for value in values], 0)
    assert crossed_interval([values], 0) == alone
    twice = crossed_interval([values, values], 0)  # Student's t over four problems: 3.182 times 0.427 / 2
    assert twice.high - twice.mean == pytest.approx(3.1824 * np.std(values, ddof=1) / 2, rel=1e-4)
    assert crossed_interval([[1.0], [2.0], [3.0]], 0) == seed_interval([1.0, 2.0, 3.0])
    nothing = crossed_interval([[0.5, 0.5], [0.5, 0.5]], 0)
    assert (nothing.low, nothing.mean, nothing.high) == (0.5, 0.5, 0.5)


# Standard deviations of seeds, problems, and both together; a sample's luck is 0.3. Problems of `coopcode` differ by
# some 0.3, trained seeds by 0.01; differences of two settings by 0.05 to 0.15 over problems.
REPEATS = 3000
SPREADS = [(0.0, 0.3, 0.1), (0.01, 0.3, 0.1), (0.03, 0.25, 0.05), (0.1, 0.2, 0.1), (0.02, 0.05, 0.15)]


def evaluations(
    generator: np.random.Generator,
    shape: tuple[int, int],
    spread: tuple[float, float, float],
    num_samples: int,
    same_luck: bool,
) -> np.ndarray:
    """``(S, P)`` values around 0: seeds, problems, both together, and the samples' luck, each seed's or shared."""
    of_seeds, of_problems, of_both = spread
    luck = generator.normal(0, 0.3 / np.sqrt(num_samples), (1, shape[1]) if same_luck else shape)
    seeds, problems = generator.normal(0, of_seeds, (shape[0], 1)), generator.normal(0, of_problems, shape[1])
    return seeds + problems + generator.normal(0, of_both, shape) + luck


def coverage(
    num_seeds: int, spread: tuple[float, float, float], num_samples: int, same_luck: bool, repeats: int
) -> float:
    """How often the interval over 96 problems holds 0, what new seeds on new problems give."""
    generator = np.random.default_rng(derive_seed("coverage", num_seeds, str(spread), num_samples, int(same_luck)))
    tables = (evaluations(generator, (num_seeds, 96), spread, num_samples, same_luck) for _ in range(repeats))
    intervals = [crossed_interval(table.tolist(), 0) for table in tables]
    return float(np.mean([value.low <= 0 <= value.high for value in intervals]))


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_the_interval_over_seeds_covers_new_seeds_on_new_problems(num_seeds: int) -> None:
    for spread in SPREADS[1:4]:
        assert 0.93 <= coverage(num_seeds, spread, 4, False, 2000) <= 0.97, spread


@pytest.mark.slow
@pytest.mark.parametrize("same_luck", [False, True])
@pytest.mark.parametrize("num_samples", [2, 5])
@pytest.mark.parametrize("num_seeds", [3, 5])
def test_coverage_whatever_differs_most(num_seeds: int, num_samples: int, same_luck: bool) -> None:
    """Also where the luck of an evaluation is shared by all seeds, as it was when they drew with the same seed."""
    for spread in SPREADS:
        assert 0.93 <= coverage(num_seeds, spread, num_samples, same_luck, REPEATS) <= 0.97, spread


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [3, 5])
def test_paired_differences_over_seeds_are_covered(num_seeds: int) -> None:
    """Two settings on the same problems, seed by seed: what both share of problems and of seeds is not in it."""
    for own in ((0.01, 0.05, 0.05), (0.02, 0.1, 0.1), (0.0, 0.0, 0.0)):
        generator = np.random.default_rng(7)
        held = 0
        for _ in range(REPEATS):
            shared = evaluations(generator, (num_seeds, 96), (0.03, 0.3, 0.1), 4, False)
            first, second = (evaluations(generator, (num_seeds, 96), own, 4, False) for _ in range(2))
            value = crossed_interval(((shared + first) - (shared + second)).tolist(), 0)
            held += value.low <= 0 <= value.high
        assert 0.93 <= held / REPEATS <= 0.97, own


def test_pairing_is_tighter_than_two_samples() -> None:
    theirs = {str(i): i / 50 for i in range(50)}
    ours = {key: value + 0.1 for key, value in theirs.items()}
    paired = bootstrap_interval([[ours[key] - theirs[key]] for key in ours], 0)
    unpaired = bootstrap_difference(list(ours.values()), list(theirs.values()), 0)
    assert (paired.low, paired.high) == pytest.approx((0.1, 0.1))
    assert unpaired.low < 0 < unpaired.high


def test_holm_by_hand() -> None:
    """0.005 * 4, 0.01 * 3, 0.03 * 2; the last, 0.04 * 1, may not lie below the one before."""
    tests = adjust_holm([0.01, 0.04, 0.03, 0.005])
    assert [test.p for test in tests] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # 0.005 and 0.01 are below 0.05 / 4 and 0.05 / 3; 0.03 is above 0.05 / 2, where the procedure stops.
    assert [test.error for test in tests] == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2, 0.05 / 4])
    assert adjust_holm([]) == []
    assert [test.p for test in adjust_holm([0.9, 0.8])] == [1.0, 1.0]


@given(st.lists(st.lists(st.floats(-1, 1), min_size=2, max_size=5), min_size=1, max_size=5))
def test_intervals_with_the_errors_of_holm_exclude_zero_where_it_rejects(samples: list[list[float]]) -> None:
    samples = [values for values in samples if max(values) - min(values) > 1e-9] or [[0.0, 1.0]]
    tests = adjust_holm([paired_p_value(values) for values in samples])
    for values, test in zip(samples, tests, strict=True):
        interval = seed_interval(values, test.error)
        if min(abs(interval.low), abs(interval.high)) > 1e-9:
            assert (test.p < 0.05) == (not interval.low <= 0 <= interval.high)


def test_paired_p_by_hand() -> None:
    """t = 2 / (1 / sqrt(3)) with two degrees of freedom, whose distribution is known: p = 1 - t / sqrt(2 + t^2)."""
    assert paired_p_value([1.0, 2.0, 3.0]) == pytest.approx(1 - 12**0.5 / 14**0.5)
    assert paired_p_value([0.0, 0.0]) == 1.0
    assert paired_p_value([0.5, 0.5]) == 1.0, "differences without spread tell nothing about other seeds"
    assert paired_p_value([0.625 - 0.5, 0.725 - 0.6]) == 1.0, "as do those whose spread is rounding"


@pytest.mark.parametrize("rounded", [[2**-54] * 3, [-(2**-54)] * 3, [2**-54, 2**-53, 2**-54]])
def test_seeds_that_differ_by_rounding_are_ties(rounded: list[float]) -> None:
    """Two arms that both stay at 1/3 differ by 2^-54 where one sums its parts in another order."""
    assert paired_p_value(rounded) == 1.0


def test_area_under_a_curve_by_hand() -> None:
    """Up to 20 tokens: a triangle to 10, then flat. Beyond the budget, nothing counts but the line towards it."""
    assert mean_over_budget([(0, 0.0), (10, 1.0), (30, 1.0)], 20) == pytest.approx((5 + 10) / 20)
    assert mean_over_budget([(0, 0.0), (40, 2.0)], 20) == pytest.approx(0.5), "it crosses the budget at 1"
    every_ten = [(cost, cost / 100) for cost in range(0, 101, 10)]
    unequal = [(0, 0.0), (7, 0.07), (63, 0.63), (110, 1.1)]
    assert mean_over_budget(every_ten, 90) == pytest.approx(mean_over_budget(unequal, 90)), "one line, two grids"
    assert mean_over_budget([(0, 1.0), (20, 1.0)], 20) == 1.0, "it ends at the budget exactly"


def test_cross_play_values_are_those_of_a_jackknife() -> None:
    """Each is K times the difference of all runs less K - 1 times that of the others; their mean is the difference."""

    def subtract_mixed(returns: np.ndarray) -> np.ndarray:
        is_own = np.eye(len(returns), dtype=bool)
        return returns[is_own].mean(axis=0) - returns[~is_own].mean(axis=0)

    returns = np.random.default_rng(0).random((4, 4, 3))
    values = np.array(cross_play_values(returns.tolist()))
    for run in range(4):
        others = np.delete(np.delete(returns, run, axis=0), run, axis=1)
        np.testing.assert_allclose(values[run], 4 * subtract_mixed(returns) - 3 * subtract_mixed(others))
    np.testing.assert_allclose(values.mean(axis=0), subtract_mixed(returns))
    two = np.array(cross_play_values(returns[:2, :2].tolist()))
    np.testing.assert_allclose(two.mean(axis=0), subtract_mixed(returns[:2, :2]))


def test_the_interval_of_cross_play_covers_new_runs() -> None:
    """Teams share their runs. Their difference is 0 here; an interval that took teams as independent would miss it."""
    generator = np.random.default_rng(derive_seed("coverage of cross-play"))
    hits = 0
    for _ in range(2000):
        first, second = generator.normal(0, 0.1, (2, 5))  # how well each run's agents play in either role
        returns = first[:, None, None] + second[None, :, None] + generator.normal(0, 0.05, (5, 5, 1))
        interval = crossed_interval(cross_play_values(returns.tolist()), 0)
        hits += interval.low <= 0 <= interval.high
    assert 0.93 <= hits / 2000 <= 0.98
