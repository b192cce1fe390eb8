"""Evaluate: the agents on problems never trained on, sampled with a fixed seed and greedy.

What counts is the joint action of a trajectory's last turn. Quantities are fractions of their maximum, with bootstrap
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
from magrpo.stages.play import Arena, Game, Start, play
from magrpo.stages.rollout import Node, sampling_params
from magrpo.types import EvalReport, EvalRow, Interval, Mode, Problem, SamplingParams, Split, Step, Trajectory

PASS_AT = (1, 3, 5, 10)


def evaluate(
    arena: Arena,
    game: Game,
    splits: Mapping[Split, Sequence[Problem]],
    config: EvalConfig,
    rollout_config: RolloutConfig,
    policy_version: int,
) -> tuple[EvalReport, list[Trajectory]]:
    """Evaluate the weights the engine holds on every split but ``train``; the first trajectories of each problem.

    The sampled mode draws ``config.num_samples`` trajectories a problem at the training temperature. They take all
    turns unless ``config.stop_above``, an oracle, ends them earlier. The trajectories
    returned are one for each problem and mode, those on which the sandbox failed included.
    """
    sampled = replace(sampling_params(rollout_config), keep_support=False)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=rollout_config.max_new_tokens)
    starts = held_out(splits, config, {"sampled": (sampled, config.num_samples), "greedy": (greedy, 1)})
    trajectories = play(arena, game, starts, rollout_config, config.seed, stop_above=config.stop_above)
    rows = eval_rows(trajectories, game.reward)
    report = EvalReport(policy_version, tuple(rows), summarise(rows, game.reward, config.seed))
    return report, [trajectory for trajectory in trajectories if trajectory.path[0] == 0]


def held_out(
    splits: Mapping[Split, Sequence[Problem]], config: EvalConfig, modes: Mapping[Mode, tuple[SamplingParams, int]]
) -> list[Start]:
    """Starts at the problems of every split but ``train``: for each mode how to sample, and how many trajectories."""
    return [
        Start(split, mode, Node(problem, (), (), sampling, number))
        for split in sorted(splits)
        if split != "train"
        for problem in spread_problems(splits[split], config.max_problems)
        for mode, (sampling, number) in modes.items()
    ]


def spread_problems(problems: Sequence[Problem], number: int | None) -> list[Problem]:
    """``number`` of the problems, in their order; None, or more than there are: all of them.

    They are evenly spaced in the order of the problems' tags, the middle ones of ``number`` equal shares: so each level
    or topic is met as often as its size says, however the split is ordered.
    """
    if number is None or number >= len(problems):
        return list(problems)
    by_tags = sorted(range(len(problems)), key=lambda i: tuple(problems[i].tags.values()))
    chosen = sorted(by_tags[(2 * i + 1) * len(problems) // (2 * number)] for i in range(number))
    return [problems[i] for i in chosen]


def eval_rows(trajectories: Sequence[Trajectory], reward: Reward) -> list[EvalRow]:
    """The trajectories as rows, in a fixed order; those on which the sandbox failed are left out."""
    rows = [_row(trajectory, reward) for trajectory in trajectories if not trajectory.steps[-1].turn.masked]
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
            "return": _each(lambda row: reward.fraction(row.returns[-1]), problems),
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
