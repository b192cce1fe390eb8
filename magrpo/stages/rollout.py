"""Joint rollout: the agents whose turn it is answer at every node of one tree level, in one engine batch.

A node is one history shared by its group; each of them samples ``G`` completions there, independently of the others
(section 3 of arXiv 2508.04652). Joint actions pair the completions by index (``aligned``) or combine them
(``crossed``); those that are continued open one child node each, for one further completion or a group of them.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from magrpo.config import AgentConfig, RolloutConfig
from magrpo.interfaces import Engine, Env, Progress
from magrpo.seeds import derive_seed
from magrpo.types import (
    PENDING,
    Observation,
    PastTurn,
    Problem,
    Prompt,
    Request,
    RolloutGroup,
    SamplingParams,
    ScoredTurn,
    Turn,
)

_OBSERVERS = 16
Render = Callable[[str, Observation], tuple[int, ...]]
"""Turns an agent's observation into token ids."""


@dataclass(frozen=True, slots=True)
class Node:
    """A place in a problem's tree where agents act, ``group_size`` times each."""

    problem: Problem
    path: tuple[int, ...]
    history: tuple[PastTurn, ...]
    sampling: SamplingParams
    group_size: int


def roots(problems: Sequence[Problem], config: RolloutConfig) -> list[Node]:
    """The first level: one node for each problem.

    Warns that the gradient will be biased where tokens are drawn from a support that is not kept.
    """
    sampling = sampling_params(config)
    if sampling.truncates and not sampling.keep_support:
        warnings.warn(
            "rollout.top_p or rollout.top_k is on: tokens are drawn from a part of the policy's distribution, and the "
            "gradient is biased; set rollout.keep_support = true",
            stacklevel=2,
        )
    return [Node(problem, (), (), sampling, config.group_size) for problem in problems]


def children(groups: Sequence[RolloutGroup[ScoredTurn]], config: RolloutConfig, seed: int) -> list[Node]:
    """The next turn: a node for each joint action that is continued, as ``config.tree`` says.

    Neither a masked joint action nor one that ended its episode is continued.
    """
    nodes = []
    for group in groups:
        going = [
            j
            for j, turn in enumerate(group.turns)
            if not turn.masked and not has_ended(turn, config.termination_threshold)
        ]
        if not going:
            continue
        rng = random.Random(derive_seed(seed, "branch", group.problem.task_id, group.path))
        size = 1 if config.tree == "chains" else config.group_size
        nodes += [extend(group, j, sampling_params(config), size) for j in _continued(group, going, config, rng)]
    return nodes


def has_ended(turn: ScoredTurn, threshold: float | None) -> bool:
    """Whether the reward of a joint action exceeds ``threshold``. One that is not priced yet ends nothing."""
    return threshold is not None and turn.reward != PENDING and turn.reward.total > threshold


def _continued(
    group: RolloutGroup[ScoredTurn], going: Sequence[int], config: RolloutConfig, rng: random.Random
) -> Sequence[int]:
    """Those of the joint actions ``going`` that open a node."""
    if config.tree == "best":
        return [max(going, key=lambda j: group.turns[j].reward.total)]
    if config.tree == "random":
        return [rng.choice(going)]
    if config.branching is not None and config.branching < len(going):
        return sorted(rng.sample(going, config.branching))
    return going


def extend(group: RolloutGroup[ScoredTurn], index: int, sampling: SamplingParams, group_size: int) -> Node:
    """The child node that joint action ``index`` opens."""
    turn = group.turns[index]
    past = PastTurn(group.texts(turn), turn.reward, turn.reports)
    return Node(group.problem, (*group.path, index), (*group.history, past), sampling, group_size)


def rollout(
    nodes: Sequence[Node],
    *,
    agents: Sequence[AgentConfig],
    env: Env,
    render: Render,
    engine: Engine,
    config: RolloutConfig,
    seed: int,
    progress: Progress | None = None,
) -> list[RolloutGroup[Turn]]:
    """Sample one tree level: all nodes, agents and siblings as one batch.

    Each completion's seed follows from ``seed``, its problem, path, agent and index alone.
    """
    prompts = _prompts(nodes, agents, env, render)
    requests = [
        Request(
            agent=name,
            prompt_ids=prompt.token_ids,
            sampling=node.sampling,
            seed=derive_seed(seed, node.problem.task_id, node.path, name, index),
        )
        for node, node_prompts in zip(nodes, prompts, strict=True)
        for name, prompt in node_prompts.items()
        for index in range(node.group_size)
    ]
    answers = iter(engine.generate(requests, progress))
    groups = []
    for node, node_prompts in zip(nodes, prompts, strict=True):
        actions = {name: tuple(itertools.islice(answers, node.group_size)) for name in node_prompts}
        picks = joint_actions(
            len(node_prompts),
            node.group_size,
            config.joint_mode,
            config.crossed_pairs,
            derive_seed(seed, "pairs", node.problem.task_id, node.path),
        )
        turns = tuple(Turn(dict(zip(node_prompts, pick, strict=True))) for pick in picks)
        groups.append(RolloutGroup(node.problem, node.path, node.history, node_prompts, actions, turns))
    return groups


def joint_actions(num_agents: int, group_size: int, mode: str, pairs: int | None, seed: int) -> list[tuple[int, ...]]:
    """The joint actions of a node, as one completion index for each agent.

    ``aligned`` gives ``G`` of them, ``crossed`` all ``G^A``. With ``pairs`` a random subset in which every completion
    appears equally often: the ``G^A`` combinations fall into ``G^(A-1)`` rounds of cyclic shifts, each of which uses
    every completion once, and ``pairs / G`` rounds are drawn.
    """
    if mode == "aligned":
        return [(index,) * num_agents for index in range(group_size)]
    if pairs is None or pairs >= group_size**num_agents:
        return list(itertools.product(range(group_size), repeat=num_agents))
    rng = random.Random(seed)
    rounds = rng.sample(range(group_size ** (num_agents - 1)), pairs // group_size)
    shifts = [[r // group_size**a % group_size for a in range(num_agents - 1)] for r in rounds]
    return sorted(
        (index, *((index + shift) % group_size for shift in shift_of))
        for shift_of in shifts
        for index in range(group_size)
    )


def sampling_params(config: RolloutConfig) -> SamplingParams:
    """The sampling parameters of training rollouts."""
    return SamplingParams(
        config.temperature, config.top_p, config.top_k, config.max_new_tokens, keep_support=config.keep_support
    )


def _prompts(nodes: Sequence[Node], agents: Sequence[AgentConfig], env: Env, render: Render) -> list[dict[str, Prompt]]:
    """The prompts at every node, of the agents that act there.

    Observed side by side: an environment may wait for something outside.
    """
    acting = [[agent for agent in agents if agent.role in env.acting(len(n.history))] for n in nodes]
    asked = [(n.problem, a.role, n.history, a.name) for n, members in zip(nodes, acting, strict=True) for a in members]
    with ThreadPoolExecutor(_OBSERVERS) as pool:
        observations = pool.map(lambda arguments: env.observe(*arguments), asked)
        prompts = iter([Prompt(seen, render(name, seen)) for seen, (*_, name) in zip(observations, asked, strict=True)])
    return [{agent.name: next(prompts) for agent in members} for members in acting]
