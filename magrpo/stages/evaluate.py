"""Evaluate: the agents on problems never trained on, sampled with a fixed seed and greedy.

Every trajectory is played on its own: at each turn the agents that act answer once. What counts is the joint action of
the last turn. Quantities are fractions of their maximum, with bootstrap intervals over problems.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from magrpo.algo.stats import bootstrap_interval, pass_at_k
from magrpo.config import AgentConfig, EvalConfig, RolloutConfig
from magrpo.interfaces import Engine, Env, Progress, Reward, Sandbox
from magrpo.stages.rollout import Node, Render, extend, rollout, sampling_params
from magrpo.stages.score import Cache, ScoreStats, score
from magrpo.types import (
    PENDING,
    EvalReport,
    EvalRow,
    Interval,
    Mode,
    Problem,
    SamplingParams,
    ScoredTurn,
    Split,
    Step,
    Trajectory,
)

PASS_AT = (1, 3, 5, 10)


def evaluate(
    splits: Mapping[Split, Sequence[Problem]],
    *,
    policy_version: int,
    agents: Sequence[AgentConfig],
    env: Env,
    reward: Reward,
    engine: Engine,
    sandbox: Sandbox,
    render: Render,
    config: EvalConfig,
    rollout_config: RolloutConfig,
    cache: Cache,
    progress: Progress | None = None,
    stats: ScoreStats | None = None,
    kept: list[Trajectory] | None = None,
) -> EvalReport:
    """Evaluate the weights the engine holds on every split but ``train``.

    All splits and both modes share one engine batch a turn. The sampled mode draws ``config.num_samples``
    trajectories a problem at the training temperature. ``stats`` takes up what the sandbox did, ``kept`` the first
    trajectory of each problem and mode.
    """
    sampled = sampling_params(rollout_config)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=rollout_config.max_new_tokens)
    origin: list[tuple[Split, Mode]] = []
    nodes: list[Node] = []
    for split in sorted(splits):
        if split == "train":
            continue
        for problem in splits[split][: config.max_problems]:
            origin += [(split, "sampled"), (split, "greedy")]
            nodes += [Node(problem, (), (), sampled, config.num_samples), Node(problem, (), (), greedy, 1)]
    rows = play(
        nodes,
        origin,
        agents=agents,
        env=env,
        reward=reward,
        engine=engine,
        sandbox=sandbox,
        render=render,
        rollout_config=rollout_config,
        seed=config.seed,
        cache=cache,
        progress=progress,
        stats=stats,
        kept=kept,
    )
    return EvalReport(policy_version, tuple(rows), summarise(rows, reward, config.seed))


def play(
    nodes: Sequence[Node],
    origin: Sequence[tuple[Split, Mode]],
    *,
    agents: Sequence[AgentConfig],
    env: Env,
    reward: Reward,
    engine: Engine,
    sandbox: Sandbox,
    render: Render,
    rollout_config: RolloutConfig,
    seed: int,
    cache: Cache,
    progress: Progress | None = None,
    stats: ScoreStats | None = None,
    kept: list[Trajectory] | None = None,
) -> list[EvalRow]:
    """Play every trajectory that starts at ``nodes``, none of which has a past, to its end; in a fixed order.

    ``origin`` names split and mode of each node. A trajectory on which the sandbox failed is left out. ``kept`` takes
    up the first trajectory of each node, failed ones included.
    """
    rows: list[EvalRow] = []
    aligned = rollout_config.model_copy(update={"joint_mode": "aligned", "crossed_pairs": None})
    roles = {agent.name: agent.role for agent in agents}
    open_nodes: list[tuple[tuple[Split, Mode], Node, tuple[Step, ...]]]
    open_nodes = [(where, node, ()) for where, node in zip(origin, nodes, strict=True)]
    while open_nodes:
        turn = len(open_nodes[0][1].path)
        groups = rollout(
            [node for _, node, _ in open_nodes],
            agents=agents,
            env=env,
            render=render,
            engine=engine,
            config=aligned,
            seed=seed,
            progress=progress,
        )
        scored, turn_stats = score(groups, roles=roles, reward=reward, sandbox=sandbox, cache=cache, progress=None)
        if stats is not None:
            stats.add(turn_stats)
        following: list[tuple[tuple[Split, Mode], Node, tuple[Step, ...]]] = []
        for (where, node, before), group in zip(open_nodes, scored, strict=True):
            for index, joint_action in enumerate(group.turns):
                steps = (*before, Step.of(group, index))
                if turn + 1 < env.num_turns and _goes_on(joint_action, rollout_config.termination_threshold):
                    following.append((where, extend(group, index, node.sampling, 1), steps))
                    continue
                trajectory = Trajectory(group.problem, *where, (*group.path, index), steps)
                if kept is not None and trajectory.path[0] == 0:
                    kept.append(trajectory)
                if not joint_action.masked:
                    rows.append(_row(trajectory, reward))
        open_nodes = following
    return sorted(rows, key=lambda row: (row.split, row.mode, row.task_id, row.index))


def summarise(rows: Sequence[EvalRow], reward: Reward, seed: int) -> dict[str, dict[str, Interval]]:
    """The summary of rows: ``summary["test/sampled"]["return"]`` and so on, see :class:`magrpo.types.EvalReport`."""
    return {
        name: {key: bootstrap_interval(list(values.values()), seed) for key, values in quantities.items()}
        for name, quantities in per_problem(rows, reward).items()
    }


def per_problem(rows: Sequence[EvalRow], reward: Reward) -> dict[str, dict[str, dict[str, list[float]]]]:
    """What a summary is made of: ``values["test/sampled"]["return"][task_id]``, in the same units."""
    grouped: dict[str, dict[str, list[EvalRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        grouped[f"{row.split}/{row.mode}"][row.task_id].append(row)
    values = {}
    for name, problems in grouped.items():
        quantities = {
            "return": _each(lambda row: row.returns[-1] / reward.max_total, problems),
            "response_tokens": _each(lambda row: float(row.response_tokens), problems),
            "generated_tokens": _each(lambda row: float(row.generated_tokens), problems),
        }
        for part, maximum in reward.maxima.items():
            quantities[part] = _each(partial(_fraction, part, maximum), problems)
        verdicts = {task_id: [row.passed[-1] for row in members] for task_id, members in problems.items()}
        solvable = all(None not in passed for passed in verdicts.values())
        fewest = min(map(len, verdicts.values()))
        for k in PASS_AT:
            if solvable and k <= fewest:
                quantities[f"pass_at_{k}"] = {
                    task_id: [pass_at_k(len(passed), passed.count(True), k)] for task_id, passed in verdicts.items()
                }
        values[name] = quantities
    return values


def _each(value: Callable[[EvalRow], float], problems: Mapping[str, list[EvalRow]]) -> dict[str, list[float]]:
    return {task_id: [value(row) for row in members] for task_id, members in problems.items()}


def _fraction(part: str, maximum: float, row: EvalRow) -> float:
    return row.parts[-1].get(part, 0.0) / maximum


def _goes_on(turn: ScoredTurn, threshold: float | None) -> bool:
    ends = threshold is not None and turn.reward.total > threshold and turn.reward != PENDING
    return not turn.masked and not ends


def _tokens(step: Step) -> int:
    return sum(len(action.token_ids) for action in step.actions.values())


def _row(trajectory: Trajectory, reward: Reward) -> EvalRow:
    steps = trajectory.steps
    return EvalRow(
        task_id=trajectory.problem.task_id,
        split=trajectory.split,
        mode=trajectory.mode,
        index=trajectory.path[0],
        returns=tuple(step.turn.reward.total for step in steps),
        parts=tuple(step.turn.reward.parts for step in steps),
        passed=tuple(reward.passed(step.turn.reports) for step in steps),
        texts=trajectory.texts,
        response_tokens=_tokens(steps[-1]),
        generated_tokens=sum(map(_tokens, steps)),
    )
