"""Joint rollout: at every node of one tree level, the acting agents sample completions in one engine batch.

A node is one history shared by its group. Each acting agent samples ``G`` completions there, independently of the
others (section 3 of arXiv 2508.04652). Joint actions pair the completions by index (``aligned``) or combine them
(``crossed``). Each joint action that is continued opens a child node, with one further completion or a group of them.
"""

import itertools
import random
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from magrpo.algo.answers import answer_metrics, list_actions, list_written, measure_answer, read_prompt
from magrpo.checks.envs import observe_problem
from magrpo.checks.runners import generate_completions
from magrpo.config.run import RolloutConfig
from magrpo.engines import PromptTooLong
from magrpo.envs.program import AgentProgram
from magrpo.gateway.sessions import EpisodeTask
from magrpo.plugins import quote_value
from magrpo.run.files import GROUPS, checkpoint_iteration, read_scored
from magrpo.run.store import write_records
from magrpo.seeds import derive_seed
from magrpo.stages.backend import Backend, Team
from magrpo.stages.context import Metrics, StageContext
from magrpo.stages.episodes import episode_metrics, play_episodes
from magrpo.stages.prepare import draw_problems
from magrpo.types import PENDING, PastTurn, Problem, Prompt, Request, RolloutGroup, SamplingParams, ScoredTurn, Turn


@dataclass(frozen=True, slots=True)
class Node:
    """A place in a problem's tree where each acting agent samples ``group_size`` completions."""

    problem: Problem
    path: tuple[int, ...]
    history: tuple[PastTurn, ...]
    sampling: SamplingParams
    group_size: int
    shown: tuple[PastTurn, ...] = ()
    """The history of another problem, in which agents see their partners' texts in place of those of ``history``."""

    def seen_by(self, agent: str) -> tuple[PastTurn, ...]:
        """The history that the agent sees: always with its own texts."""
        if not self.shown:
            return self.history
        return tuple(
            replace(past, texts={name: (past if name == agent else other).texts[name] for name in past.texts})
            for past, other in zip(self.history, self.shown, strict=True)
        )


def sampling_params(config: RolloutConfig) -> SamplingParams:
    """The sampling parameters of training rollouts."""
    return SamplingParams(
        config.temperature, config.top_p, config.top_k, config.max_new_tokens, keep_support=config.keep_support
    )


def root_nodes(problems: Sequence[Problem], config: RolloutConfig) -> list[Node]:
    """The first level: one node for each problem. Warns if truncated sampling without support biases the gradient."""
    sampling = sampling_params(config)
    if sampling.truncates and not sampling.keep_support:
        warnings.warn(
            "rollout.top_p or rollout.top_k is on: tokens are drawn from a truncated distribution, which biases the "
            "gradient; set rollout.keep_support = true",
            stacklevel=2,
        )
    return [Node(problem, (), (), sampling, config.group_size) for problem in problems]


def child_nodes(groups: Sequence[RolloutGroup[ScoredTurn]], config: RolloutConfig, seed: int) -> list[Node]:
    """The next level: a node for each joint action that was neither masked nor ended and that ``config`` continues."""
    nodes = []
    for group in groups:
        continued = [
            index
            for index, turn in enumerate(group.turns)
            if not turn.masked and not has_ended(turn, config.termination_threshold)
        ]
        if config.branching is not None and config.branching < len(continued):
            rng = random.Random(derive_seed(seed, "branch", group.problem.task_id, group.path))
            continued = sorted(rng.sample(continued, config.branching))
        size = 1 if config.tree == "chains" else config.group_size
        nodes += [child_node(group, index, sampling_params(config), size) for index in continued]
    return nodes


def has_ended(turn: ScoredTurn, threshold: float | None) -> bool:
    """Whether the reward of a joint action exceeds ``threshold`` (None: never). A pending reward does not."""
    return threshold is not None and turn.reward != PENDING and turn.reward.total > threshold


def child_node(group: RolloutGroup[ScoredTurn], index: int, sampling: SamplingParams, group_size: int) -> Node:
    """The child node that joint action ``index`` opens."""
    turn = group.turns[index]
    written = list_written(group.history)
    answers = {
        agent: measure_answer(group.actions[agent][i], read_prompt(group.prompts[agent]), written)
        for agent, i in turn.picks.items()
    }
    past = PastTurn(group.texts(turn), turn.reward, turn.reports, answers)
    return Node(group.problem, (*group.path, index), (*group.history, past), sampling, group_size)


