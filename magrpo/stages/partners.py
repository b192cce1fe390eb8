"""Partners: pairs an iteration's completions with those that partners wrote for the same problem in earlier iterations.

Old completions are on disk, so a pair costs programs and a call of the reward, but no tokens. More partners make the
return of a completion depend less on the luck of this iteration's partners. Old completions are not trained on: they
only act as partners. Each is weighted by its probability under the present policies over its probability when it was
sampled, at most 1 (Ionides, 2008; V-trace, arXiv 1802.01561).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

import torch

from magrpo.algo.returns import partner_weight
from magrpo.model.collate import collate, plan_batches
from magrpo.model.model_runs import ModelRuns
from magrpo.model.policy import Policy
from magrpo.model.side_by_side import hold_cores
from magrpo.run.files import (
    DRAWN,
    PAIRS,
    checkpoint_iteration,
    list_outputs,
    locate_weights,
    read_drawn,
    read_groups,
)
from magrpo.run.steps import Step
from magrpo.run.store import write_records
from magrpo.stages.context import Metrics, StageContext
from magrpo.stages.score import score
from magrpo.types import Action, DrawnProblem, OldPairs, RolloutGroup, Sample, ScoredTurn, T, Turn
from magrpo_kernels import LossOptions

MIN_WEIGHT = 0.01
"""Weight below which an old partner is left out, because its programs cost more than it tells. The choice does not
depend on any completion of this iteration."""
Drawn = Mapping[str, tuple[int, ...]]
"""The latest iterations that sampled each problem, the newest first."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A problem that earlier iterations sampled, too: its node in this iteration, and its old completions.

    ``old``: equally many completions of each agent, the newest first. Old partner ``k`` of an agent consists of
    completion ``k`` of every other agent.
    """

    group: RolloutGroup[ScoredTurn]
    old: Mapping[str, Sequence[Action]]

    def list_samples(self, agent: str) -> list[Sample]:
        """The old completions of an agent, as samples for a forward pass."""
        prompt_ids = self.group.prompts[agent].token_ids
        return [
            Sample(prompt_ids, a.token_ids, a.sampling_logps, 0.0, 0.0, 0, a.policy_version, support=a.support)
            for a in self.old[agent]
        ]


def take_newest(earlier: Sequence[RolloutGroup[T]], count: int) -> dict[str, tuple[Action, ...]]:
    """The first ``count`` completions of each agent. ``earlier``: nodes of one problem, the newest first."""
    return {
        agent: tuple(chain.from_iterable(node.actions[agent] for node in earlier))[:count]
        for agent in earlier[0].actions
    }


def add_drawn(drawn: Drawn, task_ids: Iterable[str], iteration: int, keep: int) -> dict[str, tuple[int, ...]]:
    """Add ``iteration`` to the list of each problem that it sampled, and keep the newest ``keep`` of each list."""
    return {**drawn, **{task_id: (iteration, *drawn.get(task_id, ()))[:keep] for task_id in task_ids}}


def compute_log_ratios(
    policy: Policy, agent: str, samples: Sequence[Sample], options: LossOptions, micro_batch_tokens: int
) -> list[float]:
    """The log ratio of each completion: its log-probability now minus its log-probability when it was sampled."""
    runs = ModelRuns(policy)
    runs.probe_model(agent)
    log_ratios = [0.0] * len(samples)
    for rows in plan_batches(samples, micro_batch_tokens, runs.shares_prompts[agent]):
        batch = collate(samples, rows, policy.device)
        logps = runs.compute_logps(agent, policy.active(agent), batch, options)
        lengths = [len(samples[i].completion_ids) for i in batch.samples]
        for i, now in zip(batch.samples, torch.split(logps, lengths), strict=True):
            log_ratios[i] = math.fsum([*now.tolist(), *(-logp for logp in samples[i].sampling_logps)])
    return log_ratios


def weigh_partners(log_ratios: Mapping[str, Sequence[float]], agent: str) -> list[float]:
    """The weights of the old partners of ``agent`` for one problem, from the ratios of every agent's completions."""
    others = [ratios for name, ratios in log_ratios.items() if name != agent]
    return [partner_weight(ratios) for ratios in zip(*others, strict=True)]


@dataclass(frozen=True, slots=True)
class Pairing:
    """The joint actions of an agent's completions with old partners, one partner after another.

    ``node``: a node in which the other agents have their old completions. ``weights``: one for each partner.
    """

    agent: str
    weights: Sequence[float]
    node: RolloutGroup[Turn]

    def collect_rewards(self, scored: RolloutGroup[ScoredTurn]) -> OldPairs:
        """The rewards of the joint actions, given the node with its scores."""
        size = len(scored.actions[self.agent])
        values = [None if turn.masked else turn.reward.earned_by(self.agent) for turn in scored.turns]
        rewards = tuple(tuple(values[start : start + size]) for start in range(0, len(values), size))
        return OldPairs(scored.problem.task_id, self.agent, tuple(self.weights), rewards)


