from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.algo.advantages import group_advantages
from magrpo.algo.returns import (
    Bootstrap,
    JointIndex,
    TreeNode,
    completion_returns,
    influence_share,
    tree_returns,
    tree_weights,
    value_by_others,
)

rewards = st.floats(-10, 10, allow_nan=False, width=32)


def node(rewards: Sequence[float], opened_by: JointIndex | None = None, ended: Collection[int] = ()) -> TreeNode:
    """A node; the joint actions ``ended`` earn their reward at every turn that is left."""
    return TreeNode(rewards, [r if j in ended else None for j, r in enumerate(rewards)], opened_by)


def test_a_leaf_returns_its_reward() -> None:
    assert tree_returns([node([1.0, 2.5])], 0.9, 1) == [[1.0, 2.5]]


def test_two_turns_by_hand() -> None:
    # Root with joint rewards 1 and 2; the first is continued by a node with 3 and 5, the second by one with 0 and 1.
    tree = [node([1.0, 2.0]), node([3.0, 5.0], (0, 0)), node([0.0, 1.0], (0, 1))]
    returns = tree_returns(tree, 0.5, 2)
    assert returns == [[1 + 0.5 * 4, 2 + 0.5 * 0.5], [3.0, 5.0], [0.0, 1.0]]
    assert tree_weights(tree, returns, 0.5) == [1.0, 0.25, 0.25]


def test_three_turns_by_hand() -> None:
    tree = [node([1.0]), node([2.0], (0, 0)), node([4.0], (1, 0))]
    returns = tree_returns(tree, 0.5, 3)
    assert returns == [[1 + 0.5 * (2 + 0.5 * 4)], [2 + 0.5 * 4], [4.0]]
    assert tree_weights(tree, returns, 0.5) == [1.0, 0.5, 0.25]


def test_generalised_advantages_by_hand() -> None:
    """A chain of three turns: returns less values are sums of discounted temporal differences."""
    gamma, gae_lambda, values = 0.5, 0.8, [3.0, 2.0, 5.0]
    tree = [node([1.0]), node([2.0], (0, 0)), node([4.0], (1, 0))]
    deltas = [1 + 0.5 * 2 - 3, 2 + 0.5 * 5 - 2, 4 - 5]
    expected = [deltas[0] + 0.4 * deltas[1] + 0.16 * deltas[2], deltas[1] + 0.4 * deltas[2], deltas[2]]
    returns: Any = tree_returns(tree, gamma, 3, Bootstrap(values, gae_lambda))
    assert [found - value for [found], value in zip(returns, values, strict=True)] == pytest.approx(expected)
    assert tree_returns(tree, gamma, 3, Bootstrap(values, 1.0)) == tree_returns(tree, gamma, 3)
    assert tree_returns(tree, gamma, 3, Bootstrap(values, 0.0)) == [[1 + 0.5 * 2], [2 + 0.5 * 5], [4.0]]


def test_returns_go_through_nodes_that_no_critic_values() -> None:
    tree = [node([1.0]), node([2.0], (0, 0)), node([4.0], (1, 0))]
    assert tree_returns(tree, 0.5, 3, Bootstrap([3.0, None, 5.0], 0.0)) == [[1 + 0.5 * (2 + 0.5 * 5)], [4.5], [4.0]]


def test_a_node_without_a_critic_yet_is_valued_by_other_problems() -> None:
    problems, depths = ["a", "a", "b", "c", "c"], [0, 1, 0, 0, 1]
    assert value_by_others(problems, depths, [9.0, 3.0, 1.0, 2.0, None]) == [1.5, 0.0, 5.5, 5.0, 3.0]


def test_without_discount_nothing_counts_but_the_own_reward() -> None:
    tree = [node([1.0, 2.0]), node([7.0], (0, 0)), node([9.0], (0, 1))]
    returns = tree_returns(tree, 0.0, 2)
    assert returns == [[1.0, 2.0], [7.0], [9.0]]
    assert tree_weights(tree, returns, 0.0) == [1.0, 0.0, 0.0]


def test_an_early_end_is_worth_its_reward_at_every_turn_left() -> None:
    """Three turns, all of reward 3 from the first or the second on: no sibling is better for having gone on."""
    tree = [node([3.0, 3.0], ended=[0]), node([3.0, 3.0], (0, 1), ended=[1]), node([3.0, 3.0], (1, 0))]
    returns = tree_returns(tree, 0.5, 3)
    assert returns == [[5.25, 5.25], [4.5, 4.5], [3.0, 3.0]]
    # One of two places of the second turn is a node, and of its two places of the third turn one.
    assert tree_weights(tree, returns, 0.5) == [1.0, 0.25, 0.0625]


def test_a_future_lost_to_the_sandbox_is_no_return() -> None:
    tree = [node([1.0, 2.0]), node([], (0, 0)), node([3.0], (0, 1))]
    returns = tree_returns(tree, 1.0, 2)
    assert returns == [[None, 5.0], [], [3.0]]
    assert tree_weights(tree, returns, 1.0)[2] == 1.0
    assert tree_returns([node([1.0]), node([2.0], (0, 0)), node([], (1, 0))], 1.0, 3) == [[None], [None], []]


def test_two_trees_do_not_mix() -> None:
    tree = [node([1.0]), node([2.0]), node([10.0], (0, 0)), node([20.0], (1, 0))]
    assert tree_returns(tree, 1.0, 2) == [[11.0], [22.0], [10.0], [20.0]]


