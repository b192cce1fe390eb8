"""Returns over a problem's tree, and the credit of one completion.

Means are taken with :func:`math.fsum`, which rounds once: equal rewards give equal returns whatever their order, so a
group is degenerate exactly when its returns say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

JointIndex = tuple[int, int]
"""A joint action: the number of its node, and its index there."""


def tree_returns(
    rewards: Sequence[Sequence[float]], opened_by: Sequence[JointIndex | None], gamma: float
) -> list[list[float]]:
    """The return of every joint action: ``R_j = r_j + gamma * mean_i R_i`` over the joint actions ``i`` of its child.

    A leaf has ``R_j = r_j``. This is the Monte-Carlo return of arXiv 2508.04652, section 3, over a tree in which every
    node holds a group. ``rewards[n]`` are the joint rewards of node ``n``; ``opened_by[n]`` is the joint action that
    led there, None for a root. A parent comes before its children.

    Where only some joint actions of a node were continued (``branching``), each of the others takes the mean
    continuation of those that were: siblings must not differ by a future that only some of them were given.
    """
    assert len(rewards) == len(opened_by), "one opener for each node"
    returns = [list(node) for node in rewards]
    continued: list[dict[int, float]] = [{} for _ in rewards]
    for n in reversed(range(len(rewards))):
        if continued[n]:
            typical = mean(list(continued[n].values()))
            returns[n] = [r + gamma * continued[n].get(j, typical) for j, r in enumerate(rewards[n])]
        opener = opened_by[n]
        if opener is not None and returns[n]:
            parent, j = opener
            assert parent < n, "a parent comes before its children"
            continued[parent][j] = mean(returns[n])
    return returns


def completion_returns(returns: Sequence[float], picks: Sequence[int], group_size: int) -> list[float | None]:
    """The return of each of an agent's ``G`` completions: the mean over the joint actions that contain it.

    ``returns[j]`` and ``picks[j]``: the return of joint action ``j`` and the completion it is made of. None: no joint
    action contains the completion. With aligned pairs the mean has one member; with crossed pairs it averages the
    partners' luck out, a counterfactual credit.
    """
    held: list[list[float]] = [[] for _ in range(group_size)]
    for value, pick in zip(returns, picks, strict=True):
        held[pick].append(value)
    return [mean(values) if values else None for values in held]


def influence(returns: Sequence[float], picks: Sequence[int], group_size: int) -> float | None:
    """Share of the variance of a node's joint returns that the choice of one agent explains, 0 to 1.

    The between-groups sum of squares over the total one (eta squared). None when all joint returns are equal.
    """
    overall = mean(returns)
    total = math.fsum((value - overall) ** 2 for value in returns)
    if max(returns) == min(returns) or total == 0.0:
        return None
    own = completion_returns(returns, picks, group_size)
    between = math.fsum((own[pick] - overall) ** 2 for pick in picks)  # type: ignore[operator]  # picked: has a return
    return between / total


def mean(values: Sequence[float]) -> float:
    """The mean, rounded the same way whatever the order."""
    return math.fsum(values) / len(values)
