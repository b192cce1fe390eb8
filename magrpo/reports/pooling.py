"""Checks before tables of baselines are pooled: they must differ in nothing but seeds."""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations

from magrpo.config.run import REFERENCE, BaselineRow, RunConfig
from magrpo.errors import ConfigError
from magrpo.reports.baselines import BaselineResult
from magrpo.run.comparability import score_alike, select_protocol
from magrpo.run.config_diff import flatten_tree
from magrpo.run.files import read_held_out
from magrpo.run.store import RunStore
from magrpo.types import Problem

Tables = Mapping[str, Sequence[BaselineResult]]
"""The rows of each table, by the name of its run."""
_COMPARED_APART = {"name", "title", "agents", "reward", "penalty"}
"""Fields of a row that may differ between seeds, or that :func:`score_alike` compares."""
_OF_ROWS = ("env.", "reward.", "penalty.")
"""Beginnings of keys of a run whose values rows have of their own."""


def read_evaluated(store: RunStore, results: Sequence[BaselineResult]) -> dict[str, Problem]:
    """Read the problems on which a table was evaluated, by id."""
    evaluated = {row.task_id for result in results for row in result.report.rows}
    return {task_id: problem for task_id, problem in read_held_out(store).items() if task_id in evaluated}


def check_rows_match(tables: Tables) -> None:
    """Raise ConfigError if rows of one name were measured in different ways."""
    (first, results), *others = tables.items()
    expected = {result.row.name: result.row for result in results}
    for run, others_results in others:
        for row in (result.row for result in others_results if result.row.name in expected):
            if differing := _list_differences(expected[row.name], row):
                raise ConfigError(
                    f"run {run}: row {row.name!r} has another {', '.join(differing)} than in run {first}, so the two "
                    "cannot be pooled; make both tables with the same configuration"
                )


def check_settings_match(configs: Mapping[str, RunConfig]) -> None:
    """Raise ConfigError if the runs of two tables sampled or scored their answers in different ways."""
    (first, config), *others = configs.items()
    expected = _list_settings(config)
    for run, settings in ((run, _list_settings(other)) for run, other in others):
        for key in dict.fromkeys([*expected, *settings]):
            value, wanted = settings.get(key, "(none)"), expected.get(key, "(none)")
            if value != wanted:
                raise ConfigError(
                    f"run {run} has {key} = {value}, but run {first} has {wanted}, so the two cannot be pooled; make "
                    "both tables with the same configuration"
                )


def list_repeated_rows(tables: Tables) -> set[str]:
    """List the rows for which two tables load weights of the same runs, as in mixed teams, instead of two seeds.

    Raises ConfigError if two tables load the same weights in every row of trained agents that both have.
    """
    repeated: set[str] = set()
    for (first, one), (other, two) in combinations(tables.items(), 2):
        trained, also_trained = _find_trained_runs(one), _find_trained_runs(two)
        shared = trained.keys() & also_trained.keys()
        same = {name for name in shared if trained[name] == also_trained[name]}
        if same and same == shared:
            raise ConfigError(
                f"runs {first} and {other} show agents of the same run, so they are not two seeds; compare tables of "
                "runs that were trained with different seeds"
            )
        repeated |= same
    return repeated


def _list_differences(one: BaselineRow, other: BaselineRow) -> list[str]:
    fields = [field for field in BaselineRow.model_fields if field not in _COMPARED_APART]
    found = [field for field in fields if getattr(one, field) != getattr(other, field)]
    return found if score_alike(one, other) else ["reward or penalty", *found]


def _list_settings(config: RunConfig) -> dict[str, object]:
    """List by dotted key what the evaluation of every row depends on, except its seed and the weights of its agents."""
    settings = flatten_tree(select_protocol(json.loads(config.resolved())))
    del settings["eval.seed"]
    settings |= {f"agents.{index}.model": agent.model for index, agent in enumerate(config.agents)}
    return {key: value for key, value in settings.items() if not key.startswith(_OF_ROWS)}


def _find_trained_runs(results: Sequence[BaselineResult]) -> dict[str, set[str]]:
    """Find the folders of the runs that trained the agents of each row; rows of untrained agents are left out."""
    weights = {result.row.name: {agent.start_from for agent in result.row.agents} for result in results}
    untrained = weights.get(REFERENCE, set())
    found = {
        name: {str(path.resolve()).partition("/stages/")[0] for path in paths - untrained if path is not None}
        for name, paths in weights.items()
    }
    return {name: folders for name, folders in found.items() if folders}
