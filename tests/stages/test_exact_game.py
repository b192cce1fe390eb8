"""The gradient of whole games, against the exact one by enumeration: nothing lost, nothing counted twice, no turn over
another.

Leave-one-out advantages (``marloo``) are unbiased; those of ``magrpo`` are (G - 1)/G of them, G the number of siblings.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from magrpo.config.sections import AlgoConfig, RolloutConfig
from tests.stages.exact_game import TOKENS, Game, gradients

DRAWS = 2000
TREES = {"chains": {}, "full": {"tree": "full"}}
CASES = [(tree, mode, size) for tree in TREES for mode in ("aligned", "crossed") for size in (2, 8)]
QUICK = {("chains", "aligned", 2), ("chains", "crossed", 2), ("full", "aligned", 2)}


def case(tree: str, mode: str, size: int) -> object:
    return pytest.param(tree, mode, size, marks=() if (tree, mode, size) in QUICK else pytest.mark.slow)


def config(tree: str, mode: str = "aligned", size: int = 2, threshold: float | None = None) -> RolloutConfig:
    return RolloutConfig(group_size=size, joint_mode=mode, termination_threshold=threshold, **TREES[tree])


def agrees(found: NDArray[np.float64], exact: NDArray[np.float64]) -> None:
    """The mean of the draws (N, P), along the exact gradient (P,) within 2 standard errors, and nowhere far off."""
    along = found @ exact / (exact @ exact)
    assert abs(along.mean() - 1) < 2 * along.std(ddof=1) / np.sqrt(len(along)), f"{along.mean():.3f} of the exact one"
    errors = found.std(axis=0, ddof=1) / np.sqrt(len(found))
    far = np.abs(found.mean(axis=0) - exact)[errors > 0] / errors[errors > 0]
    assert far.max() < 4.5
    assert not exact[errors == 0].any()


GAMMAS = (1.0, 0.9)
MARLOO = AlgoConfig(estimator="marloo", gamma=0.9)


def unbiased_everywhere(game: Game, rollout: RolloutConfig, num_draws: int = DRAWS) -> None:
    algos = [AlgoConfig(estimator="marloo", gamma=gamma) for gamma in GAMMAS]
    for gamma, found in zip(GAMMAS, gradients(game, rollout, algos, num_draws), strict=True):
        agrees(found, game.exact_gradient(gamma))


@pytest.mark.parametrize(("tree", "mode", "size"), [case(*one) for one in CASES])
def test_two_turns(tree: str, mode: str, size: int) -> None:
    # All pairs of 8 completions, each with a full tree: a tenth of the draws still is as sharp as the other cases.
    draws = DRAWS // 10 if (tree, mode, size) == ("full", "crossed", 8) else DRAWS
    unbiased_everywhere(Game(2), config(tree, mode, size), draws)


@pytest.mark.parametrize("tree", ["chains", "full"])
@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_taking_turns(tree: str, size: int) -> None:
    unbiased_everywhere(Game(2, sequential=True), config(tree, size=size))


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chains", "full"])
def test_three_turns_with_early_ends(tree: str) -> None:
    # Some paths are rare: fewer draws hold too few of them to tell their standard errors.
    unbiased_everywhere(Game(3, threshold=2.5), config(tree, size=3, threshold=2.5), 2 * DRAWS)


@pytest.mark.parametrize("tree", ["chains", "full"])
def test_group_means_shrink_every_turn_of_every_draw_alike(tree: str) -> None:
    """By half in groups of two: of :func:`test_two_turns`, which shows what the mean over draws is without it."""
    plain, shrunk = gradients(Game(2), config(tree), [MARLOO, AlgoConfig(gamma=MARLOO.gamma)], 100)
    np.testing.assert_allclose(shrunk, plain / 2, atol=1e-12)
    first_turn, second_turn = np.split(plain, [2 * TOKENS], axis=1)
    assert first_turn.any()
    assert second_turn.any()
