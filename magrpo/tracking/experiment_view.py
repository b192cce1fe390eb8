"""The view of an experiment in MLflow: its kind, a description, and a shared view of its runs with the return first.

MLflow keeps the columns of a page in the browser. A shared view is a tag of the experiment that holds them; a link with
``?viewStateShareKey=`` opens it.
"""

import json
from collections.abc import Mapping

from magrpo.tracking.connection import TRAINING_MODE

VIEW = "magrpo"
"""Name of the shared view in links."""
COLUMNS = (
    "metrics.`eval/return`",
    "metrics.`eval/pass_at_1`",
    "tags.`gain`",
    "tags.`verdict`",
    "params.`train.num_iterations`",
    "params.`train.seed`",
)
"""Columns of the list of runs, after the name and the time of a run."""


def view_link(experiment_id: str) -> str:
    """The link to the runs of an experiment in the shared view, for use on a page of MLflow."""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&{TRAINING_MODE}"


def experiment_tags(experiment_id: str) -> dict[str, str]:
    """The tags of an experiment with training runs."""
    link = view_link(experiment_id)
    view = {"selectedColumns": COLUMNS, "columnOrder": COLUMNS, "hideEmptyCharts": True}
    note = (
        f"Trainings by [MAGRPO](https://arxiv.org/abs/2508.04652): [runs with return, pass@1, gain and verdict first]"
        f"({link}), [the same as charts]({link}&compareRunsMode=CHART)."
    )
    return {
        "mlflow.experimentKind": "custom_model_development",  # MLflow guesses "GenAI" from the traces
        "mlflow.experiment.primaryMetric.name": "eval/return",
        "mlflow.experiment.primaryMetric.greaterIsBetter": "True",
        "mlflow.note.content": note,
        f"mlflow.sharedViewState.{VIEW}": json.dumps(view),
    }


def missing_tags(experiment_id: str, found: Mapping[str, str]) -> dict[str, str]:
    """The tags of :func:`experiment_tags` that an experiment lacks; a kind or description set by the user stays."""
    own = ("mlflow.experimentKind", "mlflow.note.content")
    return {
        key: value
        for key, value in experiment_tags(experiment_id).items()
        if found.get(key) != value and not (key in own and key in found)
    }
