"""Returns over a problem's tree, and the credit of one completion.

Means use :func:`math.fsum`, which rounds once: equal rewards give equal returns in any order, so a group counts as
degenerate exactly when its returns are equal.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magrpo.types import ROUNDING

JointIndex = tuple[int, int]
"""A joint action: the number of its node, and its index in the node."""


class TreeNode(NamedTuple):
    """The values that the returns of one node depend on; ``J`` counts its joint actions that are not masked."""

    rewards: Sequence[float]
    """Joint rewards (J,)."""
    absorbed: Sequence[float | None]
    """Reward (J,) of every later turn if the joint action ended the episode; None if the episode went on."""
    opened_by: JointIndex | None
    """The joint action that led here; None for a root."""


Returns = list[list[float | None]]
"""The return of every joint action, by node; None if its future was lost, so that it is ignored."""


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A critic's values of nodes, and their share in the returns of the turns before."""

    values: Sequence[float | None]
    """Value of each node; None: the critic does not value it, and returns go through it unchanged."""
    gae_lambda: float
    """Share of the sampled return in the worth of a node; the rest is the node's value. 1: values enter no return."""

    def mix(self, n: int, sampled: float) -> float:
        """The worth of node ``n`` whose joint actions have the mean return ``sampled``."""
        value = self.values[n]
        return sampled if value is None else value + self.gae_lambda * (sampled - value)


def tree_returns(
    nodes: Sequence[TreeNode], gamma: float, num_turns: int, bootstrap: Bootstrap | None = None
) -> Returns:
    """The return of every joint action, ``R_j = r_j + gamma f_j``: arXiv 2508.04652, section 3.

    ``f_j`` is the mean return of the joint actions in the node that ``j`` opened, and 0 at the last turn. In ``nodes``,
    parents come before their children. A node without joint actions (all were masked) is lost, and so is the joint
    action that opened it, or that went on without opening one.

    A joint action that ended its episode is absorbing: its reward is earned again at every turn that is left, so ending
    early with a good reward is worth as much as keeping it to the end.

    With ``bootstrap`` these are the lambda-returns of generalised advantage estimation (GAE, arXiv 1506.02438): the
    worth of a node is ``(1 - lambda) V + lambda f`` instead of ``f``, with the critic's value ``V``. A return less the
    value of its own node is then the sum of ``(gamma lambda)^k delta`` over the temporal differences ``delta``.
    """
    depths: list[int] = []
    for node in nodes:
        assert node.opened_by is None or node.opened_by[0] < len(depths), "a parent comes before its children"
        depths.append(0 if node.opened_by is None else depths[node.opened_by[0]] + 1)
    returns: Returns = [[] for _ in nodes]
    futures: list[dict[int, float]] = [{} for _ in nodes]
    for n, node in reversed(list(enumerate(nodes))):
        turns_left = num_turns - 1 - depths[n]
        assert turns_left >= 0, f"a node at turn {depths[n]} of {num_turns}"
        returns[n] = _node_returns(node, futures[n], gamma, turns_left)
        if node.opened_by is not None:
            parent, j = node.opened_by
            valid = [value for value in returns[n] if value is not None]
            if valid:
                worth = exact_mean(valid)
                futures[parent][j] = worth if bootstrap is None else bootstrap.mix(n, worth)
    return returns


def _node_returns(node: TreeNode, futures: dict[int, float], gamma: float, turns_left: int) -> list[float | None]:
    if not turns_left:
        return list(node.rewards)
    turns_worth = discounted_turns(gamma, turns_left)
    returns: list[float | None] = []
    for j, (reward, absorbed) in enumerate(zip(node.rewards, node.absorbed, strict=True)):
        future = futures.get(j) if absorbed is None else absorbed * turns_worth
        returns.append(None if future is None else reward + gamma * future)
    return returns


def tree_weights(nodes: Sequence[TreeNode], returns: Returns, gamma: float) -> list[float]:
    """The weight of each node in the gradient of ``E[sum_t gamma^t r_t]``; 1 for a root.

    For every turn ``t``, the gradient holds ``gamma^t`` times the mean over the places reached at turn ``t``, one for
    each joint action of the turn before. So the weight of a node is the weight of its parent times ``gamma``, divided
    by the number of the parent's joint actions.
    """
    weights: list[float] = []
    for node in nodes:
        if node.opened_by is None:
            weights.append(1.0)
            continue
        parent, _ = node.opened_by
        joined = zip(nodes[parent].absorbed, returns[parent], strict=True)
        valid = [reward for reward, value in joined if value is not None]
        num_open = valid.count(None)
        # ``num_open`` cancels, but for rounding: weights would differ in the last bit from those of earlier runs.
        weights.append(weights[parent] * gamma * num_open / (len(valid) * num_open) if num_open else 0.0)
    return weights