def rollout(
    nodes: Sequence[Node], team: Team, backend: Backend, config: RolloutConfig, seed: int
) -> list[RolloutGroup[Turn]]:
    """Sample one tree level as one batch.

    The seed of a completion depends only on ``seed`` and on its place: problem, path, agent and index. If the
    environment is a program, each node holds one episode for every joint action.

    Raises PromptTooLong, naming the problem, if a prompt leaves no room for its completion.
    """
    if isinstance(team.env, AgentProgram):
        tasks = [[EpisodeTask(node.problem, i, node.sampling, seed) for i in range(node.group_size)] for node in nodes]
        return play_episodes(tasks, team, team.env, backend)
    prompts = _build_prompts(nodes, team, backend)
    requests = [
        Request(name, prompt.token_ids, node.sampling, derive_seed(seed, node.problem.task_id, node.path, name, index))
        for node, node_prompts in zip(nodes, prompts, strict=True)
        for name, prompt in node_prompts.items()
        for index in range(node.group_size)
    ]
    started = perf_counter()
    try:
        sampled = generate_completions(backend.engine, requests, backend.progress)
    except PromptTooLong as error:
        # Requests are in the order of nodes: find the node whose range of requests holds the failed one.
        counts = (node.group_size * len(node_prompts) for node, node_prompts in zip(nodes, prompts, strict=True))
        ends = list(itertools.accumulate(counts))
        node = nodes[bisect_right(ends, requests.index(error.request))]
        where = f"problem {quote_value(node.problem.task_id)}, turn {len(node.path) + 1}"
        raise PromptTooLong(f"{where}: {error}", error.request) from None
    backend.sampling.seconds += perf_counter() - started
    backend.sampling.num_tokens += sum(len(action.token_ids) for action in sampled)
    completions = iter(sampled)
    groups = []
    for node, node_prompts in zip(nodes, prompts, strict=True):
        actions = {name: tuple(itertools.islice(completions, node.group_size)) for name in node_prompts}
        pairs_seed = derive_seed(seed, "pairs", node.problem.task_id, node.path)
        picks = joint_actions(len(actions), node.group_size, config.joint_mode, config.crossed_pairs, pairs_seed)
        turns = tuple(Turn(dict(zip(actions, pick, strict=True))) for pick in picks)
        groups.append(RolloutGroup(node.problem, node.path, node.history, node_prompts, actions, turns))
    return groups


def joint_actions(num_agents: int, group_size: int, mode: str, pairs: int | None, seed: int) -> list[tuple[int, ...]]:
    """The joint actions of a node, each with one completion index for each agent.

    ``aligned`` gives ``G`` joint actions, ``crossed`` all ``G^A``. ``pairs`` limits ``crossed`` to a random subset in
    which every completion appears equally often: the ``G^A`` combinations fall into ``G^(A-1)`` rounds of cyclic
    shifts, each of which uses every completion once, and ``pairs / G`` rounds are drawn.
    """
    if mode == "aligned":
        return [(index,) * num_agents for index in range(group_size)]
    if pairs is None or pairs >= group_size**num_agents:
        return list(itertools.product(range(group_size), repeat=num_agents))
    rounds = random.Random(seed).sample(range(group_size ** (num_agents - 1)), pairs // group_size)
    # The digits of a round's number in base G are the shifts of the agents after the first.
    shifts_by_round = [[drawn // group_size**agent % group_size for agent in range(num_agents - 1)] for drawn in rounds]
    return sorted(
        (index, *((index + shift) % group_size for shift in shifts))
        for shifts in shifts_by_round
        for index in range(group_size)
    )


def _build_prompts(nodes: Sequence[Node], team: Team, backend: Backend) -> list[dict[str, Prompt]]:
    """The prompts of the acting agents, one dict for each node."""
    built = []
    for node in nodes:
        acting = team.env.acting(len(node.history))
        prompts = {}
        for agent in team.agents:
            if agent.role in acting:
                seen = observe_problem(team.env, node.problem, agent.role, node.seen_by(agent.name), agent.name)
                prompts[agent.name] = Prompt(seen, backend.render(agent.name, seen))
        built.append(prompts)
    return built


def write_groups(context: StageContext) -> Metrics:
    """Sample one level of the trees, with the weights of a checkpoint."""
    config, step = context.config, context.step
    problems, checkpoint, *parents = context.inputs
    seed = derive_seed(config.train.seed, "rollout", step.iteration, int(step.part))
    if parents:
        nodes = child_nodes(context.read_nodes(parents[0], read_scored), config.rollout, seed)
    else:
        train = context.load_problems(problems)["train"]
        drawn = draw_problems(train, step.iteration, config.rollout.problems_per_iteration, config.train.seed)
        nodes = root_nodes(drawn, config.rollout)
    context.console.expect_items(sum(node.group_size * context.count_acting(len(node.history)) for node in nodes))
    groups: list[RolloutGroup[Turn]] = []
    if nodes:
        backend = context.open_backend(context.resources.serve_checkpoint(checkpoint))
        groups = rollout(nodes, context.team, backend, config.rollout, seed)
    write_records(context.folder / GROUPS, groups)
    context.keep_nodes(groups)
    metrics = _measure_groups(groups)
    if config.train.lag:
        metrics["rollout/lag"] = float(step.iteration - 1 - checkpoint_iteration(checkpoint))
    return metrics


def _measure_groups(groups: Sequence[RolloutGroup[Turn]]) -> dict[str, float]:
    actions = [action for group in groups for action in list_actions(group)]
    num_tokens = sum(len(action.token_ids) for action in actions)
    num_cut_off = sum(action.finish_reason == "length" for action in actions)
    return (
        answer_metrics(groups)
        | episode_metrics(groups)
        | {
            "rollout/groups": float(len(groups)),
            "rollout/joint_actions": float(sum(len(group.turns) for group in groups)),
            "rollout/tokens": float(num_tokens),
            "rollout/response_tokens": num_tokens / len(actions) if actions else 0.0,
            "rollout/cut_off_frac": num_cut_off / len(actions) if actions else 0.0,
        }
    )
