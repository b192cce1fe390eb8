"""Credit: returns over the trees of one iteration, and the advantage of every completion over its siblings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from magrpo.algo.advantages import group_advantages
from magrpo.algo.returns import completion_returns, influence, tree_returns
from magrpo.config import AlgoConfig
from magrpo.types import PENDING, Estimator, RolloutGroup, Sample, ScoredTurn


@dataclass(frozen=True, slots=True)
class _Node:
    """A group with what is left of its joint actions when the masked ones are gone."""

    group: RolloutGroup[ScoredTurn]
    turns: tuple[ScoredTurn, ...]
    returns: list[float]


def credit(
    groups: Sequence[RolloutGroup[ScoredTurn]],
    algo: AlgoConfig,
    agents: Sequence[str],
    estimators: Mapping[str, Estimator] | None = None,
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """The samples of every agent and the metrics of ``reward/`` and ``credit/``.

    An agent has samples of the nodes at which it acts. ``estimators`` are those of agents with one of their own. Where
    the reward has a local part, an agent's returns are those of the joint reward plus its own; metrics but those of
    its samples are of the joint reward.

    ``groups`` are all tree levels of one iteration, in any order. A masked joint action counts for nothing: neither
    for its siblings' baseline nor for its parent's return, and a completion in no other joint action is dropped.
    """
    if algo.normalize == "std":
        warnings.warn(
            "algo.normalize = 'std': divided by their standard deviation, groups that hardly differ weigh as much as "
            "groups that differ a lot; the paper does not",
            stacklevel=2,
        )
    nodes = _with_returns(groups, algo.gamma)
    metrics = _reward_metrics(groups)
    if any(group.path for group in groups):
        metrics["reward/return"] = _mean([value for node in nodes if not node.group.path for value in node.returns])
    has_local = any(turn.reward.local for group in groups for turn in group.turns)
    samples: dict[str, list[Sample]] = {}
    equal: list[bool] = []
    for agent in agents:
        own = [node for node in nodes if agent in node.group.actions]
        paid = _with_returns(groups, algo.gamma, agent) if has_local else nodes
        mine = [node for node in paid if agent in node.group.actions]
        held = [completion_returns(n.returns, [t.picks[agent] for t in n.turns], _size(n, agent)) for n in mine]
        known = [[value for value in node if value is not None] for node in held]
        advantages = group_advantages(known, (estimators or {}).get(agent, algo.estimator), algo.normalize)
        samples[agent] = _samples(agent, own, held, advantages)
        agent_equal = [max(values) == min(values) for values in known if values]
        equal += agent_equal
        metrics[f"credit/{agent}/frac_groups_equal"] = _mean(agent_equal)
        metrics[f"credit/{agent}/advantage_std"] = pstdev([sample.advantage for sample in samples[agent]] or [0.0])
        metrics |= _influence(agent, own)
    metrics["reward/frac_groups_equal"] = _mean(equal)
    return samples, metrics


def _with_returns(groups: Sequence[RolloutGroup[ScoredTurn]], gamma: float, agent: str = "") -> list[_Node]:
    """Parents before children; of the joint reward, or of what ``agent`` gets.

    A child belongs to the joint action at the end of its path.
    """
    ordered = sorted(groups, key=lambda group: len(group.path))
    kept = [[j for j, turn in enumerate(group.turns) if not turn.masked] for group in ordered]
    place = {(group.problem.task_id, group.path): n for n, group in enumerate(ordered)}
    assert len(place) == len(ordered), "two nodes at one place of a tree"
    opened_by = []
    for group in ordered:
        parent = place[group.problem.task_id, group.path[:-1]] if group.path else None
        opened_by.append(None if parent is None else (parent, kept[parent].index(group.path[-1])))
    rewards = [[_worth(group.turns[j], agent) for j in indices] for group, indices in zip(ordered, kept, strict=True)]
    returns = tree_returns(rewards, opened_by, gamma)
    return [
        _Node(group, tuple(group.turns[j] for j in indices), values)
        for group, indices, values in zip(ordered, kept, returns, strict=True)
    ]


def _worth(turn: ScoredTurn, agent: str) -> float:
    return turn.reward.total + turn.reward.local.get(agent, 0.0)


def _samples(
    agent: str, nodes: Sequence[_Node], held: Sequence[Sequence[float | None]], advantages: Sequence[Sequence[float]]
) -> list[Sample]:
    samples = []
    for number, (node, returns, values) in enumerate(zip(nodes, held, advantages, strict=True)):
        left = iter(values)
        for action, value in zip(node.group.actions[agent], returns, strict=True):
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
            shares.append(influence(node.returns, picks, _size(node, agent)))
    known = [share for share in shares if share is not None]
    return {f"credit/{agent}/influence": fmean(known)} if known else {}


def _size(node: _Node, agent: str) -> int:
    return len(node.group.actions[agent])


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
