"""Statistics of evaluations: pass@k, intervals over problems, and over seeds and problems."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from magrpo.types import ROUNDING, Interval


def mean_or_zero(values: Sequence[float]) -> float:
    """The mean of ``values``; 0 if there are none."""
    return fmean(values) if values else 0.0


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the chance, 0 to 1, that one of ``k`` samples passes, when ``c`` of ``n`` samples did.

    ``1 - C(n - c, k) / C(n, k)``, equation 1 of Chen et al. 2021 (arXiv 2107.03374).
    """
    assert 0 <= c <= n, f"{c} of {n} samples cannot pass"
    assert 1 <= k <= n, f"pass@{k} needs at least {k} samples, got {n}"
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(
    values_per_problem: Sequence[Sequence[float]], seed: int, num_resamples: int = 1000, tail: float = 2.5
) -> Interval:
    """The mean over problems of each problem's mean, with a percentile bootstrap interval, by default of 95 %.

    ``tail``: percentage of resampled means beyond each end. Problems are resampled rather than the values of a problem,
    since a new evaluation would use new problems. All problems weigh the same, whatever their number of values.
    """
    assert values_per_problem, "no problems"
    assert all(len(values) for values in values_per_problem), "a problem without values has no mean"
    means = np.array([math.fsum(values) / len(values) for values in values_per_problem])  # (P,)
    picks = np.random.default_rng(seed).integers(len(means), size=(num_resamples, len(means)))  # (R, P)
    low, high = np.percentile(means[picks].mean(axis=1), [tail, 100 - tail])
    return Interval(float(means.mean()), float(low), float(high))


def crossed_interval(values: Sequence[Sequence[float]], seed: int) -> Interval:
    """The mean of one value for each seed and problem, ``(S, P)``, with a 95 % interval for new seeds on new problems.

    Seeds and problems are random and crossed, since every seed met the same problems; luck that all seeds share on one
    problem counts as the problem's. By the two-way analysis of variance without replication (Searle, Casella and
    McCulloch, Variance Components, 1992, chapter 4) the variance of the mean is ``(MS_seeds + max(MS_problems -
    MS_rest, 0)) / (S P)``, as in studies of several readers and cases (Hillis 2007, Statistics in Medicine 26). The
    interval is Student's t, its degrees of freedom the harmonic mean of ``S - 1`` and ``P - 1``, weighted by the two
    shares of the variance. Satterthwaite (1946) squares the weights, which covers 91 % where three seeds differ a lot;
    this covers 93 to 97 % with 3 and 5 seeds, by the simulations of ``tests/algo/test_stats.py``.

    With one seed it is :func:`bootstrap_interval` (of ``seed``), with one problem :func:`seed_interval`.
    """
    table = np.asarray(values, dtype=float)
    assert table.ndim == 2, "one value for each seed and problem"
    num_seeds, num_problems = table.shape
    if num_seeds == 1:
        return bootstrap_interval([[value] for value in table[0]], seed)
    if num_problems == 1:
        return seed_interval(table[:, 0].tolist())
    mean = float(table.mean())
    seed_means, problem_means = table.mean(axis=1), table.mean(axis=0)  # (S,), (P,)
    rest = table - seed_means[:, None] - problem_means + mean  # (S, P)
    seed_square = num_problems * float(((seed_means - mean) ** 2).sum()) / (num_seeds - 1)
    problem_square = num_seeds * float(((problem_means - mean) ** 2).sum()) / (num_problems - 1)
    rest_square = float((rest**2).sum()) / ((num_seeds - 1) * (num_problems - 1))
    problem_share = max(problem_square - rest_square, 0.0)
    total = seed_square + problem_share
    if total == 0:
        return Interval.without_width(mean)
    freedom = total / (seed_square / (num_seeds - 1) + problem_share / (num_problems - 1))
    return _student_interval(mean, total / table.size, freedom)


