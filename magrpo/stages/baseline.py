"""Baseline: one row of the table of baselines, evaluated like the agents of a run, and timed.

A row may draw several answers and keep one. ``majority`` runs them on the inputs of the tests and keeps an answer from
the largest set that behaves alike (self-consistency, Wang et al. 2022, arXiv 2203.11171, with behaviour in place of the
final answer). It sees the inputs, not the expected outputs. ``best`` keeps the answer with the largest reward; it is an
oracle, because the reward comes from the tests.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from magrpo.config.run import BaselineRow
from magrpo.config.sections import EvalConfig, RolloutConfig
from magrpo.run.files import TIMED_ANSWERS, read_evaluation
from magrpo.run.store import write_records
from magrpo.stages.backend import Backend, SamplingStats, Splits, Team
from magrpo.stages.context import Metrics, StageContext
from magrpo.stages.evaluate import (
    TrajectoryStart,
    eval_rows,
    held_out_starts,
    play_trajectories,
    row_key,
    spread_problems,
    summarise_rows,
    write_eval_report,
)
from magrpo.stages.rollout import Node, sampling_params
from magrpo.stages.score import score_texts
from magrpo.types import HEADLINE, EvalReport, EvalRow, Mode, Problem, SamplingParams, Split, TimedAnswer

Behaviour = Callable[[EvalRow], Hashable]
"""Maps a row to a key that is equal for programs that behave alike; None if the program never returned a value."""

TIMED_PROBLEMS = 8
"""Number of held-out problems that each row answers one at a time to measure its response time."""


def baseline(
    row: BaselineRow,
    backend: Backend,
    splits: Splits,
    config: EvalConfig,
    rollout_config: RolloutConfig,
    num_votes: int,
) -> EvalReport:
    """Evaluate the weights that the engine holds, in the way that ``row`` describes.

    Every trajectory takes all its turns, unless the row has an oracle that ends it (``stop_above``). A vote takes
    ``num_votes`` answers, which is 1 for a row without votes. Rows that vote or retry have no greedy mode, in which all
    answers would be the same.
    """
    sampled = _sampling(row, rollout_config)
    modes: dict[Mode, tuple[SamplingParams, int]] = {"sampled": (sampled, config.num_samples * num_votes)}
    if row.votes == "none" and row.max_tries == 1:
        modes["greedy"] = (SamplingParams(temperature=0.0, max_new_tokens=row.max_new_tokens), 1)
    starts = held_out_starts(splits, config, modes)
    trajectories = play_trajectories(starts, Team.of(row), backend, config.seed, row.stop_above, row.max_tries)
    rows = eval_rows(trajectories, row.reward)
    if row.votes != "none":
        behaviour = None if row.votes == "best" else read_behaviour(rows, row, splits, backend)
        rows = elect_rows(rows, num_votes, behaviour)
    return EvalReport(0, tuple(rows), summarise_rows(rows, row.reward, config.seed))


def time_answers(
    row: BaselineRow,
    backend: Backend,
    problems: Sequence[Problem],
    config: EvalConfig,
    rollout_config: RolloutConfig,
    num_votes: int,
) -> list[TimedAnswer]:
    """Time one answer to each of the ``test`` problems, asked one at a time after an untimed warm-up.

    An episode of a program that fails costs its time as well.
    """
    team = Team.of(row).tolerate_failures()  # each batch is a single episode
    timed = []
    for problem in [problems[0], *problems]:  # the first answer is the warm-up
        cost = SamplingStats()
        start = TrajectoryStart("test", "sampled", Node(problem, (), (), _sampling(row, rollout_config), num_votes))
        timed_backend = replace(backend, sampling=cost)
        play_trajectories([start], team, timed_backend, config.seed, row.stop_above, row.max_tries)
        timed.append(TimedAnswer(problem.task_id, cost.seconds, cost.num_tokens))
    return timed[1:]


def _sampling(row: BaselineRow, rollout_config: RolloutConfig) -> SamplingParams:
    return replace(sampling_params(rollout_config), max_new_tokens=row.max_new_tokens, keep_support=False)


def count_votes(reports: Mapping[str, EvalReport], voter: str) -> int:
    """The number of answers of ``voter`` that cost as much as one answer of the costliest row, at least 1.

    ``reports`` is keyed by row. The cost of an answer is the mean number of tokens generated in all turns on ``test``,
    sampled.
    """
    cost = {name: report.summary[HEADLINE]["generated_tokens"].mean for name, report in reports.items()}
    return max(1, round(max(cost.values()) / cost[voter]))


def elect_rows(rows: Sequence[EvalRow], num_votes: int, behaviour: Behaviour | None) -> list[EvalRow]:
    """Elect one of every ``num_votes`` rows of a problem: by the majority of ``behaviour``, or, without it, by return.

    Ties go to the first row. A program that never returned a value has no vote. The elected row counts the tokens of
    all answers.
    """
    ballots: dict[tuple[Split, Mode, str, int], list[EvalRow]] = defaultdict(list)
    for row in rows:
        ballots[row.split, row.mode, row.task_id, row.index // num_votes].append(row)
    elected = []
    for (*_, index), ballot in ballots.items():
        if behaviour is None:
            winner = max(ballot, key=lambda row: row.returns[-1])
        else:
            keys = [behaviour(row) for row in ballot]
            votes = Counter(key for key in keys if key is not None)
            winner = ballot[keys.index(votes.most_common(1)[0][0])] if votes else ballot[0]
        tokens = sum(row.generated_tokens for row in ballot)
        elected.append(replace(winner, index=index, generated_tokens=tokens))
    return elected


def read_behaviour(rows: Sequence[EvalRow], row: BaselineRow, splits: Splits, backend: Backend) -> Behaviour:
    """Read the behaviour of each row's program from its report: verdict and returned value on each test's input."""
    roles = Team.of(row).roles
    problems = {problem.task_id: problem for members in splits.values() for problem in members}
    items = [(problems[one.task_id], {roles[agent]: text for agent, text in one.texts.items()}) for one in rows]
    scored, _ = score_texts(items, reward=row.reward, sandbox=backend.sandbox, cache=backend.cache)
    behaviours: dict[Hashable, Hashable] = {}
    for one, result in zip(rows, scored, strict=True):
        cases = result.reports["program"].cases if "program" in result.reports else ()
        returned = any(case.status in ("pass", "wrong") for case in cases)
        behaviours[row_key(one)] = cases if returned else None
    return lambda one: behaviours[row_key(one)]


def write_row(context: StageContext) -> Metrics:
    """Evaluate one row of the table of baselines. A row that votes spends as many tokens as the costliest other row."""
    config = context.config
    problems, untrained, *earlier = context.inputs
    row = next(row for row in config.baselines.rows if row.name == context.step.part)
    num_votes = 1
    if row.votes != "none":
        reports = {p["dir"].partition("baseline.")[2]: read_evaluation(context.store.folder(p)) for p in earlier}
        num_votes = count_votes(reports, voter="single")
    backend = context.open_backend(context.resources.serve_row(row, untrained))
    splits = context.load_problems(problems)
    eval_config = config.seeded_eval()
    report = baseline(row, backend, splits, eval_config, config.rollout, num_votes)
    evaluated = spread_problems(splits["test"], eval_config.max_problems)
    to_time = spread_problems(evaluated, TIMED_PROBLEMS)
    timed = time_answers(row, backend, to_time, eval_config, config.rollout, num_votes)
    write_records(context.folder / TIMED_ANSWERS, timed)
    metrics = write_eval_report(context.folder, report, backend) | {"votes": float(num_votes)}
    return {f"baseline/{row.name}/{key}": value for key, value in metrics.items()}
