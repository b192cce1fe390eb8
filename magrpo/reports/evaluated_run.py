"""A run with its evaluations, as comparisons read it from the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from magrpo.config import RunConfig
from magrpo.layout import find_evaluations, read_evaluation, read_held_out
from magrpo.plugins import ConfigError
from magrpo.reports.budget import Budget, build_ledger
from magrpo.reports.problem_means import MeansBySummary, compute_problem_means
from magrpo.store import RunStore
from magrpo.types import EvalReport, Problem


@dataclass
class EvaluatedRun:
    """A run under the label that tables and curves give it."""

    label: str
    store: RunStore
    config: RunConfig
    reports: Sequence[EvalReport]
    """Its evaluations in their order, at least one."""

    @property
    def last(self) -> EvalReport:
        return self.reports[-1]

    @cached_property
    def means(self) -> list[MeansBySummary]:
        """The problem means of each evaluation: ``means[-1]["test/sampled"]["return"][task_id]``."""
        return [compute_problem_means(report, self.config.reward) for report in self.reports]

    @cached_property
    def budgets(self) -> list[Budget]:
        """The cost of its training by iteration."""
        return build_ledger(self.store.stage_metrics())

    @cached_property
    def problems(self) -> Mapping[str, Problem]:
        """The problems it does not train on, by id."""
        return read_held_out(self.store)

    def last_returns(self, key: str) -> Mapping[str, float]:
        """The mean return on each problem in the last evaluation, ``key`` as ``test/sampled``; fractions."""
        return self.means[-1].get(key, {}).get("return", {})

    def budget_at(self, evaluation: EvalReport) -> Budget:
        """The cost of training up to one of its evaluations."""
        return next(budget for budget in self.budgets if budget.iteration == evaluation.policy_version)

    def nearest_evaluation(self, tokens: int) -> int:
        """Index of the evaluation whose budget is nearest to ``tokens`` generated in training."""
        distances = [abs(self.budget_at(report).tokens - tokens) for report in self.reports]
        return distances.index(min(distances))


def load_evaluated_run(label: str, store: RunStore) -> EvaluatedRun:
    """Read a run directory.

    Raises:
        ConfigError: the run has no evaluation, or another version wrote its configuration.
    """
    config = load_run_config(store)
    reports = [read_evaluation(store.folder(pointer)) for pointer in find_evaluations(store).values()]
    if not reports:
        raise ConfigError(f"run {store.run_id} has no evaluation yet; resume it: magrpo train --resume {store.run_id}")
    return EvaluatedRun(label, store, config, reports)


def load_run_config(store: RunStore) -> RunConfig:
    """The configuration of a run; ConfigError if another version wrote it."""
    try:
        return store.config()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"run {store.run_id}: config.json is of another version ({error})") from error
