from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.algo.returns import completion_returns, influence, tree_returns

rewards = st.floats(-10, 10, allow_nan=False, width=32)


def test_a_leaf_returns_its_reward() -> None:
    assert tree_returns([[1.0, 2.5]], [None], 0.9) == [[1.0, 2.5]]


def test_two_turns_by_hand() -> None:
    # Root with joint rewards 1 and 2; the first is continued by a node with 3 and 5, the second by one with 0 and 1.
    tree = [[1.0, 2.0], [3.0, 5.0], [0.0, 1.0]]
    assert tree_returns(tree, [None, (0, 0), (0, 1)], 0.5) == [[1 + 0.5 * 4, 2 + 0.5 * 0.5], [3.0, 5.0], [0.0, 1.0]]


def test_three_turns_by_hand() -> None:
    tree = [[1.0], [2.0], [4.0]]
    assert tree_returns(tree, [None, (0, 0), (1, 0)], 0.5) == [[1 + 0.5 * (2 + 0.5 * 4)], [2 + 0.5 * 4], [4.0]]


def test_without_discount_nothing_counts_but_the_own_reward() -> None:
    assert tree_returns([[1.0, 2.0], [9.0]], [None, (0, 1)], 0.0) == [[1.0, 2.0], [9.0]]


def test_siblings_not_drawn_by_branching_take_the_mean_continuation() -> None:
    # Joint actions 0 and 2 are continued, to means 4 and 2; 1 takes their mean, 3.
    tree = [[1.0, 1.0, 1.0], [4.0, 4.0], [2.0, 2.0]]
    assert tree_returns(tree, [None, (0, 0), (0, 2)], 1.0)[0] == [5.0, 4.0, 3.0]


def test_a_child_without_joint_actions_counts_as_not_continued() -> None:
    assert tree_returns([[1.0, 2.0], []], [None, (0, 0)], 1.0) == [[1.0, 2.0], []]


def test_two_trees_do_not_mix() -> None:
    tree = [[1.0], [2.0], [10.0], [20.0]]
    assert tree_returns(tree, [None, None, (0, 0), (1, 0)], 1.0) == [[11.0], [22.0], [10.0], [20.0]]


def test_crossed_credit_by_hand() -> None:
    # Joint returns of completions (a, b): (0,0)=1 (0,1)=3 (1,0)=5 (1,1)=9.
    returns, first, second = [1.0, 3.0, 5.0, 9.0], [0, 0, 1, 1], [0, 1, 0, 1]
    assert completion_returns(returns, first, 2) == [2.0, 7.0]
    assert completion_returns(returns, second, 2) == [3.0, 6.0]
    # Overall mean 4.5, total (12.25 + 2.25 + 0.25 + 20.25) = 35; first 4 * 2.5^2 = 25, second 4 * 1.5^2 = 9.
    assert influence(returns, first, 2) == pytest.approx(25 / 35)
    assert influence(returns, second, 2) == pytest.approx(9 / 35)


def test_a_completion_in_no_joint_action_has_no_return() -> None:
    assert completion_returns([2.0], [1], 3) == [None, 2.0, None]
    assert influence([2.0, 2.0], [0, 1], 2) is None


@given(st.lists(rewards, min_size=2, max_size=12), st.integers(0, 2**32))
def test_equal_multisets_give_equal_credit_in_any_order(values: list[float], seed: int) -> None:
    shuffled = random.Random(seed).sample(values, len(values))
    picks = [0] * len(values) + [1] * len(values)
    first, second = completion_returns([*values, *shuffled], picks, 2)
    assert first == second


@given(st.lists(st.lists(rewards, min_size=1, max_size=4), min_size=1, max_size=5), st.floats(0, 1))
def test_a_chain_is_the_discounted_sum_of_means(levels: list[list[float]], gamma: float) -> None:
    chain = [None, *((n, 0) for n in range(len(levels) - 1))]
    got = tree_returns(levels, chain, gamma)
    for n, level in enumerate(levels):
        future = math.fsum(gamma ** (m - n) * math.fsum(levels[m]) / len(levels[m]) for m in range(n + 1, len(levels)))
        assert got[n] == pytest.approx([r + future for r in level], abs=1e-9)
