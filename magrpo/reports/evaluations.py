"""Evaluations as reports read them: runs with their evaluations, problem means, differences and shared parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Self

from magrpo.algo.stats import crossed_interval
from magrpo.config.run import RunConfig
from magrpo.errors import ConfigError
from magrpo.interfaces import MeasuresTexts, Reward
from magrpo.reports.budget import Budget, build_ledger
from magrpo.run.files import TRAJECTORIES, find_evaluations, read_evaluations, read_held_out
from magrpo.run.store import RunStore, read_records
from magrpo.stages.evaluate import values_by_problem
from magrpo.types import HEADLINE, EvalReport, Interval, Problem, Trajectory

Means = Mapping[str, Mapping[str, float]]
"""Mean of each problem, ``means[quantity][task_id]``: a fraction, a count or seconds."""


MIN_SEEDS = 3
"""Fewest seeds for an interval over seeds and problems. With two, Student's t has one degree of freedom: 12.7 standard
errors to each side."""
PAPER = "paper/"
"""Prefix of the quantities that a reward measures in texts (:class:`magrpo.interfaces.MeasuresTexts`)."""


@dataclass
class EvaluatedRun:
    """A run with its evaluations."""

    store: RunStore
    config: RunConfig
    reports: Sequence[EvalReport]
    """Evaluations in order of iteration, at least one."""

    @classmethod
    def read(cls, store: RunStore) -> Self:
        """Read a run directory; ConfigError if it has no evaluation, or another version wrote its configuration."""
        config = store.config()
        reports = read_evaluations(store)
        if not reports:
            raise ConfigError(f"run {store.run_id} has no evaluation yet; resume it: {store.format_command('resume')}")
        return cls(store, config, reports)

    @property
    def run_id(self) -> str:
        """The name of the run in tables and curves."""
        return self.store.run_id

    @property
    def last(self) -> EvalReport:
        return self.reports[-1]

    @cached_property
    def means(self) -> Sequence[Mapping[str, Means]]:
        """Problem means of each evaluation: ``means[-1]["test/sampled"]["return"][task_id]``."""
        return [compute_problem_means(report, self.config.reward) for report in self.reports]

    @cached_property
    def stage_metrics(self) -> Sequence[tuple[int, str, Mapping[str, float]]]:
        """Iteration, stage and metrics of every committed stage."""
        return list(self.store.stage_metrics())

    @cached_property
    def budgets(self) -> list[Budget]:
        """Cost of training by iteration."""
        return build_ledger(self.stage_metrics)

    @cached_property
    def problems(self) -> Mapping[str, Problem]:
        """Problems that the run does not train on, by id."""
        return read_held_out(self.store)

    @cached_property
    def trajectories(self) -> Mapping[str, Trajectory]:
        """First sampled trajectory of each held-out problem in the last evaluation, with its prompts."""
        pointer = find_evaluations(self.store).get(self.last.policy_version)
        if pointer is None:
            return {}
        stored = read_records(self.store.folder(pointer) / TRAJECTORIES, Trajectory)
        return {one.problem.task_id: one for one in stored if (one.split, one.mode) == ("test", "sampled")}

    def list_gains(self, key: str) -> dict[str, Interval]:
        """Return the change of every quantity from the first evaluation to the last, paired by problem.

        A quantity that the two measured on no common problem is left out: a program may rarely ask an agent.
        """
        first, last = (means.get(key, {}) for means in (self.means[0], self.means[-1]))
        gains = {name: paired_gain(first[name], last[name], self.config.eval.seed) for name in last if name in first}
        return {name: gain for name, gain in gains.items() if gain is not None}

    def budget_at(self, evaluation: EvalReport) -> Budget:
        """Return the cost of training up to one of the run's evaluations.

        Raises ConfigError if ``magrpo resume --from-stage`` has set aside the update that it evaluates.
        """
        iteration = evaluation.policy_version
        for budget in self.budgets:
            if budget.iteration == iteration:
                return budget
        raise ConfigError(
            f"run {self.run_id}: the update of iteration {iteration} is missing; compute it again: "
            f"{self.store.format_command('resume')}"
        )

    def nearest_evaluation(self, tokens: int) -> int:
        """Return the index of the evaluation whose budget is nearest to ``tokens`` generated in training."""
        distances = [abs(self.budget_at(report).tokens - tokens) for report in self.reports]
        return distances.index(min(distances))


# ------------------------------------------------------------------------------------------------------ problem means
def compute_problem_means(report: EvalReport, reward: Reward) -> dict[str, dict[str, dict[str, float]]]:
    """Compute the means of each problem, ``means["test/sampled"]["return"][task_id]``, in the units of the summary."""
    return {key: _average_values(quantities) for key, quantities in values_by_problem(report.rows, reward).items()}


def measure_texts(
    report: EvalReport, reward: Reward, roles: Mapping[str, str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Compute the means of each problem of the quantities that ``reward`` measures in the texts themselves.

    They are keyed like :func:`compute_problem_means`, with :data:`PAPER` before each name; empty unless the reward
    measures texts. ``roles``: the role of each agent.
    """
    if not isinstance(reward, MeasuresTexts):
        return {}
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in report.rows:
        by_quantity = values.setdefault(f"{row.split}/{row.mode}", {})
        texts = {roles[agent]: text for agent, text in row.texts.items()}
        for name, value in reward.measure_texts(texts).items():
            by_quantity.setdefault(PAPER + name, {}).setdefault(row.task_id, []).append(value)
    return {key: _average_values(quantities) for key, quantities in values.items()}


