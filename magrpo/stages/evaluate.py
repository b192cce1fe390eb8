"""Evaluate: the agents on held-out problems, sampled with a fixed seed and greedy.

A trajectory is judged by the joint action of its last turn. Quantities are fractions of their maximum, with bootstrap
intervals over problems.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from magrpo.algo.stats import bootstrap_interval, pass_at_k
from magrpo.config import EvalConfig, RolloutConfig
from magrpo.interfaces import Reward
from magrpo.stages.backend import Backend, Team
from magrpo.stages.play import Start, Stopping, play_trajectories
from magrpo.stages.rollout import Node, sampling_params
from magrpo.types import EvalReport, EvalRow, Interval, Mode, Problem, SamplingParams, Split, Trajectory, TrajectoryStep

PASS_AT = (1, 3, 5, 10)


def evaluate(
    team: Team,
    backend: Backend,
    splits: Mapping[Split, Sequence[Problem]],
    config: EvalConfig,
    rollout_config: RolloutConfig,
    policy_version: int,
) -> tuple[EvalReport, list[Trajectory]]:
    """Evaluate the weights that the engine holds on every split but ``train``.

    The sampled mode draws ``config.num_samples`` trajectories a problem at the training temperature. They take all
    turns unless ``config.stop_above``, an oracle, ends them earlier. Returns the report and, for each problem and
    mode, the first trajectory, even if the sandbox failed on it.
    """
    sampled = replace(sampling_params(rollout_config), keep_support=False)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=rollout_config.max_new_tokens)
    starts = held_out_starts(splits, config, {"sampled": (sampled, config.num_samples), "greedy": (greedy, 1)})
    stopping = Stopping(config.stop_above)
    trajectories = play_trajectories(starts, team, backend, rollout_config, config.seed, stopping)
    rows = eval_rows(trajectories, team.reward)
    report = EvalReport(policy_version, tuple(rows), summarise_rows(rows, team.reward, config.seed))
    return report, [trajectory for trajectory in trajectories if trajectory.path[0] == 0]


def held_out_starts(
    splits: Mapping[Split, Sequence[Problem]], config: EvalConfig, modes: Mapping[Mode, tuple[SamplingParams, int]]
) -> list[Start]:
    """A start for each mode and problem of every split but ``train``. ``modes``: how to sample, and how often."""
    return [
        Start(split, mode, Node(problem, (), (), sampling, number))
        for split in sorted(splits)
        if split != "train"
        for problem in spread_problems(splits[split], config.max_problems)
        for mode, (sampling, number) in modes.items()
    ]


def spread_problems(problems: Sequence[Problem], number: int | None) -> list[Problem]:
    """``number`` of the problems, in their order; None, or a larger number: all of them.

    They are evenly spaced in the order of the problems' tags, the middle ones of ``number`` equal shares: each level
    or topic is represented in proportion to its size, however the split is ordered.
    """
    if number is None or number >= len(problems):
        return list(problems)
    by_tags = sorted(range(len(problems)), key=lambda i: tuple(problems[i].tags.values()))
    chosen = sorted(by_tags[(2 * i + 1) * len(problems) // (2 * number)] for i in range(number))
    return [problems[i] for i in chosen]


def eval_rows(trajectories: Sequence[Trajectory], reward: Reward) -> list[EvalRow]:
    """The trajectories as rows, in a fixed order, without those on which the sandbox failed."""
    rows = [_row(trajectory, reward) for trajectory in trajectories if not trajectory.steps[-1].turn.masked]
    return sorted(rows, key=lambda row: (row.split, row.mode, row.task_id, row.index))


def summarise_rows(rows: Sequence[EvalRow], reward: Reward, seed: int) -> dict[str, dict[str, Interval]]:
    """The summary of rows: ``summary["test/sampled"]["return"]`` and so on, see :class:`magrpo.types.EvalReport`."""
    return {
        name: {key: bootstrap_interval(list(values.values()), seed) for key, values in quantities.items()}
        for name, quantities in values_by_problem(rows, reward).items()
    }


def values_by_problem(rows: Sequence[EvalRow], reward: Reward) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The values that a summary averages: ``values["test/sampled"]["return"][task_id]``, in the same units."""
    grouped: dict[str, dict[str, list[EvalRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        grouped[f"{row.split}/{row.mode}"][row.task_id].append(row)
    values = {}
    for name, problems in grouped.items():
        quantities = {
            "return": _map_rows(lambda row: reward.fraction(row.returns[-1]), problems),
            "response_tokens": _map_rows(lambda row: float(row.response_tokens), problems),
            "generated_tokens": _map_rows(lambda row: float(row.generated_tokens), problems),
        }
        for part, maximum in reward.maxima.items():
            quantities[part] = _map_rows(partial(_part_fraction, part, maximum), problems)
        verdicts = {task_id: [row.passed[-1] for row in members] for task_id, members in problems.items()}
        has_verdicts = all(None not in passed for passed in verdicts.values())
        fewest_rows = min(map(len, verdicts.values()))
        for k in PASS_AT:
            if has_verdicts and k <= fewest_rows:
                quantities[f"pass_at_{k}"] = {
                    task_id: [pass_at_k(len(passed), passed.count(True), k)] for task_id, passed in verdicts.items()
                }
        values[name] = quantities
    return values


def _map_rows(value: Callable[[EvalRow], float], problems: Mapping[str, list[EvalRow]]) -> dict[str, list[float]]:
    return {task_id: [value(row) for row in members] for task_id, members in problems.items()}


def _part_fraction(part: str, maximum: float, row: EvalRow) -> float:
    return row.parts[-1].get(part, 0.0) / maximum


def _count_tokens(step: TrajectoryStep) -> int:
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
        response_tokens=_count_tokens(steps[-1]),
        generated_tokens=sum(map(_count_tokens, steps)),
    )
