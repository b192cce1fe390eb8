"""Critic: values the nodes of an iteration for the credit of its completions, then learns from their returns.

A critic reads observations, never completions, and its values are taken before it learns from the returns of the same
iteration, so they bias no gradient. Only training needs it: policies act without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from magrpo.algo.returns import value_by_others
from magrpo.config.agents import AgentConfig
from magrpo.config.sections import CriticConfig
from magrpo.interfaces import Progress
from magrpo.model.critic import Critic, Fit, count_features, encode_prompts, read_critics, write_critics
from magrpo.model.policy import Policy
from magrpo.model.side_by_side import hold_cores
from magrpo.run.files import CRITICS, VALUES, list_outputs
from magrpo.run.store import write_records
from magrpo.stages.context import Metrics, StageContext
from magrpo.stages.credit import JOINT, CreditRules, Critique, NodeKey, critic_targets
from magrpo.types import NodeValues, RolloutGroup, ScoredTurn

ScoredGroups = Sequence[RolloutGroup[ScoredTurn]]


@dataclass(frozen=True, slots=True)
class Observations:
    """The nodes that one critic values, in order, with their features."""

    critic: str
    """The agent whose critic it is, or :data:`magrpo.stages.credit.JOINT` for the central one."""
    nodes: ScoredGroups
    features: Float[Tensor, "N D"]

    @property
    def keys(self) -> list[NodeKey]:
        """The keys of the nodes."""
        return [(node.problem.task_id, node.path) for node in self.nodes]


def judge_nodes(
    groups: ScoredGroups,
    observed: Sequence[Observations],
    critics: Mapping[str, Critic],
    config: CriticConfig,
    rules: CreditRules,
) -> tuple[list[NodeValues], dict[str, float]]:
    """Value the nodes, then let every critic learn from the returns; returns the values and the metrics ``critic/``.

    A critic that has learnt nothing yet values a node by the mean return of other problems at the same turn.
    """
    values: dict[NodeKey, dict[str, float]] = {(group.problem.task_id, group.path): {} for group in groups}
    for seen in observed:
        given = _value(groups, seen, critics[seen.critic], rules)
        for key, value in zip(seen.keys, given, strict=True):
            values[key][seen.critic] = value
    judging = replace(rules, critique=Critique(values, config.gae_lambda))
    metrics: dict[str, float] = {}
    for seen in observed:
        metrics |= _learn(groups, seen, critics[seen.critic], config, judging)
    return [NodeValues(*key, by_critic) for key, by_critic in values.items()], metrics


def _value(groups: ScoredGroups, seen: Observations, critic: Critic, rules: CreditRules) -> list[float]:
    if critic.has_learnt:
        return critic.value(seen.features)
    unknown = Critique({key: {seen.critic: 0.0} for key in seen.keys}, gae_lambda=1.0)
    returns = critic_targets(groups, seen.critic, replace(rules, critique=unknown))
    problems = [node.problem.task_id for node in seen.nodes]
    return value_by_others(problems, [len(node.path) for node in seen.nodes], [returns.get(key) for key in seen.keys])


def _learn(
    groups: ScoredGroups, seen: Observations, critic: Critic, config: CriticConfig, rules: CreditRules
) -> dict[str, float]:
    """Fit a critic to the returns of the nodes that it valued; returns its metrics."""
    targets = critic_targets(groups, seen.critic, rules)
    chosen = [i for i, key in enumerate(seen.keys) if key in targets]
    if not chosen:
        return {}
    wanted = [targets[seen.keys[i]] for i in chosen]
    fit = Fit.of([rules.critique.values[seen.keys[i]][seen.critic] for i in chosen], wanted)
    critic.fit(seen.features[chosen], wanted, config.epochs)
    prefix = f"critic/{seen.critic}/" if seen.critic != JOINT else "critic/"
    metrics = {f"{prefix}value_loss": fit.loss}
    if fit.explained_variance is not None:
        metrics[f"{prefix}explained_variance"] = fit.explained_variance
    return metrics


def observe_nodes(
    groups: ScoredGroups, names: Sequence[str], policy: Policy, micro_batch_tokens: int, progress: Progress
) -> list[Observations]:
    """The observations of the critics called ``names``.

    An agent's critic reads the agent's prompts. The central one reads the features of all agents side by side, with
    zeros for those that do not act at a node.
    """
    wanted = policy.agents if JOINT in names else names
    features: dict[str, dict[int, Tensor]] = {}
    for agent in wanted:
        acting = [n for n, group in enumerate(groups) if agent in group.prompts]
        prompts = [groups[n].prompts[agent].token_ids for n in acting]
        features[agent] = {}
        if prompts:
            encoded = encode_prompts(policy, agent, prompts, micro_batch_tokens, progress)
            features[agent] = dict(zip(acting, encoded, strict=True))
    observed = []
    for name in names:
        if name != JOINT:
            acting = list(features[name])
            if acting:
                own = torch.stack([features[name][n] for n in acting])
                observed.append(Observations(name, [groups[n] for n in acting], own))
            continue
        absent = {agent: torch.zeros(count_features(policy, agent)) for agent in wanted}
        rows = [torch.cat([features[agent].get(n, absent[agent]) for agent in wanted]) for n in range(len(groups))]
        observed.append(Observations(JOINT, groups, torch.stack(rows)))
    return observed


def list_critics(agents: Sequence[AgentConfig], rules: CreditRules) -> list[str]:
    """The critics of the trained agents, each once."""
    named = [rules.critic_of(agent.name) for agent in agents if agent.trained]
    return list(dict.fromkeys(name for name in named if name is not None))


def write_values(context: StageContext) -> Metrics:
    """Value the nodes of an iteration, let the critics learn, and write the values and the critics."""
    config = context.config
    groups = context.read_scored()
    rules = CreditRules.of(config, Critique())
    names = list_critics(config.agents, rules)
    readers = [agent.name for agent in config.agents] if JOINT in names else names
    context.console.expect_items(sum(agent in group.prompts for group in groups for agent in readers))
    context.resources.free_gpus()
    policy = context.resources.policy
    with hold_cores(policy.device):
        tokens = config.optim.count_micro_batch_tokens(policy.device.type)
        observed = observe_nodes(groups, names, policy, tokens, context.advance)
        critics = {seen.critic: Critic(seen.features.shape[1], config.critic.lr) for seen in observed}
        for pointer in list_outputs(context.inputs, "critic"):
            critics |= read_critics(context.store.folder(pointer) / CRITICS, config.critic.lr)
        values, metrics = judge_nodes(groups, observed, critics, config.critic, rules)
    write_records(context.folder / VALUES, values)
    write_critics(context.folder / CRITICS, critics)
    return metrics
