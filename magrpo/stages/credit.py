"""Credit: returns over the trees of one iteration, and the advantage of every completion over its siblings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from magrpo.algo.advantages import group_advantages
from magrpo.algo.returns import (
    TreeNode,
    completion_returns,
    discounted_turns,
    influence,
    rewards_of_best,
    tree_returns,
    tree_weights,
)
from magrpo.config import AlgoConfig, RolloutConfig
from magrpo.stages.rollout import has_ended
from magrpo.types import PENDING, Estimator, JointReward, RolloutGroup, Sample, ScoredTurn

_BIASED = {
    "maremax": "algo.estimator = 'maremax': the baseline, the best sibling's return, depends on the completion that it "
    "judges, so the gradient is biased",
    "std": "algo.normalize = 'std': divided by their standard deviation, groups that hardly differ weigh as much as "
    "groups that differ a lot; the paper does not",
}


@dataclass(frozen=True, slots=True)
class _Node:
    """A node with the joint actions that count: neither masked nor with a future lost to the sandbox."""

    group: RolloutGroup[ScoredTurn]
    turns: tuple[ScoredTurn, ...]
    returns: list[float]
    weight: float
    """Of each completion in the gradient: 1 at a root."""

    def returns_by_completion(self, agent: str) -> list[float | None]:
        """The return of each completion of ``agent``; None: it is in no joint action that counts."""
        return completion_returns(
            self.returns, [turn.picks[agent] for turn in self.turns], len(self.group.actions[agent])
        )


@dataclass(frozen=True, slots=True)
class _Siblings:
    """The nodes whose completions of one agent are compared with each other.

    ``ended``: returns of the problem's episodes that ended at an earlier turn; their completions are none of these.
    """

    nodes: list[_Node]
    ended: list[float]


def credit(
    groups: Sequence[RolloutGroup[ScoredTurn]],
    algo: AlgoConfig,
    agents: Sequence[str],
    estimators: Mapping[str, Estimator] | None = None,
    *,
    rollout: RolloutConfig = RolloutConfig(),  # noqa: B008  # frozen
    num_turns: int = 1,
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """The samples of every agent and the metrics of ``reward/`` and ``credit/``.

    An agent has samples of the nodes at which it acts. ``estimators`` are those of agents with one of their own. Where
    the reward has a local part, an agent's returns are those of the joint reward plus its own; metrics but those of
    its samples are of the joint reward.

    ``groups`` are the nodes of one iteration, in any order, sampled as ``rollout`` says in episodes of ``num_turns``
    turns. Siblings are the completions of one node; with ``rollout.tree = "chains"``, where a later node holds a single
    completion, they are those of one agent and turn of one problem, as AT-GRPO groups them (arXiv 2510.11062). A masked
    joint action counts for nothing: neither for its siblings' baseline nor for its parent's return, and a completion in
    no other joint action is dropped.
    """
    for biased in sorted({algo.normalize, algo.estimator, *(estimators or {}).values()} & _BIASED.keys()):
        warnings.warn(_BIASED[biased], stacklevel=2)
    forest = _Forest(groups, algo, rollout, num_turns)
    nodes = forest.nodes("")
    metrics = _reward_metrics(groups)
    if any(group.path for group in groups):
        metrics["reward/return"] = _mean([value for node in nodes if not node.group.path for value in node.returns])
    has_local = any(turn.reward.local for group in groups for turn in group.turns)
    samples: dict[str, list[Sample]] = {}
    equal: list[bool] = []
    for agent in agents:
        payee = agent if has_local else ""
        siblings = forest.siblings(agent, forest.nodes(payee) if payee else nodes, payee)
        returns = [[node.returns_by_completion(agent) for node in group.nodes] for group in siblings]
        compared = [[value for values in of_nodes for value in values if value is not None] for of_nodes in returns]
        known = [values + group.ended if values else [] for values, group in zip(compared, siblings, strict=True)]
        advantages = group_advantages(known, (estimators or {}).get(agent, algo.estimator), algo.normalize)
        samples[agent] = _samples(agent, siblings, returns, advantages)
        agent_equal = [max(values) == min(values) for values in known if values]
        equal += agent_equal
        metrics[f"credit/{agent}/frac_groups_equal"] = _mean(agent_equal)
        metrics[f"credit/{agent}/advantage_std"] = pstdev([sample.advantage for sample in samples[agent]] or [0.0])
        metrics |= _influence(agent, [node for node in nodes if agent in node.group.actions])
    metrics["reward/frac_groups_equal"] = _mean(equal)
    return samples, metrics


class _Forest:
    """The trees of all problems of an iteration, parents before children. Agent ``""`` gets the joint reward."""

    def __init__(
        self, groups: Sequence[RolloutGroup[ScoredTurn]], algo: AlgoConfig, rollout: RolloutConfig, num_turns: int
    ) -> None:
        self._algo, self._rollout, self._num_turns = algo, rollout, num_turns
        self._groups = sorted(groups, key=lambda group: len(group.path))
        self._kept = [[j for j, turn in enumerate(group.turns) if not turn.masked] for group in self._groups]
        self._place = {(group.problem.task_id, group.path): n for n, group in enumerate(self._groups)}
        assert len(self._place) == len(self._groups), "two nodes at one place of a tree"

    def nodes(self, agent: str) -> list[_Node]:
        """Every node, with the returns that ``agent`` gets and its weight in the gradient."""
        tree = [self._tree_node(n, agent) for n in range(len(self._groups))]
        returns = tree_returns(tree, self._algo.gamma, self._num_turns)
        weights = tree_weights(tree, returns, self._algo.gamma)
        nodes = []
        for group, kept, values, weight in zip(self._groups, self._kept, returns, weights, strict=True):
            counted = [(group.turns[j], value) for j, value in zip(kept, values, strict=True) if value is not None]
            size = max(map(len, group.actions.values()))
            per_completion = weight * self._rollout.group_size / size if group.path else 1.0
            nodes.append(_Node(group, tuple(t for t, _ in counted), [v for _, v in counted], per_completion))
        return nodes

    def siblings(self, agent: str, nodes: Sequence[_Node], payee: str) -> list[_Siblings]:
        """The groups that the advantages of ``agent`` are taken over; ``nodes`` have the returns of ``payee``."""
        own = [node for node in nodes if agent in node.group.actions]
        if self._rollout.tree != "chains":
            return [_Siblings([node], []) for node in own]
        members: dict[tuple[str, int], list[_Node]] = {}
        for node in own:
            members.setdefault((node.group.problem.task_id, len(node.group.path)), []).append(node)
        ended: dict[tuple[str, int], list[float]] = {key: [] for key in members}
        for n, group in enumerate(self._groups):
            absorbed = [reward for reward in self._tree_node(n, payee).absorbed if reward is not None]
            for turn in range(len(group.path) + 1, self._num_turns):
                if (group.problem.task_id, turn) in ended:
                    turns_left = discounted_turns(self._algo.gamma, self._num_turns - turn)
                    ended[group.problem.task_id, turn] += [reward * turns_left for reward in absorbed]
        return [_Siblings(found, ended[key]) for key, found in members.items()]

    def _tree_node(self, n: int, agent: str) -> TreeNode:
        """A child belongs to the joint action at the end of its path."""
        group, kept = self._groups[n], [self._groups[n].turns[j] for j in self._kept[n]]
        opened_by = None
        if group.path:
            parent = self._place[group.problem.task_id, group.path[:-1]]
            opened_by = (parent, self._kept[parent].index(group.path[-1]))
        rewards = [_worth(turn.reward, agent) for turn in kept]
        stays = [0.0] * len(kept) if self._algo.keep_best else rewards
        if self._algo.keep_best:
            earlier = [_worth(past.reward, agent) for past in group.history if past.reward != PENDING]
            rewards = [
                0.0 if turn.reward == PENDING else rewards_of_best([*earlier, reward])[-1]
                for turn, reward in zip(kept, rewards, strict=True)
            ]
        is_last = len(group.path) == self._num_turns - 1
        absorbed = [
            reward if not is_last and has_ended(turn, self._rollout.termination_threshold) else None
            for turn, reward in zip(kept, stays, strict=True)
        ]
        return TreeNode(rewards, absorbed, opened_by)


def _worth(reward: JointReward, agent: str) -> float:
    return reward.total + reward.local.get(agent, 0.0)


def _samples(
    agent: str,
    siblings: Sequence[_Siblings],
    returns: Sequence[Sequence[Sequence[float | None]]],
    advantages: Sequence[Sequence[float]],
) -> list[Sample]:
    """``returns``: by group of siblings, node and completion; ``advantages``: of the completions that have a return."""
    samples = []
    for number, (group, of_nodes, of_group) in enumerate(zip(siblings, returns, advantages, strict=True)):
        left = iter(of_group)
        for node, values in zip(group.nodes, of_nodes, strict=True):
            for action, value in zip(node.group.actions[agent], values, strict=True):
                if value is not None:
                    samples.append(
                        Sample(
                            prompt_ids=node.group.prompts[agent].token_ids,
                            completion_ids=action.token_ids,
                            sampling_logps=action.sampling_logps,
                            returns=value,
                            advantage=next(left),
                            group=number,
                            policy_version=action.policy_version,
                            weight=node.weight,
                            support=action.support,
                        )
                    )
    return samples


def _reward_metrics(groups: Sequence[RolloutGroup[ScoredTurn]]) -> dict[str, float]:
    """Means over the joint actions that count and are priced, of all turns; with several turns also of each."""
    turns = [(len(group.path), turn) for group in groups for turn in group.turns]
    kept = [(depth, turn.reward) for depth, turn in turns if not turn.masked]
    counted = [(depth, reward) for depth, reward in kept if reward != PENDING]
    metrics = {
        "reward/joint": _mean([reward.total for _, reward in counted]),
        "reward/masked_frac": 1 - len(kept) / len(turns) if turns else 0.0,
    }
    for part in dict.fromkeys(name for _, reward in counted for name in reward.parts):
        metrics[f"reward/{part}"] = _mean([reward.parts.get(part, 0.0) for _, reward in counted])
    depths = sorted({depth for depth, _ in counted})
    if len(depths) > 1:
        for depth in depths:
            metrics[f"reward/joint_turn_{depth + 1}"] = _mean([r.total for d, r in counted if d == depth])
    return metrics


def _influence(agent: str, nodes: Sequence[_Node]) -> Mapping[str, float]:
    """How much of the joint return's variance the agent's choice explains; defined by crossed pairs only."""
    shares = []
    for node in nodes:
        picks = [turn.picks[agent] for turn in node.turns]
        if len(picks) > len(set(picks)):
            shares.append(influence(node.returns, picks, len(node.group.actions[agent])))
    known = [share for share in shares if share is not None]
    return {f"credit/{agent}/influence": fmean(known)} if known else {}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
