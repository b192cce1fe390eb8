"""Credit: returns over the trees of one iteration, and the advantage of every completion over its siblings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import NamedTuple

from magrpo.algo.advantages import ESTIMATORS, EstimatorName, group_advantages
from magrpo.algo.episodes import credit_episodes
from magrpo.algo.returns import (
    Bootstrap,
    TreeNode,
    completion_returns,
    discounted_turns,
    exact_mean,
    influence_share,
    join_ties,
    preference_scores,
    tree_returns,
    tree_weights,
)
from magrpo.algo.stats import mean_or_zero
from magrpo.config.run import RunConfig
from magrpo.config.sections import AlgoConfig, RolloutConfig
from magrpo.errors import ConfigError
from magrpo.run.files import COMPARISONS, list_outputs, read_values, samples_file
from magrpo.run.store import write_records
from magrpo.stages.context import Metrics, StageContext
from magrpo.stages.rollout import has_ended
from magrpo.types import PENDING, Action, Comparison, JointReward, RolloutGroup, Sample, ScoredTurn


@dataclass(frozen=True, slots=True)
class _ValuedNode:
    """A node with its valid joint actions: neither masked nor with a future lost to the sandbox."""

    group: RolloutGroup[ScoredTurn]
    turns: list[ScoredTurn]
    returns: list[float]
    weight: float
    """Weight of the node in the gradient; 1 at a root."""
    completion_weight: float
    """Weight of each completion in the gradient, which makes up for lost siblings; 1 at a root."""
    absorbed: list[float]
    """Rewards of the joint actions that ended their episode here; each is earned again at every later turn."""
    value: float
    """The critic's value; 0 without a critic."""


class _Completion(NamedTuple):
    """A completion that is part of a valid joint action of ``node``."""

    node: _ValuedNode
    action: Action
    own_return: float
    gain: float
    """The return less the critic's value of the node."""


NodeKey = tuple[str, tuple[int, ...]]
"""The problem and the path of a node."""
JOINT = ""
"""The name, which no agent has, of the return of the joint reward alone, which the central critic values."""


@dataclass(frozen=True, slots=True)
class Critique:
    """The values that critics give to nodes: ``values[node][critic]``, where a critic is an agent or :data:`JOINT`."""

    values: Mapping[NodeKey, Mapping[str, float]] = field(default_factory=dict)
    gae_lambda: float = 1.0


@dataclass(frozen=True, slots=True)
class CreditRules:
    """Everything besides the nodes that credit depends on; the arguments of :func:`credit`."""

    algo: AlgoConfig
    estimators: Mapping[str, EstimatorName]
    rollout: RolloutConfig
    num_turns: int
    critique: Critique = field(default_factory=Critique)

    @classmethod
    def of(cls, config: RunConfig, critique: Critique | None = None) -> "CreditRules":
        """The rules of a run; without ``critique``, its agents have no critics."""
        return cls(config.algo, config.own_estimators, config.rollout, config.env.num_turns, critique or Critique())

    def estimator_of(self, agent: str) -> EstimatorName:
        """The agent's estimator: its own, or that of ``algo``."""
        return self.estimators.get(agent, self.algo.estimator)

    def critic_of(self, agent: str) -> str | None:
        """The critic that judges ``agent``; None: its estimator has none."""
        match ESTIMATORS[self.estimator_of(agent)].critic:
            case "own":
                return agent
            case "central":
                return JOINT
            case "none":
                return None


@dataclass(frozen=True, slots=True)
class _Siblings:
    """The nodes whose completions of one agent are compared with each other."""

    nodes: list[_ValuedNode]
    ended_returns: list[float]
    """Returns of the problem's episodes that ended at an earlier turn and so have no completion in ``nodes``."""

    def list_completions(self, agent: str, lenience: float) -> list[_Completion]:
        """The completions of ``agent`` that are part of a valid joint action."""
        completions = []
        for node in self.nodes:
            actions = node.group.actions[agent]
            picks = [turn.picks[agent] for turn in node.turns]
            values = completion_returns(node.returns, picks, len(actions), lenience)
            completions += [
                _Completion(node, action, own_return=value, gain=value - node.value)
                for action, value in zip(actions, values, strict=True)
                if value is not None
            ]
        return completions


