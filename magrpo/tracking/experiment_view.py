"""The view of an experiment in MLflow: its kind, a description, and a shared view of its runs with the return first.

MLflow keeps the columns and charts of a page in the browser. A shared view is a tag of the experiment that holds them;
a link with ``?viewStateShareKey=`` opens it.
"""

import json
from collections.abc import Iterator, Mapping

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
CHARTS = {
    "Held-out problems": ("eval/return", "eval/pass_at_1", "eval/ood/sampled/return", "eval/test/greedy/return"),
    "Training reward": ("reward/joint", "reward/tests", "reward/cooperation", "reward/length_ratio", "reward/style"),
    "Answers and signal": (
        "rollout/response_tokens",
        "rollout/cut_off_frac",
        "reward/frac_groups_equal",
        "signal/tests",
        "signal/cooperation",
        "signal/style",
    ),
    "Update": ("update/lr", "update/loss", "time/update_s", "time/rollout_s"),
}
"""Metrics of the charts, by section; MLflow hides a chart that no run has data for."""


def view_link(experiment_id: str) -> str:
    """The link to the runs of an experiment in the shared view, for use on a page of MLflow."""
    return f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}&{TRAINING_MODE}"


def experiment_tags(experiment_id: str) -> dict[str, str]:
    """The tags of an experiment with training runs."""
    link = view_link(experiment_id)
    note = (
        f"Trainings by [MAGRPO](https://arxiv.org/abs/2508.04652): [runs with return, pass@1, gain and verdict first]"
        f"({link}), [the same as charts]({link}&compareRunsMode=CHART)."
    )
    return {
        "mlflow.experimentKind": "custom_model_development",  # MLflow guesses "GenAI" from the traces
        "mlflow.experiment.primaryMetric.name": "eval/return",
        "mlflow.experiment.primaryMetric.greaterIsBetter": "True",
        "mlflow.note.content": note,
        f"mlflow.sharedViewState.{VIEW}": json.dumps(_view_state()),
    }


def missing_tags(experiment_id: str, found: Mapping[str, str]) -> dict[str, str]:
    """The tags of :func:`experiment_tags` that an experiment lacks; a kind or description set by the user stays."""
    own = ("mlflow.experimentKind", "mlflow.note.content")
    return {
        key: value
        for key, value in experiment_tags(experiment_id).items()
        if found.get(key) != value and not (key in own and key in found)
    }


def _view_state() -> dict[str, object]:
    """The state of MLflow's page of runs, where it differs from the default."""
    sections = [
        {"uuid": title, "name": title, "display": True, "isReordered": True, "deleted": False, "isGenerated": False}
        for title in CHARTS
    ]
    return {
        "selectedColumns": list(COLUMNS),
        "columnOrder": list(COLUMNS),
        "compareRunCharts": list(_describe_charts()),
        "compareRunSections": sections,
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
    }


def _describe_charts() -> Iterator[dict[str, object]]:
    for title, keys in CHARTS.items():
        for key in keys:
            yield {
                "type": "LINE",
                "uuid": key,
                "metricKey": key,
                "metricSectionId": title,
                "runsCountToCompare": 10,
                "deleted": False,
                "isGenerated": True,
            }
