"""The gradient of critics in games of which every value is known, against the exact gradient, in groups of one too."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from magrpo.config.sections import AlgoConfig
from tests.stages.exact_game import Game, History, gradients
from tests.stages.test_exact_game import DRAWS, agrees, config

GAMMA = 0.9
Case = tuple[str, str, float]
"""Estimator, values, lambda."""
EXACT: list[Case] = [
    *(("iac", "exact", gae_lambda) for gae_lambda in (0.0, 0.5, 1.0)),
    ("maac", "exact", 0.5),
]
Found = dict[Case, NDArray[np.float64]]


def gradients_of(game: Game, cases: list[Case], tree: str = "chains", size: int = 1) -> Found:
    """The gradients of the same draws with the values of each case: exact ones, wrong ones, or none."""
    exact = game.exact_values(GAMMA)
    values: Mapping[str, dict[History, float]] = {
        "exact": exact,
        "wrong": {history: 0.5 * value - 1 for history, value in exact.items()},
        "none": {},
    }
    # ``clip_high``, which credit does not read, tells the algorithms apart.
    algos = [AlgoConfig(estimator=name, gamma=GAMMA, clip_high=n) for n, (name, _, _) in enumerate(cases)]
    critics = {algo: (values[said], share) for algo, (_, said, share) in zip(algos, cases, strict=True)}
    rollout = config(tree, size=size, threshold=game.threshold)
    return dict(zip(cases, gradients(game, rollout, algos, DRAWS, critics=critics), strict=True))


@pytest.fixture(scope="module")
def alone() -> Found:
    """Two turns in groups of one."""
    others: list[Case] = [("maac", "wrong", 1.0), ("maac", "wrong", 0.0), ("mareinforce", "none", 1.0)]
    return gradients_of(Game(2), EXACT + others)


@pytest.mark.parametrize("case", EXACT)
def test_exact_values_give_the_exact_gradient_in_groups_of_one(alone: Found, case: Case) -> None:
    """Whatever share of them the returns hold."""
    agrees(alone[case], Game(2).exact_gradient(GAMMA))


def test_wrong_values_bias_nothing_unless_returns_hold_them(alone: Found) -> None:
    agrees(alone["maac", "wrong", 1.0], Game(2).exact_gradient(GAMMA))
    with pytest.raises(AssertionError):
        agrees(alone["maac", "wrong", 0.0], Game(2).exact_gradient(GAMMA))


def test_exact_values_make_the_gradient_quieter(alone: Found) -> None:
    variances = {case: float(found.var(axis=0).sum()) for case, found in alone.items()}
    assert variances["iac", "exact", 1.0] < 0.5 * variances["mareinforce", "none", 1.0]
    assert variances["iac", "exact", 0.0] < variances["iac", "exact", 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("is_sequential", [False, True])
@pytest.mark.parametrize(("tree", "size"), [("chains", 1), ("full", 2)])
def test_exact_values_give_the_exact_gradient_in_trees(is_sequential: bool, tree: str, size: int) -> None:
    game = Game(2, sequential=is_sequential)
    for found in gradients_of(game, EXACT, tree, size).values():
        agrees(found, game.exact_gradient(GAMMA))


@pytest.mark.slow
def test_exact_values_give_the_exact_gradient_if_episodes_end_early() -> None:
    game = Game(3, threshold=2.5)
    exact = game.exact_gradient(GAMMA)
    for found in gradients_of(game, EXACT).values():  # most histories of three turns are rare: only the sum is normal
        along = found @ exact / (exact @ exact)
        assert abs(along.mean() - 1) < 2 * along.std(ddof=1) / np.sqrt(len(along))