def credit(
    groups: Sequence[RolloutGroup[ScoredTurn]], agents: Sequence[str], rules: CreditRules
) -> tuple[dict[str, list[Sample]], dict[str, float]]:
    """The samples of every agent and the metrics of ``reward/``, ``signal/`` and ``credit/``.

    An agent has samples from the nodes at which it acts. If the reward has local parts, the return of an agent counts
    the joint reward plus the agent's local reward; the metrics measure the joint reward, except for those computed from
    the agent's samples. An agent with a critic needs the critic's value of every node that the critic reads.

    ``groups`` are the nodes of one iteration, in any order. Siblings are the completions of one node. With
    ``rollout.tree = "chains"``, where a later node holds a single completion, siblings are the completions of one agent
    at one turn of one problem, as in AT-GRPO (arXiv 2510.11062). A masked joint action is ignored: it enters neither
    the baseline of its siblings nor the return of its parent, and a completion that is part of no other joint action is
    dropped. The calls of programs are credited by :mod:`magrpo.algo.episodes`.
    """
    algo = rules.algo
    if any(group.episodes for group in groups):
        by_agent = {agent: rules.estimator_of(agent) for agent in agents}
        samples, metrics = credit_episodes(groups, by_agent, algo.normalize, algo.siblings)
        return samples, _reward_metrics(groups, rules) | metrics
    forest = _Forest(groups, rules)
    nodes = forest.value_nodes(JOINT)
    has_local = any(turn.reward.local for group in groups for turn in group.turns)
    metrics = _reward_metrics(groups, rules)
    if any(group.path for group in groups):
        metrics["reward/return"] = mean_or_zero(
            [value for node in nodes if not node.group.path for value in node.returns]
        )
    samples = {}
    all_equal: list[bool] = []
    for agent in agents:
        critic = rules.critic_of(agent)
        own_nodes = has_local or critic is not None
        groups_of_agent = forest.group_siblings(agent, forest.value_nodes(agent, critic) if own_nodes else nodes)
        samples[agent], groups_equal = _credit_agent(agent, groups_of_agent, rules)
        all_equal += groups_equal
        metrics[f"credit/{agent}/frac_groups_equal"] = mean_or_zero(groups_equal)
        metrics[f"credit/{agent}/advantage_std"] = pstdev([sample.advantage for sample in samples[agent]] or [0.0])
        metrics |= _influence_metric(agent, nodes)
    metrics["reward/frac_groups_equal"] = mean_or_zero(all_equal)
    return samples, metrics


def _credit_agent(agent: str, groups: Sequence[_Siblings], rules: CreditRules) -> tuple[list[Sample], list[bool]]:
    """Compare the returns of the agent's completions within each group of siblings.

    Returns the agent's samples, and for each group whether nothing can be learnt from it, as all advantages are 0.
    """
    estimator = rules.estimator_of(agent)
    has_critic = ESTIMATORS[estimator].critic != "none"
    samples: list[Sample] = []
    groups_equal: list[bool] = []
    for number, group in enumerate(groups):
        completions = group.list_completions(agent, rules.algo.lenience)
        if not completions:
            continue
        returns = [completion.gain for completion in completions]
        if not has_critic:
            # Episodes that ended earlier enter the baseline of siblings too. They come last.
            returns += group.ended_returns
        advantages = group_advantages(returns, estimator, rules.algo.normalize)
        # Without the advantages of episodes that ended earlier, which have no completion here to train.
        for completion, advantage in zip(completions, advantages[: len(completions)], strict=True):
            samples.append(_build_sample(agent, completion, advantage, number))
        groups_equal.append(not any(advantages))
    return samples, groups_equal


