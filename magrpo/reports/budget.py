"""The budget of a run: the cost of its training by iteration, for comparing runs at equal cost."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from magrpo.run.steps import TRAINING_STAGES

UNITS = {
    "tokens": "tokens generated",
    "joint_actions": "answer sets scored (joint actions)",
    "executions": "programs run",
    "updates": "updates",
}
"""Counts of a budget, with their titles in tables."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Cost of training up to and including ``iteration``, without evaluations.

    ``executions`` counts programs that actually ran: no cached results, no attempts of interrupted stages.
    ``seconds`` counts time inside stages.
    """

    iteration: int = 0
    tokens: int = 0
    joint_actions: int = 0
    executions: int = 0
    updates: int = 0
    seconds: float = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Counts by name, in the order of :data:`UNITS`."""
        return {unit: getattr(self, unit) for unit in UNITS}


def count_tokens(metrics: Mapping[str, float]) -> float:
    """Return the tokens that a stage of training generated: 0 for stages that generate none."""
    return metrics.get("rollout/tokens", 0.0)


def build_ledger(stage_metrics: Iterable[tuple[int, str, Mapping[str, float]]]) -> list[Budget]:
    """Return the budget after every iteration with an update, preceded by the empty budget of iteration 0.

    ``stage_metrics`` has the form of :meth:`magrpo.run.store.RunStore.stage_metrics`, in any order.
    """
    costs: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for iteration, stage, metrics in stage_metrics:
        name = stage.partition(".")[0]
        if iteration > 0 and name in TRAINING_STAGES:
            cost = costs[iteration]
            cost["tokens"] += count_tokens(metrics)
            cost["joint_actions"] += metrics.get("rollout/joint_actions", 0.0)
            for kind in ("executions", "probe_executions"):
                cost["executions"] += metrics.get(f"sandbox/{kind}", 0.0)
            if name == "update":
                cost["updates"] += 1
            cost["seconds"] += metrics.get(f"time/{name}_s", 0.0)
    budgets = [Budget()]
    for iteration in sorted(i for i, cost in costs.items() if cost["updates"]):
        last, cost = budgets[-1], costs[iteration]
        counts = {unit: count + round(cost[unit]) for unit, count in last.counts.items()}
        budgets.append(Budget(iteration, **counts, seconds=last.seconds + cost["seconds"]))
    return budgets