def test_crossed_credit_by_hand() -> None:
    # Joint returns of completions (a, b): (0,0)=1 (0,1)=3 (1,0)=5 (1,1)=9.
    returns, first, second = [1.0, 3.0, 5.0, 9.0], [0, 0, 1, 1], [0, 1, 0, 1]
    assert completion_returns(returns, first, 2) == [2.0, 7.0]
    assert completion_returns(returns, second, 2) == [3.0, 6.0]
    # Overall mean 4.5, total (12.25 + 2.25 + 0.25 + 20.25) = 35; first 4 * 2.5^2 = 25, second 4 * 1.5^2 = 9.
    assert influence_share(returns, first, 2, 2) == pytest.approx(25 / 35)
    assert influence_share(returns, second, 2, 2) == pytest.approx(9 / 35)
    # With half of four partners each, the luck of partners explains half of 2 * (35 - 25) / (4 - 2) of the 25.
    assert influence_share(returns, first, 2, 4) == pytest.approx((25 - 0.5 * 10) / 35)


def test_a_completion_in_no_joint_action_has_no_return() -> None:
    assert completion_returns([2.0], [1], 3) == [None, 2.0, None]
    assert influence_share([2.0, 2.0], [0, 1], 2, 1) is None


@given(st.lists(rewards, min_size=2, max_size=12), st.integers(0, 2**32))
def test_equal_multisets_give_equal_credit_in_any_order(values: list[float], seed: int) -> None:
    shuffled = random.Random(seed).sample(values, len(values))
    picks = [0] * len(values) + [1] * len(values)
    first, second = completion_returns([*values, *shuffled], picks, 2)
    assert first == second


@given(st.lists(st.lists(rewards, min_size=1, max_size=3), min_size=1, max_size=4), st.floats(0, 1))
def test_a_tree_of_equal_nodes_returns_the_discounted_sum_of_means(levels: list[list[float]], gamma: float) -> None:
    tree, depths = [node(levels[0])], [0]
    for depth, level in enumerate(levels[1:], start=1):
        parents = [n for n, at in enumerate(depths) if at == depth - 1]
        opened = [node(level, (n, j)) for n in parents for j in range(len(levels[depth - 1]))]
        tree += opened
        depths += [depth] * len(opened)
    for depth, found in zip(depths, tree_returns(tree, gamma, len(levels)), strict=True):
        later = range(depth + 1, len(levels))
        future = math.fsum(gamma ** (m - depth) * math.fsum(levels[m]) / len(levels[m]) for m in later)
        assert found == pytest.approx([r + future for r in levels[depth]], abs=1e-9)


# ----------------------------------------------------------------------------------------------------------- lenience
CLIMBING = np.array([[11, -30, 0], [-30, 7, 6], [0, 0, 5]])
"""The climbing game: C. Claus and C. Boutilier, The Dynamics of Reinforcement Learning in Cooperative Multiagent
Systems, AAAI 1998. The best pair costs most if only one of the two chooses it."""


def test_equal_returns_stay_equal_whatever_their_number() -> None:
    """Three times 0.1 has another mean than four times 0.1, if it is the rounded sum that is divided."""
    returns, picks = [0.1] * 7, [0, 0, 0, 0, 1, 1, 1]
    assert completion_returns(returns, picks, 2) == [0.1, 0.1]


def test_lenience_leaves_out_the_worst_joint_actions() -> None:
    returns, picks = [3.0, 1.0, 2.0, 9.0, 5.0], [0, 0, 0, 0, 1]
    assert completion_returns(returns, picks, 3) == [3.75, 5.0, None]
    assert completion_returns(returns, picks, 3, 0.5) == [6.0, 5.0, None]
    assert completion_returns(returns, picks, 3, 0.75) == [9.0, 5.0, None]
    assert completion_returns(returns, picks, 3, 0.99) == [9.0, 5.0, None], "one is always left"
    assert completion_returns(returns, picks, 3, 0.2) == completion_returns(returns, picks, 3), "rounded down"


@pytest.mark.parametrize("seed", range(4))
def test_lenient_agents_find_the_best_pair_of_the_climbing_game_and_others_do_not(seed: int) -> None:
    assert play_climbing(0.75, seed) == CLIMBING.max()
    assert play_climbing(0.0, seed) < 7


def play_climbing(lenience: float, seed: int) -> int:
    """Train two tabular agents on crossed pairs of groups of 8; returns the reward of their likeliest actions."""
    random = np.random.default_rng(seed)
    size = 8
    logits = np.zeros((2, 3))
    for _ in range(400):
        policies = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        actions = [random.choice(3, size, p=policy) for policy in policies]
        pairs = list(itertools.product(range(size), repeat=2))
        returns = [float(CLIMBING[actions[0][i], actions[1][j]]) for i, j in pairs]
        for agent, policy in enumerate(policies):
            values = completion_returns(returns, [pair[agent] for pair in pairs], size, lenience)
            advantages = group_advantages([value for value in values if value is not None], "magrpo")
            scores = np.eye(3)[actions[agent]] - policy  # gradients of the log-probabilities
            logits[agent] += 0.05 * np.mean(np.array(advantages)[:, None] * scores, axis=0)
    best = logits.argmax(axis=1)
    return int(CLIMBING[best[0], best[1]])
