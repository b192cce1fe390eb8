"""Joint rollout: at every node of one tree level, the acting agents sample completions in one engine batch.

A node is one history shared by its group. Each acting agent samples ``G`` completions there, independently of the
others (section 3 of arXiv 2508.04652). Joint actions pair the completions by index (``aligned``) or combine them
(``crossed``). Each joint action that is continued opens a child node, with one further completion or a group of them.
"""

import itertools
import random
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from magrpo.algo.answers import answer_metrics, list_actions, measure_answer, read_prompt
from magrpo.checks.envs import observe_problem
from magrpo.config.sections import RolloutConfig
from magrpo.engines import PromptTooLong
from magrpo.envs.program import AgentProgram
from magrpo.errors import quote_value
from magrpo.gateway.sessions import EpisodeTask
from magrpo.run.files import GROUPS, checkpoint_iteration, read_scored
from magrpo.run.store import Pointer, write_records
from magrpo.seeds import derive_seed
from magrpo.stages.backend import Backend, Cache, ScoreStats, Team
from magrpo.stages.context import Metrics, StageContext
from magrpo.stages.episodes import episode_metrics, play_episodes
from magrpo.stages.prepare import draw_problems, draw_spare_problems
from magrpo.stages.score import score
from magrpo.types import (
    PENDING,
    Action,
    PastTurn,
    Problem,
    Prompt,
    Request,
    RolloutGroup,
    SamplingParams,
    ScoredTurn,
    Turn,
)


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
    sampled: Mapping[str, tuple[Action, ...]] = field(default_factory=dict)
    """Completions that were sampled before, by agent: the first ones of its group."""

    def list_missing(self, agent: str) -> range:
        """The indices of the agent's completions that are left to sample."""
        return range(len(self.sampled.get(agent, ())), self.group_size)

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


def child_nodes(groups: Sequence[RolloutGroup[ScoredTurn]], config: RolloutConfig) -> list[Node]:
    """The next level: a node for each joint action that was neither masked nor ended."""
    size = 1 if config.tree == "chains" else config.group_size
    return [
        child_node(group, index, sampling_params(config), size)
        for group in groups
        for index, turn in enumerate(group.turns)
        if not turn.masked and not has_ended(turn, config.termination_threshold)
    ]


def has_ended(turn: ScoredTurn, threshold: float | None) -> bool:
    """Whether the reward of a joint action exceeds ``threshold`` (None: never). A pending reward does not."""
    return threshold is not None and turn.reward != PENDING and turn.reward.total > threshold


def child_node(group: RolloutGroup[ScoredTurn], index: int, sampling: SamplingParams, group_size: int) -> Node:
    """The child node that joint action ``index`` opens."""
    turn = group.turns[index]
    earlier = [past.texts for past in group.history]
    answers = {
        agent: measure_answer(group.actions[agent][i], read_prompt(group.prompts[agent]), group.problem.prompt, earlier)
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
        for index in node.list_missing(name)
    ]
    try:
        sampled = backend.generate(requests, backend.progress) if requests else []
    except PromptTooLong as error:
        # Requests are in the order of nodes: find the node whose range of requests holds the failed one.
        pairs = zip(nodes, prompts, strict=True)
        counts = (sum(len(node.list_missing(name)) for name in node_prompts) for node, node_prompts in pairs)
        ends = list(itertools.accumulate(counts))
        node = nodes[bisect_right(ends, requests.index(error.request))]
        where = f"problem {quote_value(node.problem.task_id)}, turn {len(node.path) + 1}"
        raise PromptTooLong(f"{where}: {error}", error.request) from None
    completions = iter(sampled)
    groups = []
    for node, node_prompts in zip(nodes, prompts, strict=True):
        actions = {
            name: (*node.sampled.get(name, ()), *itertools.islice(completions, len(node.list_missing(name))))
            for name in node_prompts
        }
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
    chosen = []
    for drawn in rounds:
        # The digits of a round's number in base G are the shifts of the agents after the first.
        shifts = _read_digits(drawn, group_size, num_agents - 1)
        for index in range(group_size):
            chosen.append((index, *((index + shift) % group_size for shift in shifts)))
    return sorted(chosen)