def pair_completions(repeated: Repeated, agent: str, weights: Sequence[float]) -> Pairing:
    """Pair today's completions of ``agent`` with every old partner that weighs at least :data:`MIN_WEIGHT`."""
    group = repeated.group
    chosen = [k for k, weight in enumerate(weights) if weight >= MIN_WEIGHT]
    actions = {
        name: today if name == agent else tuple(repeated.old[name][k] for k in chosen)
        for name, today in group.actions.items()
    }
    turns = tuple(
        Turn({name: i if name == agent else k for name in actions})
        for k in range(len(chosen))
        for i in range(len(actions[agent]))
    )
    node = RolloutGroup(group.problem, group.path, group.history, group.prompts, actions, turns)
    return Pairing(agent, [weights[k] for k in chosen], node)


def write_pairs(context: StageContext) -> Metrics:
    """Pair the completions of an iteration with old partners; write the rewards, and what the next iteration needs."""
    config, inputs, resources = context.config, context.inputs, context.resources
    groups = context.read_scored()
    drawn: Drawn = {}
    for pointer in list_outputs(inputs, "partners"):
        drawn = read_drawn(context.store.folder(pointer))
    repeated = _find_repeated(context, groups, drawn)
    log_ratios = _compare_policies(context, repeated) if repeated else []
    weighed = [
        (problem, agent.name, weigh_partners(ratios, agent.name))
        for problem, ratios in zip(repeated, log_ratios, strict=True)
        for agent in config.agents
        if agent.trained
    ]
    pairings = [pair_completions(*entry) for entry in weighed]
    nodes = [pairing.node for pairing in pairings]
    scored, stats = score(
        nodes, context.team, resources.sandbox, context.memory.reports, context.advance, resources.reward_processes
    )
    pairs = [pairing.collect_rewards(node) for pairing, node in zip(pairings, scored, strict=True)]
    write_records(context.folder / PAIRS, pairs)
    keep = math.ceil(config.rollout.old_partners / config.rollout.group_size)
    drawn = add_drawn(drawn, [group.problem.task_id for group in groups], context.step.iteration, keep)
    write_records(context.folder / DRAWN, (DrawnProblem(*entry) for entry in drawn.items()))
    metrics = {
        "partners/used": float(sum(len(pairing.weights) for pairing in pairings)),
        "partners/joint_actions": float(sum(len(node.turns) for node in nodes)),
        "sandbox/partner_executions": float(len(stats.ran)),
    }
    if all_weights := [weight for _, _, weights in weighed for weight in weights]:
        metrics["partners/weight"] = fmean(all_weights)
    return metrics


def _find_repeated(context: StageContext, groups: Sequence[RolloutGroup[ScoredTurn]], drawn: Drawn) -> list[Repeated]:
    """The problems of ``groups`` that were sampled before, with their old completions.

    Earlier rollouts are no inputs of the step, but the digest of ``drawn``, which is one, covers theirs.
    """
    store = context.store
    today = {group.problem.task_id: group for group in groups}
    earlier: dict[str, list[RolloutGroup[Turn]]] = {task_id: [] for task_id in today}
    for iteration in sorted({i for task_id in today for i in drawn.get(task_id, ())}, reverse=True):
        pointer = store.pointer(Step("rollout", iteration, "0").folder)
        store.check_files(pointer)
        for node in read_groups(store.folder(pointer)):
            if iteration in drawn.get(node.problem.task_id, ()) and node.problem.task_id in today:
                earlier[node.problem.task_id].append(node)
    count = context.config.rollout.old_partners
    return [Repeated(today[task_id], take_newest(nodes, count)) for task_id, nodes in earlier.items() if nodes]


def _compare_policies(context: StageContext, repeated: Sequence[Repeated]) -> list[dict[str, list[float]]]:
    """The log ratios of all old completions under the weights that sampled today, by problem and agent."""
    config = context.config
    [checkpoint] = list_outputs(context.inputs, "update")
    context.resources.free_gpus()
    policy = context.resources.policy
    weights = locate_weights(context.store.folder(checkpoint), policy.agents)
    options = LossOptions(config.rollout.temperature, checked=True, impl=config.algo.kernel)
    log_ratios: list[dict[str, list[float]]] = [{} for _ in repeated]
    with hold_cores(policy.device):
        if policy.sources != weights:
            policy.load(checkpoint_iteration(checkpoint), weights)
        tokens = config.optim.count_micro_batch_tokens(policy.device.type)
        for agent in policy.agents:
            samples = [problem.list_samples(agent) for problem in repeated]
            found = iter(compute_log_ratios(policy, agent, list(chain.from_iterable(samples)), options, tokens))
            for ratios, members in zip(log_ratios, samples, strict=True):
                ratios[agent] = [next(found) for _ in members]
    return log_ratios
