"""The budget of a run: what its training took, iteration by iteration, so that runs are compared at equal cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

UNITS = {
    "tokens": "tokens generated",
    "joint_actions": "joint actions scored",
    "executions": "programs run",
    "updates": "updates",
}
"""What is counted, and how it is called in tables."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What training took from its start to the end of an iteration; evaluations are not in it.

    ``executions`` counts programs that were really run: those known already, and those of tries that were interrupted,
    are left out. ``seconds`` is time inside the stages.
    """

    iteration: int = 0
    tokens: int = 0
    joint_actions: int = 0
    executions: int = 0
    updates: int = 0
    seconds: float = 0.0


def ledger(stage_metrics: Iterable[tuple[int, str, Mapping[str, float]]]) -> list[Budget]:
    """The budget after every iteration that has an update, from 0, which took nothing.

    ``stage_metrics`` are iteration, stage and metrics of what is committed, in any order: see
    :meth:`magrpo.store.RunStore.stage_metrics`.
    """
    spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for iteration, stage, metrics in stage_metrics:
        name = stage.partition(".")[0]
        if iteration == 0 or name not in ("rollout", "score", "credit", "update"):
            continue
        of = spent[iteration]
        of["tokens"] += metrics.get("rollout/tokens", 0.0)
        of["joint_actions"] += metrics.get("rollout/joint_actions", 0.0)
        of["executions"] += metrics.get("sandbox/executions", 0.0)
        of["updates"] += name == "update"
        of["seconds"] += metrics.get(f"time/{name}_s", 0.0)
    budgets = [Budget()]
    for iteration in sorted(i for i, of in spent.items() if of["updates"]):
        last, of = budgets[-1], spent[iteration]
        counts = {name: getattr(last, name) + round(of[name]) for name in UNITS}
        budgets.append(Budget(iteration, **counts, seconds=last.seconds + of["seconds"]))
    return budgets


def at(budgets: Iterable[Budget], iteration: int) -> Budget:
    """The budget at the end of ``iteration``."""
    return next(budget for budget in budgets if budget.iteration == iteration)