def _read_digits(number: int, base: int, num_digits: int) -> list[int]:
    """The last ``num_digits`` digits of a number in ``base``, the last one first."""
    digits = []
    for _ in range(num_digits):
        number, digit = divmod(number, base)
        digits.append(digit)
    return digits


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups of the problems that teach something, and the probes of those that do not."""

    groups: list[RolloutGroup[Turn]]
    dropped: list[RolloutGroup[Turn]]
    num_executions: int
    """Number of programs that the probes ran."""


def select_problems(
    problems: Sequence[Problem], team: Team, backend: Backend, config: RolloutConfig, seed: int
) -> Selection:
    """Sample whole groups for the first ``problems_per_iteration`` problems whose probes earn different rewards.

    This is the dynamic sampling of DAPO, arXiv 2503.14476, with a probe in place of the whole group. The probes of the
    next problems, as many as are missing, are one batch, and so are the completions that the chosen groups lack. The
    groups are those that a rollout without probes samples. If there are fewer such problems, there are fewer groups; if
    there is none, the probes of the first batch are the groups, which train nothing.
    """
    assert config.probe_size is not None
    probing = config.model_copy(update={"group_size": config.probe_size})
    chosen: list[Node] = []
    dropped: list[RolloutGroup[Turn]] = []
    ran = ScoreStats()
    # The stage that scores the groups runs all their programs, so its files do not depend on what this process ran.
    cache: Cache = {}
    waiting = list(problems)
    while waiting and (missing := config.problems_per_iteration - len(chosen)):
        batch, waiting = waiting[:missing], waiting[missing:]
        probes = rollout(root_nodes(batch, probing), team, backend, probing, seed)
        scored, stats = score(probes, team, backend.sandbox, cache)
        ran.add(stats)
        for node, probe, scored_probe in zip(root_nodes(batch, config), probes, scored, strict=True):
            if _rewards_differ(scored_probe):
                chosen.append(replace(node, sampled=probe.actions))
            else:
                dropped.append(probe)
    if not chosen:
        first, rest = dropped[: config.problems_per_iteration], dropped[config.problems_per_iteration :]
        return Selection(first, rest, len(ran.ran))
    return Selection(rollout(chosen, team, backend, config, seed), dropped, len(ran.ran))


def _rewards_differ(group: RolloutGroup[ScoredTurn]) -> bool:
    """Whether two joint actions that the sandbox could judge have different rewards, local ones included."""
    rewards = [(turn.reward.total, turn.reward.local) for turn in group.turns if not turn.masked]
    return any(reward != rewards[0] for reward in rewards)


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
    if config.rollout.probe_size is not None:
        return _write_selection(context, problems, checkpoint, seed)
    if parents:
        nodes = child_nodes(read_scored(context.store.folder(parents[0])), config.rollout)
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
    metrics = measure_groups(groups)
    if config.train.lag:
        metrics["rollout/lag"] = float(step.iteration - 1 - checkpoint_iteration(checkpoint))
    return metrics


def _write_selection(context: StageContext, problems: Pointer, checkpoint: Pointer, seed: int) -> Metrics:
    """Sample the groups of the problems that teach something. All sampled tokens count."""
    config = context.config.rollout
    train = context.load_problems(problems)["train"]
    drawn = draw_problems(train, context.step.iteration, config.problems_per_iteration, context.config.train.seed)
    drawn += draw_spare_problems(train, drawn, context.step.iteration, config, context.config.train.seed)
    context.console.expect_items(config.problems_per_iteration * config.group_size * context.count_acting(0))
    backend = context.open_backend(context.resources.serve_checkpoint(checkpoint))
    selection = select_problems(drawn, context.team, backend, config, seed)
    write_records(context.folder / GROUPS, selection.groups)
    metrics = measure_groups(selection.groups)
    dropped_tokens = count_sampled(selection.dropped)
    metrics["rollout/tokens"] += dropped_tokens
    metrics["rollout/joint_actions"] += sum(len(group.turns) for group in selection.dropped)
    return metrics | {
        "rollout/probed_problems": float(len(selection.groups) + len(selection.dropped)),
        "rollout/dropped_tokens": float(dropped_tokens),
        "sandbox/probe_executions": float(selection.num_executions),
    }


def count_sampled(groups: Sequence[RolloutGroup[Turn]]) -> int:
    """The number of tokens of all completions."""
    return sum(len(action.token_ids) for group in groups for action in list_actions(group))


def measure_groups(groups: Sequence[RolloutGroup[Turn]]) -> dict[str, float]:
    """The metrics ``rollout/`` of sampled nodes."""
    actions = [action for group in groups for action in list_actions(group)]
    num_tokens = count_sampled(groups)
    num_cut_off = sum(action.finish_reason == "length" for action in actions)
    # A program that set a lower limit, or stop strings, ended these itself (Call.ends_early).
    calls = [call for group in groups for episode in group.episodes for call in episode.calls]
    num_cut_off -= sum(call.ends_early and call.action.finish_reason == "length" for call in calls)
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