def _average_values(quantities: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    return {name: {task_id: fmean(v) for task_id, v in values.items()} for name, values in quantities.items()}


def mean_returns(report: EvalReport, reward: Reward) -> dict[str, float]:
    """Return the mean return on each held-out problem, sampled, as fractions of the maximum."""
    return compute_problem_means(report, reward)[HEADLINE]["return"]


def interval_over_seeds(values: Sequence[Mapping[str, float]], seed: int) -> Interval | None:
    """Compute the mean over seeds and problems, with its interval for new seeds on new problems; None without values.

    ``values`` holds one mapping for each training seed, with a value for each problem; problems that some mappings lack
    are left out. With a single mapping the interval is over problems, resampled with ``seed``.
    """
    shared = shared_keys(values)
    return interval_of_table([[one[task_id] for task_id in shared] for one in values], seed) if shared else None


def interval_of_table(values: Sequence[Sequence[float]], seed: int) -> Interval:
    """Compute :func:`crossed_interval`; without width for several seeds, but fewer than :data:`MIN_SEEDS`."""
    interval = crossed_interval(values, seed)
    return Interval.without_width(interval.mean) if 1 < len(values) < MIN_SEEDS else interval


def shared_keys(mappings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys that all mappings have, in the order of the first."""
    return [key for key in mappings[0] if all(key in other for other in mappings)] if mappings else []


def subtract_means(minuend: Mapping[str, float], subtrahend: Mapping[str, float]) -> dict[str, float]:
    """Subtract means problem by problem; problems that only one of the two has are left out."""
    return {task_id: value - subtrahend[task_id] for task_id, value in minuend.items() if task_id in subtrahend}


def paired_gain(before: Mapping[str, float], after: Mapping[str, float], seed: int) -> Interval | None:
    """Compute the mean difference on shared problems, with its bootstrap interval; None if there is no such problem."""
    return interval_over_seeds([subtract_means(after, before)], seed)


def common_parts(maxima: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the parts that all rewards share, with the maxima of the first reward."""
    return {part: maxima[0][part] for part in shared_keys(maxima)}


def common_share(fractions: Mapping[str, float], common: Mapping[str, float]) -> float:
    """Return the shared parts as a share of their joint maximum; ``fractions`` has each part over its own maximum."""
    return sum(fractions[part] * maximum for part, maximum in common.items()) / sum(common.values())