class _Forest:
    """The trees of all problems of an iteration, with parents before their children."""

    def __init__(self, groups: Sequence[RolloutGroup[ScoredTurn]], rules: CreditRules) -> None:
        self._algo, self._rollout, self._num_turns = rules.algo, rules.rollout, rules.num_turns
        self._critique = rules.critique
        self._groups = sorted(groups, key=lambda group: len(group.path))
        self._unmasked = [[j for j, turn in enumerate(group.turns) if not turn.masked] for group in self._groups]
        self._index = {(group.problem.task_id, group.path): n for n, group in enumerate(self._groups)}
        assert len(self._index) == len(self._groups), "two nodes at one place of a tree"

    def value_nodes(self, agent: str, critic: str | None = None) -> list[_ValuedNode]:
        """Every node with its weight and the returns of ``agent``, or of :data:`JOINT`.

        With ``critic`` the nodes have its values, which enter the returns of the turns before.
        """
        tree = [self._tree_node(n, agent) for n in range(len(self._groups))]
        bootstrap = None if critic is None else Bootstrap(self._find_values(critic), self._critique.gae_lambda)
        returns = tree_returns(tree, self._algo.gamma, self._num_turns, bootstrap)
        weights = tree_weights(tree, returns, self._algo.gamma)
        nodes = []
        root_sizes: dict[str, int] = {}
        for n, (group, node_returns) in enumerate(zip(self._groups, returns, strict=True)):
            turns, valid_returns = [], []
            for j, value in zip(self._unmasked[n], node_returns, strict=True):
                if value is not None:
                    turns.append(group.turns[j])
                    valid_returns.append(value)
            # Only completions that are part of a valid joint action are trained on. A later node may hold fewer of them
            # than its root: each then stands for several.
            size = max(len({turn.picks[agent] for turn in turns}) for agent in group.actions)
            root_size = root_sizes.setdefault(group.problem.task_id, size)
            completion_weight = weights[n] * root_size / size if group.path and size else 1.0
            absorbed = [reward for reward in tree[n].absorbed if reward is not None]
            critic_value = None if bootstrap is None else bootstrap.values[n]
            node = _ValuedNode(
                group, turns, valid_returns, weights[n], completion_weight, absorbed, value=critic_value or 0.0
            )
            nodes.append(node)
        return nodes

    def _find_values(self, critic: str) -> list[float | None]:
        """The values by node; None where the critic has no observation, as its agent does not act there."""
        values: list[float | None] = []
        for group in self._groups:
            if critic != JOINT and critic not in group.actions:
                values.append(None)
                continue
            by_critic = self._critique.values.get((group.problem.task_id, group.path), {})
            if critic not in by_critic:
                raise ConfigError(
                    "credit: an estimator with a critic needs its values, which only a whole run computes: use "
                    "magrpo train, or another estimator"
                )
            values.append(by_critic[critic])
        return values

    def group_siblings(self, agent: str, nodes: Sequence[_ValuedNode]) -> list[_Siblings]:
        """The groups of siblings within which the advantages of ``agent`` are computed."""
        agent_nodes = [node for node in nodes if agent in node.group.actions]
        if self._rollout.tree != "chains":
            return [_Siblings([node], []) for node in agent_nodes]
        by_turn: dict[tuple[str, int], _Siblings] = {}
        for node in agent_nodes:
            key = node.group.problem.task_id, len(node.group.path)
            by_turn.setdefault(key, _Siblings([], [])).nodes.append(node)
        for node in nodes:
            for turn in range(len(node.group.path) + 1, self._num_turns):
                if siblings := by_turn.get((node.group.problem.task_id, turn)):
                    factor = discounted_turns(self._algo.gamma, self._num_turns - turn)
                    siblings.ended_returns.extend(reward * factor for reward in node.absorbed)
        return list(by_turn.values())

    def _tree_node(self, n: int, agent: str) -> TreeNode:
        group = self._groups[n]
        turns = [group.turns[j] for j in self._unmasked[n]]
        opened_by = None
        if group.path:
            task_id = group.problem.task_id
            parent = self._index.get((task_id, group.path[:-1]))
            if parent is None:
                raise ValueError(
                    f"credit: {task_id}: node {group.path} has lost its parent; a stage that leaves out a node must "
                    "leave out the nodes below it"
                )
            opened_by = (parent, self._unmasked[parent].index(group.path[-1]))
        rewards = [turn.reward.earned_by(agent) for turn in turns]
        is_last = len(group.path) == self._num_turns - 1
        absorbed = [
            reward if not is_last and has_ended(turn, self._rollout.termination_threshold) else None
            for turn, reward in zip(turns, rewards, strict=True)
        ]
        return TreeNode(rewards, absorbed, opened_by)