def cross_play_values(returns: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Subtract teams of two runs from teams of one: values of each run and problem, for :func:`crossed_interval`.

    ``returns``, ``(K, K, P)``: the return on each of P problems of the team whose first agent is from the run of the
    row and whose others are from that of the column; two runs at least. The mean over runs of the result, ``(K, P)``,
    is the mean of the diagonal less that of the rest. The ``2 (K - 1)`` mixed teams of a run are not independent, so
    the values are the jackknife's pseudo-values: K times the difference less K - 1 times that without the run (Arvesen
    1969, Annals of Mathematical Statistics 40). Two runs have one pair, which tells nothing about others.
    """
    table = np.asarray(returns, dtype=float)
    num_runs = len(table)
    assert table.shape[1] == num_runs > 1, "every pair of two runs at least"
    own = np.einsum("kkp->kp", table)
    mixed = table.sum(axis=(0, 1)) - own.sum(axis=0)  # (P,), the sum over mixed teams
    with_run = table.sum(axis=0) + table.sum(axis=1) - 2 * own  # (K, P), the sum over the mixed teams of each run
    less = mixed / 2 if num_runs == 2 else mixed / (num_runs - 1) - (mixed - with_run) / (num_runs - 2)
    return [[float(value) for value in of_run] for of_run in own - less]


def bootstrap_difference(minuend: Sequence[float], subtrahend: Sequence[float], seed: int) -> Interval:
    """The difference of the means of two independent samples of problems, with a 95 % percentile bootstrap interval.

    Each sample has one value for each problem. For values of the same problems, :func:`bootstrap_interval` of their
    differences is tighter.
    """
    generator = np.random.default_rng(seed)
    samples = []
    for values in (np.asarray(minuend), np.asarray(subtrahend)):
        assert len(values), "no problems"
        samples.append(values[generator.integers(len(values), size=(1000, len(values)))].mean(axis=1))
    low, high = np.percentile(samples[0] - samples[1], [2.5, 97.5])
    return Interval(float(np.mean(minuend) - np.mean(subtrahend)), float(low), float(high))


def seed_interval(values: Sequence[float], error: float = 0.05) -> Interval:
    """The mean of one value for each seed, two at least, with a 95 % interval for new seeds on the same problems.

    ``error``: chance that the interval misses the true mean, if another than 5 %.

    Use it for quantities without a value for each problem, such as the tokens of a run, and else
    :func:`crossed_interval`.
    """
    assert len(values) > 1, "one seed says nothing about others"
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return _student_interval(mean, variance / len(values), float(len(values) - 1), error)


def _student_interval(mean: float, variance: float, freedom: float, error: float = 0.05) -> Interval:
    from scipy.special import stdtrit  # half a second, which commands that print no interval need not spend

    half = float(stdtrit(freedom, 1 - error / 2)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def paired_p_value(differences: Sequence[float]) -> float:
    """The two-sided p-value of the paired t test that the mean of ``differences``, two at least, is 0.

    It is 1 for a mean that rounding may have made. It is also 1 for differences without a spread beyond rounding, which
    outcomes of few values have by chance: they leave the spread over other seeds unknown.
    """
    from scipy.special import stdtr  # half a second, which commands that print no interval need not spend

    count, mean = len(differences), fmean(differences)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in differences) / (count - 1))
    if min(abs(mean), deviation) <= ROUNDING:
        return 1.0
    return float(2 * stdtr(count - 1, -abs(mean) / (deviation / math.sqrt(count))))


@dataclass(frozen=True, slots=True)
class HolmTest:
    """The result of one of several tests by Holm's step-down procedure."""

    p: float
    """The adjusted p-value: the smallest familywise error at which the procedure rejects this test."""
    error: float
    """The error of the test's interval: that of the step that rejected it, or of the step that stopped. The interval of
    this error excludes 0 exactly where the procedure rejects, unless the differences have no spread."""


def adjust_holm(p_values: Sequence[float]) -> list[HolmTest]:
    """Test several p-values at once with a familywise error of 5 % (Holm 1979, Scandinavian Journal of Statistics 6).

    The smallest of m p-values is tested at ``5 % / m``, the next at ``5 % / (m - 1)`` and so on, until one fails.
    """
    error = 0.05
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    tests: dict[int, HolmTest] = {}
    adjusted, step_error, stopped = 0.0, error, False
    for rank, index in enumerate(order):
        num_left = len(p_values) - rank
        adjusted = max(adjusted, min(1.0, num_left * p_values[index]))
        if not stopped:
            step_error = error / num_left
        stopped = stopped or adjusted > error
        tests[index] = HolmTest(adjusted, step_error)
    return [tests[index] for index in range(len(p_values))]


def mean_over_budget(curve: Sequence[tuple[float, float]], budget: float) -> float:
    """The area under a learning curve up to ``budget``, over ``budget``: the mean value while it was spent.

    ``curve``: cost so far and value of each evaluation, from cost 0 in ascending order to ``budget`` at least. Between
    evaluations the value is interpolated, so curves that were measured at other costs can be compared.
    """
    costs, values = np.array(curve, dtype=float).T
    assert costs[0] == 0, "the curve starts before training"
    assert costs[-1] >= budget > 0, "the curve ends before the budget"
    within = costs < budget
    places = np.append(costs[within], budget)
    heights = np.append(values[within], np.interp(budget, costs, values))
    return float(np.trapezoid(heights, places) / budget)