def discounted_turns(gamma: float, num_turns: int) -> float:
    """``1 + gamma + ... + gamma^(num_turns - 1)``."""
    return math.fsum(gamma**turn for turn in range(num_turns))


def value_by_others(problems: Sequence[str], depths: Sequence[int], returns: Sequence[float | None]) -> list[float]:
    """Value each node by the mean of other problems' nodes at the same turn: the values of a critic without data.

    They do not depend on the completions of the node's own problem, so they bias no gradient. A node without a return
    (None) counts for no other; 0 if there is no other problem.
    """
    by_depth: dict[int, list[tuple[str, float]]] = {}
    for problem, depth, value in zip(problems, depths, returns, strict=True):
        if value is not None:
            by_depth.setdefault(depth, []).append((problem, value))
    values = []
    for problem, depth in zip(problems, depths, strict=True):
        others = [value for other, value in by_depth.get(depth, []) if other != problem]
        values.append(exact_mean(others) if others else 0.0)
    return values


def completion_returns(
    returns: Sequence[float], picks: Sequence[int], group_size: int, lenience: float = 0.0
) -> list[float | None]:
    """The return of each of an agent's ``G`` completions: the mean over the joint actions that contain it.

    ``returns[j]`` and ``picks[j]`` are the return of joint action ``j`` and the completion in it. A completion that is
    part of no joint action has the return None. With crossed pairs the mean averages out the partners' luck, which
    makes it a counterfactual credit.

    With ``lenience`` that share of a completion's joint actions, rounded down, is left out, the worst first: lenient
    learning, L. Panait, K. Tuyls and S. Luke, *Theoretical Advantages of Lenient Learners*, JMLR 9 (2008).
    """
    by_completion: list[list[float]] = [[] for _ in range(group_size)]
    for value, pick in zip(returns, picks, strict=True):
        by_completion[pick].append(value)
    return [
        exact_mean(sorted(values)[math.floor(lenience * len(values)) :]) if values else None for values in by_completion
    ]


def preference_scores(returns: Sequence[float]) -> list[float]:
    """For each of ``J`` joint actions, the pairs that it wins less those that it loses, over the number of pairs.

    Two joint actions are a pair if their returns differ. All 0 if there is none.
    """
    ordered = sorted(returns)
    wins = [bisect_left(ordered, value) for value in returns]
    losses = [len(ordered) - bisect_right(ordered, value) for value in returns]
    num_pairs = max(sum(wins), 1)
    return [(won - lost) / num_pairs for won, lost in zip(wins, losses, strict=True)]


def join_ties(returns: Sequence[float]) -> list[float]:
    """Make returns equal that differ by rounding only: each takes the lowest within :data:`ROUNDING` of its own.

    The difference is absolute, because a shift of the reward may have cancelled the leading digits, or relative if
    returns are above 1. For methods in which the size of a difference does not matter: a division by the deviation of a
    group, and preferences.
    """
    lowest = -math.inf
    joined: dict[float, float] = {}
    for value in sorted(returns):
        if value - lowest > ROUNDING * max(1.0, abs(value)):
            lowest = value
        joined[value] = lowest
    return [joined[value] for value in returns]


def influence_share(returns: Sequence[float], picks: Sequence[int], group_size: int, num_partners: int) -> float | None:
    """The share of a node's variance of returns that one agent's choice explains (eta squared); None: no variance.

    ``num_partners``: the number of joint actions of each completion if all were sampled. Where fewer were, the means of
    completions also differ by the luck of their partners. What is expected of that is subtracted, so that the share of
    a choice without effect is 0 on average, and may be below 0.
    """
    overall = exact_mean(returns)
    total = math.fsum((value - overall) ** 2 for value in returns)
    if max(returns) == min(returns) or total == 0.0:
        return None
    means = completion_returns(returns, picks, group_size)
    between = math.fsum((means[pick] - overall) ** 2 for pick in picks)  # type: ignore[operator]  # picked: has a return
    num_picked = len(set(picks))
    unsampled = 1 - len(returns) / (num_picked * num_partners)
    if unsampled > 0 and len(returns) > num_picked:
        # The variance of a mean of some partners' returns, drawn without replacement, times their number, for each
        # completion. All partners occur equally often, so that the overall mean does not vary.
        between -= unsampled * num_picked * (total - between) / (len(returns) - num_picked)
    return between / total


def exact_mean(values: Sequence[float]) -> float:
    """The mean, rounded the same way whatever the order; exact if all values are equal, so that they stay equal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)