def _build_sample(agent: str, completion: _Completion, advantage: float, group: int) -> Sample:
    node, action = completion.node, completion.action
    return Sample(
        prompt_ids=node.group.prompts[agent].token_ids,
        completion_ids=action.token_ids,
        sampling_logps=action.sampling_logps,
        returns=completion.own_return,
        advantage=advantage,
        group=group,
        policy_version=action.policy_version,
        weight=node.completion_weight,
        support=action.support,
    )


def _reward_metrics(groups: Sequence[RolloutGroup[ScoredTurn]], rules: CreditRules) -> dict[str, float]:
    """Means over unmasked, priced joint actions: over all turns and, if there are several, over each turn."""
    num_turns = sum(len(group.turns) for group in groups)
    unmasked = [(len(group.path), turn.reward) for group in groups for turn in group.turns if not turn.masked]
    priced = [(depth, reward) for depth, reward in unmasked if reward != PENDING]
    metrics = {
        "reward/joint": mean_or_zero([reward.total for _, reward in priced]),
        "reward/masked_frac": 1 - len(unmasked) / num_turns if num_turns else 0.0,
    }
    compared = _list_compared(groups, rules.rollout.tree)
    for part in dict.fromkeys(name for _, reward in priced for name in reward.parts):
        metrics[f"reward/{part}"] = mean_or_zero([reward.parts.get(part, 0.0) for _, reward in priced])
        if compared:
            metrics[f"signal/{part}"] = fmean(
                len({reward.parts.get(part, 0.0) for reward in one}) > 1 for one in compared
            )
    depths = sorted({depth for depth, _ in priced})
    if len(depths) > 1:
        for depth in depths:
            totals = [reward.total for at, reward in priced if at == depth]
            metrics[f"reward/joint_turn_{depth + 1}"] = mean_or_zero(totals)
    return metrics


def _list_compared(groups: Sequence[RolloutGroup[ScoredTurn]], tree: str) -> list[list[JointReward]]:
    """The rewards that completions are compared by: those of a node or, in chains, of a problem's nodes at one turn.

    Training can change a part of the reward only where such rewards differ in it. A single reward is left out.
    """
    by_place: dict[tuple[str, object], list[JointReward]] = {}
    for group in groups:
        place = group.problem.task_id, len(group.path) if tree == "chains" else group.path
        rewards = [turn.reward for turn in group.turns if not turn.masked and turn.reward != PENDING]
        by_place.setdefault(place, []).extend(rewards)
    return [rewards for rewards in by_place.values() if len(rewards) > 1]


def _influence_metric(agent: str, nodes: Sequence[_ValuedNode]) -> Mapping[str, float]:
    """The share of the variance of the joint return that the agent's choice explains; needs crossed pairs."""
    shares = []
    for node in nodes:
        if agent in node.group.actions:
            picks = [turn.picks[agent] for turn in node.turns]
            if len(picks) > len(set(picks)):
                sizes = {name: len(actions) for name, actions in node.group.actions.items()}
                num_partners = math.prod(sizes.values()) // sizes[agent]
                shares.append(influence_share(node.returns, picks, sizes[agent], num_partners))
    defined = [share for share in shares if share is not None]
    return {f"credit/{agent}/influence": max(0.0, fmean(defined))} if defined else {}


