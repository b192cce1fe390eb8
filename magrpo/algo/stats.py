"""Statistics of evaluations: pass@k, bootstrap intervals over problems, over seeds and over both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from magrpo.types import Interval

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""
_NORMAL = 1.960
"""The same of the normal distribution."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of ``k`` samples passes, when ``c`` of ``n`` samples did.

    ``1 - C(n - c, k) / C(n, k)``, equation 1 of Chen et al. 2021 (arXiv 2107.03374). A fraction, 0 to 1.
    """
    assert 0 <= c <= n, f"{c} of {n} samples cannot pass"
    assert 1 <= k <= n, f"pass@{k} needs at least {k} samples, got {n}"
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def bootstrap_interval(
    values_per_problem: Sequence[Sequence[float]], seed: int, num_resamples: int = 1000, tail: float = 2.5
) -> Interval:
    """The mean over problems of each problem's mean, with a percentile bootstrap interval, by default of 95 %.

    ``tail``: percent of the resampled means beyond each end of the interval.

    Problems are resampled, not the values of a problem: what varies between evaluations of new problems is the
    problems. Problems may hold different numbers of values; each weighs the same. The same unit as the values.
    """
    assert values_per_problem, "no problems"
    assert all(len(values) for values in values_per_problem), "a problem without values has no mean"
    means = np.array([math.fsum(values) / len(values) for values in values_per_problem])  # (P,)
    picks = np.random.default_rng(seed).integers(len(means), size=(num_resamples, len(means)))  # (R, P)
    low, high = np.percentile(means[picks].mean(axis=1), [tail, 100 - tail])
    return Interval(float(means.mean()), float(low), float(high))


def crossed_interval(values: Sequence[Sequence[float]], seed: int, num_resamples: int = 1000) -> Interval:
    """The mean of one value for each seed and problem, ``(S, P)``, with a 95 % percentile bootstrap interval over both.

    Every seed met the same problems, so the two are resampled independently and crossed: the pigeonhole bootstrap of
    Owen 2007 (arXiv 0712.1111). With one seed it is :func:`bootstrap_interval`. Few seeds resampled vary less than new
    ones would: with three the seeds' share of the variance comes out a third too small.
    """
    table = np.asarray(values, dtype=float)
    assert table.ndim == 2, "one value for each seed and problem"
    if len(table) == 1:
        return bootstrap_interval([[value] for value in table[0]], seed, num_resamples)
    generator = np.random.default_rng(seed)
    weights = [generator.multinomial(n, [1 / n] * n, size=num_resamples) / n for n in table.shape]  # (R, S), (R, P)
    low, high = np.percentile(np.einsum("rs,sp,rp->r", weights[0], table, weights[1]), [2.5, 97.5])
    return Interval(float(table.mean()), float(low), float(high))


def bootstrap_difference(
    minuend: Sequence[float], subtrahend: Sequence[float], seed: int, num_resamples: int = 1000
) -> Interval:
    """The difference of the means of two independent samples of problems, with a 95 % percentile bootstrap interval.

    Both are resampled, each on its own; one value a problem. For values of the same problems give their differences
    to :func:`bootstrap_interval`, which is much tighter.
    """
    generator = np.random.default_rng(seed)
    samples = []
    for values in (np.asarray(minuend), np.asarray(subtrahend)):
        assert len(values), "no problems"
        samples.append(values[generator.integers(len(values), size=(num_resamples, len(values)))].mean(axis=1))
    low, high = np.percentile(samples[0] - samples[1], [2.5, 97.5])
    return Interval(float(np.mean(minuend) - np.mean(subtrahend)), float(low), float(high))


def seed_interval(values: Sequence[float]) -> Interval:
    """The mean of one value for each seed, with a 95 % interval by Student's t, which a handful of seeds calls for.

    A resampling of three values hardly ever leaves their range, which is far too narrow. A single value tells nothing
    of what another seed would give, so two are needed. The same unit as the values.
    """
    assert len(values) > 1, "one seed says nothing about others"
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    freedom = len(values) - 1
    # Beyond the table the first terms of the expansion around the normal quantile, which are good to 0.5 % there.
    quantile = _T[freedom - 1] if freedom <= len(_T) else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    half = quantile * math.sqrt(variance / len(values))
    return Interval(mean, mean - half, mean + half)
