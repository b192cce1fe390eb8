"""Evaluate: play the agents on held-out problems, in whole trajectories, both greedy and sampled with a fixed seed.

A trajectory is judged by the joint action of its last turn. Quantities are fractions of their maximum, with bootstrap
intervals over problems.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from magrpo.algo.answers import AgentTexts, list_quantities, measure_step
from magrpo.algo.stats import bootstrap_interval, pass_at_k
from magrpo.checks.rewards import judge_passed
from magrpo.config.sections import EvalConfig, RolloutConfig
from magrpo.errors import ConfigError
from magrpo.interfaces import Reward
from magrpo.run.files import EVALUATION, TRAJECTORIES
from magrpo.run.store import write_records
from magrpo.seeds import derive_seed
from magrpo.stages.backend import Backend, Splits, Team
from magrpo.stages.context import Metrics, StageContext
from magrpo.stages.rollout import Node, child_node, has_ended, rollout, sampling_params
from magrpo.stages.score import score
from magrpo.types import (
    HEADLINE,
    PENALTY,
    AnswerStats,
    EvalReport,
    EvalRow,
    Interval,
    Mode,
    Problem,
    SamplingParams,
    Split,
    Trajectory,
    TrajectoryStep,
)

PASS_AT = (1, 3, 5, 10)
"""The values of k for which pass@k is reported, as far as there are that many samples."""
_ALIGNED = RolloutConfig(joint_mode="aligned")
row_key = attrgetter("split", "mode", "task_id", "index")
"""The key that identifies a row of an evaluation, and by which rows are sorted."""


class TrajectoryStart(NamedTuple):
    """A node where ``node.group_size`` trajectories begin, or continue after ``steps``, with their split and mode."""

    split: Split
    mode: Mode
    node: Node
    steps: tuple[TrajectoryStep, ...] = ()


def evaluate(
    team: Team, backend: Backend, splits: Splits, config: EvalConfig, rollout_config: RolloutConfig, policy_version: int
) -> tuple[EvalReport, list[Trajectory]]:
    """Evaluate the weights that the engine holds on every split but ``train``.

    The sampled mode draws ``config.num_samples`` trajectories for each problem at the training temperature. A
    trajectory takes all turns unless ``config.stop_above``, an oracle, ends it earlier. Returns the report and the
    first trajectory of each problem and mode, even if the sandbox failed on it.
    """
    sampled = replace(sampling_params(rollout_config), keep_support=False)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=rollout_config.max_new_tokens)
    starts = held_out_starts(splits, config, {"sampled": (sampled, config.num_samples), "greedy": (greedy, 1)})
    trajectories = play_trajectories(starts, team, backend, config.seed, config.stop_above)
    rows = eval_rows(trajectories, team.reward)
    report = EvalReport(policy_version, tuple(rows), summarise_rows(rows, team.reward, config.seed))
    return report, [trajectory for trajectory in trajectories if trajectory.path[0] == 0]


def held_out_starts(
    splits: Splits, config: EvalConfig, modes: Mapping[Mode, tuple[SamplingParams, int]]
) -> list[TrajectoryStart]:
    """A start for each mode and problem of every split but ``train``. ``modes``: sampling parameters and samples."""
    return [
        TrajectoryStart(split, mode, Node(problem, (), (), sampling, number))
        for split in sorted(splits)
        if split != "train"
        for problem in spread_problems(splits[split], config.max_problems)
        for mode, (sampling, number) in modes.items()
    ]


def spread_problems(problems: Sequence[Problem], number: int | None) -> list[Problem]:
    """Choose ``number`` of the problems, in their order; all of them if ``number`` is None or larger.

    The problems are sorted by tags and divided into ``number`` equal shares, and the middle one of each share is taken.
    Each level or topic is thus represented in proportion to its size, however the split is ordered.
    """
    if number is None or number >= len(problems):
        return list(problems)
    by_tags = sorted(range(len(problems)), key=lambda i: tuple(problems[i].tags.values()))
    chosen = sorted(by_tags[(2 * i + 1) * len(problems) // (2 * number)] for i in range(number))
    return [problems[i] for i in chosen]


def play_trajectories(
    starts: Sequence[TrajectoryStart],
    team: Team,
    backend: Backend,
    seed: int,
    stop_above: float | None,
    max_tries: int = 1,
) -> list[Trajectory]:
    """Play every trajectory from its start to its end, with one engine batch for each turn.

    At each turn the acting agents answer once. A trajectory ends early if its reward exceeds ``stop_above``, in reward
    units (None: never), or if the sandbox fails on it; its last turn is then masked. A trajectory has up to
    ``max_tries`` tries. Each try takes all turns of the environment and begins at the problem again, without history;
    the steps of the trajectory are the turns of all its tries.
    """
    num_turns = team.env.num_turns
    finished: list[Trajectory] = []
    while starts:
        groups = rollout([start.node for start in starts], team, backend, _ALIGNED, seed)
        scored, stats = score(groups, team, backend.sandbox, backend.cache)
        backend.stats.add(stats)
        unfinished: list[TrajectoryStart] = []
        for start, group in zip(starts, scored, strict=True):
            for index, turn in enumerate(group.turns):
                steps = (*start.steps, TrajectoryStep.of(group, index))
                if turn.masked or has_ended(turn, stop_above) or len(steps) == max_tries * num_turns:
                    path = (*group.path, index)
                    finished.append(Trajectory(group.problem, start.split, start.mode, path, steps))
                    continue
                node = child_node(group, index, start.node.sampling, 1)
                if len(steps) % num_turns == 0:  # the next try begins
                    node = replace(node, history=())
                unfinished.append(start._replace(node=node, steps=steps))
        starts = shuffle_texts(unfinished, seed) if team.shuffled else unfinished
    return finished


def shuffle_texts(starts: Sequence[TrajectoryStart], seed: int) -> list[TrajectoryStart]:
    """Show in each node the history of another problem of the same split and mode, chosen at random.

    The problems form one random circle, and each is shown the next one's history; a problem alone keeps its own.
    """
    by_problem: dict[tuple[Split, Mode], dict[str, list[TrajectoryStart]]] = defaultdict(lambda: defaultdict(list))
    for start in starts:
        by_problem[start.split, start.mode][start.node.problem.task_id].append(start)
    shuffled = []
    for (split, mode), members in by_problem.items():
        circle = sorted(members)
        random.Random(derive_seed(seed, "shuffle", split, mode)).shuffle(circle)
        for task_id, other in zip(circle, [*circle[1:], circle[0]], strict=True):
            for index, start in enumerate(members[task_id]):
                shown = members[other][index % len(members[other])].node.history if other != task_id else ()
                shuffled.append(start._replace(node=replace(start.node, shown=shown)))
    return shuffled


def eval_rows(trajectories: Sequence[Trajectory], reward: Reward) -> list[EvalRow]:
    """The trajectories as rows in a fixed order, leaving out those on which the sandbox failed."""
    rows = []
    for trajectory in trajectories:
        turns = [step.turn for step in trajectory.steps]
        if turns[-1].masked:
            continue
        row = EvalRow(
            task_id=trajectory.problem.task_id,
            split=trajectory.split,
            mode=trajectory.mode,
            index=trajectory.path[0],
            returns=tuple(turn.reward.total for turn in turns),
            parts=tuple(turn.reward.parts for turn in turns),
            passed=tuple(judge_passed(reward, trajectory.problem.task_id, turn.reports) for turn in turns),
            texts=trajectory.texts,
            answers=_measure_answers(trajectory),
            generated_tokens=sum(len(action.token_ids) for step in trajectory.steps for _, action in step.all_actions),
        )
        rows.append(row)
    return sorted(rows, key=row_key)


def _measure_answers(trajectory: Trajectory) -> dict[str, AnswerStats]:
    """The statistics of the latest answer of every agent."""
    answers: dict[str, AnswerStats] = {}
    earlier: list[AgentTexts] = []
    for step in trajectory.steps:
        answers |= measure_step(step, trajectory.problem.prompt, earlier)
        earlier.append({agent: action.text for agent, action in step.actions.items()})
    return answers


def summarise_rows(rows: Sequence[EvalRow], reward: Reward, seed: int) -> dict[str, dict[str, Interval]]:
    """Summarise rows as ``summary["test/sampled"]["return"]`` and so on; see :class:`magrpo.types.EvalReport`."""
    return {
        name: {key: bootstrap_interval(list(values.values()), seed) for key, values in quantities.items()}
        for name, quantities in values_by_problem(rows, reward).items()
    }


def values_by_problem(rows: Sequence[EvalRow], reward: Reward) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The values that a summary averages: ``values["test/sampled"]["return"][task_id]``, in the same units."""
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    verdicts: dict[str, dict[str, list[bool | None]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        split_and_mode = f"{row.split}/{row.mode}"
        verdicts[split_and_mode][row.task_id].append(row.passed[-1])
        quantities = {
            "return": reward.fraction(row.returns[-1]),
            "generated_tokens": float(row.generated_tokens),
            **{part: row.parts[-1].get(part, 0.0) / maximum for part, maximum in reward.maxima.items()},
            **_penalty_share(row, reward),
        }
        for agent, stats in row.answers.items():
            quantities |= {f"{agent}/{name}": value for name, value in list_quantities(stats).items()}
        by_quantity = values.setdefault(split_and_mode, {})
        for quantity, value in quantities.items():
            by_quantity.setdefault(quantity, {}).setdefault(row.task_id, []).append(value)
    for split_and_mode, by_problem in verdicts.items():
        if any(None in passed for passed in by_problem.values()):
            continue  # some samples have no verdict, so there is no pass@k
        fewest_samples = min(map(len, by_problem.values()))
        for k in PASS_AT:
            if k <= fewest_samples:
                values[split_and_mode][f"pass_at_{k}"] = {
                    task_id: [pass_at_k(len(passed), passed.count(True), k)] for task_id, passed in by_problem.items()
                }
    return values


def _penalty_share(row: EvalRow, reward: Reward) -> dict[str, float]:
    """The penalty of a trajectory as a share of the reward's maximum, at most 0; empty where no fault has a cost."""
    parts = row.parts[-1]
    if PENALTY not in parts or PENALTY in reward.maxima:
        return {}
    return {PENALTY: parts[PENALTY] / sum(reward.maxima.values())}


def write_evaluation(context: StageContext) -> Metrics:
    """Evaluate a checkpoint on the held-out problems."""
    config, folder = context.config, context.folder
    problems, checkpoint = context.inputs
    backend = context.open_backend(context.resources.serve_checkpoint(checkpoint))
    splits = context.load_problems(problems)
    eval_config = config.seeded_eval()
    context.console.expect_items(_count_completions(context, splits, eval_config))
    report, trajectories = evaluate(context.team, backend, splits, eval_config, config.rollout, context.step.iteration)
    write_records(folder / TRAJECTORIES, trajectories)
    metrics = write_eval_report(folder, report, backend)
    others = {name: summary["return"] for name, summary in report.summary.items() if name != HEADLINE}
    metrics |= {f"{name}/return": interval.mean for name, interval in others.items()}
    return {f"eval/{key}": value for key, value in metrics.items()}


def write_eval_report(folder: Path, report: EvalReport, backend: Backend) -> dict[str, float]:
    """Write the report; return the metrics that every evaluation has.

    Raises ConfigError if no sampled answer to a held-out problem could be judged.
    """
    if HEADLINE not in report.summary:
        raise ConfigError(
            "no answer to a held-out problem could be judged: their tests cannot be run here, or the sandbox fails. "
            "Warnings above name the tests; packages that they import belong into sandbox.packages, and magrpo doctor "
            "checks the sandbox"
        )
    (folder / EVALUATION).write_bytes(msgspec.json.encode(report))
    metrics = {key: interval.mean for key, interval in report.summary[HEADLINE].items()}
    return metrics | {"sandbox/infra_error_frac": backend.stats.metrics()["sandbox/infra_error_frac"]}


def _count_completions(context: StageContext, splits: Splits, config: EvalConfig) -> int:
    """The number of completions of an evaluation; 0, for unknown, if trajectories may end early."""
    if config.stop_above is not None:
        return 0
    held_out = (problems for split, problems in splits.items() if split != "train")
    num_problems = sum(len(spread_problems(problems, config.max_problems)) for problems in held_out)
    num_completions = sum(map(context.count_acting, range(context.config.env.num_turns)))  # of one trajectory
    return num_problems * num_completions * (config.num_samples + 1)  # the sampled trajectories and a greedy one