def prefer_joint_actions(
    groups: Sequence[RolloutGroup[ScoredTurn]], agents: Sequence[str], rules: CreditRules
) -> tuple[dict[str, list[Sample]], list[Comparison], dict[str, float]]:
    """The samples of every agent, the comparisons of their joint actions, and the metrics, for the loss ``madpo``.

    All joint actions of a node with different joint returns are pairs; local rewards do not count. The advantage of a
    completion is that of the first epoch, in which every margin is 0: half of ``preference_beta`` for each pair, over
    the number of the node's pairs. A node counts once in the divisor of the loss, however many completions it has.
    """
    samples: dict[str, list[Sample]] = {agent: [] for agent in agents}
    comparisons: list[Comparison] = []
    scale = rules.algo.preference_beta / 2
    for number, node in enumerate(_Forest(groups, rules).value_nodes(JOINT)):
        returns = join_ties(node.returns)
        scores = preference_scores(returns)
        positions: dict[str, tuple[int, ...]] = {}
        for agent, actions in node.group.actions.items():
            picks = [turn.picks[agent] for turn in node.turns]
            pushes = [0.0] * len(actions)
            for pick, score in zip(picks, scores, strict=True):
                pushes[pick] += scale * score
            values = completion_returns(node.returns, picks, len(actions))
            found: dict[int, int] = {}
            for i, value in enumerate(values):
                if value is not None:
                    found[i] = len(samples[agent])
                    completion = _Completion(node, actions[i], own_return=value, gain=value)
                    sample = _build_sample(agent, completion, pushes[i], number)
                    # The loss of a node is a mean over its pairs, which needs nothing to make up for lost completions.
                    counts = node.weight / len(set(picks))
                    samples[agent].append(replace(sample, weight=node.weight, counts=counts))
            positions[agent] = tuple(found[pick] for pick in picks)
        comparisons.append(Comparison(tuple(returns), positions))
    metrics = _reward_metrics(groups, rules)
    for agent in agents:
        advantages = [sample.advantage for sample in samples[agent]]
        metrics[f"credit/{agent}/advantage_std"] = pstdev(advantages or [0.0])
    ties = [len(set(comparison.returns)) < 2 for comparison in comparisons if comparison.returns]
    metrics["reward/frac_groups_equal"] = mean_or_zero(ties)
    return samples, comparisons, metrics


def critic_targets(groups: Sequence[RolloutGroup[ScoredTurn]], critic: str, rules: CreditRules) -> dict[NodeKey, float]:
    """The target of ``critic`` for each node that it values: the mean return of the node's joint actions.

    With ``gae_lambda`` below 1, returns hold the values of ``rules`` for later turns. A node without a joint action
    that counts has no target.
    """
    nodes = _Forest(groups, rules).value_nodes(critic, critic)
    return {
        (node.group.problem.task_id, node.group.path): exact_mean(node.returns)
        for node in nodes
        if node.returns and (critic == JOINT or critic in node.group.actions)
    }


def write_samples(context: StageContext) -> Metrics:
    """Compute the return and the advantage of every completion of an iteration, and write the samples."""
    config = context.config
    values = {}
    for pointer in list_outputs(context.inputs, "critic"):
        values = {(node.task_id, node.path): node.values for node in read_values(context.store.folder(pointer))}
    groups = context.read_scored()
    names = [agent.name for agent in config.agents]
    rules = CreditRules.of(config, Critique(values, config.critic.gae_lambda))
    if config.algo.loss == "madpo":
        samples, comparisons, metrics = prefer_joint_actions(groups, names, rules)
        write_records(context.folder / COMPARISONS, comparisons)
    else:
        samples, metrics = credit(groups, names, rules)
    for name, samples_of_agent in samples.items():
        write_records(context.folder / samples_file(name), samples_of_agent)
    num_trained = sum(len(samples[agent.name]) for agent in config.agents if agent.trained)
    return {**metrics, "credit/samples": float(num_trained)}
