"""Metrics of training, iteration by iteration: their series, and the charts and the table in a report.

The table lists every metric that a training stage reports, so a new metric appears in it without a change here. To draw
it as a chart, too, add its title and unit to :data:`CHARTS`.
"""

from collections.abc import Iterator, Mapping, Sequence

from magrpo.config.run import RunConfig
from magrpo.reports.charts import Panel, series_panel
from magrpo.reports.figures import quantity_title
from magrpo.reports.series import StageMetrics, metric_series, metrics_by_iteration
from magrpo.reports.tables import ReportTable
from magrpo.types import PENALTY

PERCENT = "percent"
CHARTS = {
    "rollout/<agent>/response_tokens": ("Length of an answer", "tokens"),
    "rollout/<agent>/cut_off_frac": ("Answers cut at the limit", PERCENT),
    "rollout/<agent>/copied_frac": ("Words copied from the prompt", PERCENT),
    "signal/<part>": ("Groups that differ in a part of the reward", PERCENT),
    "reward/frac_groups_equal": ("Groups with equal returns", PERCENT),
    "update/<agent>/entropy": ("Entropy", "nats per token"),
    "update/<agent>/grad_norm": ("Gradient norm before clipping", ""),
}
"""Title and unit of each chart, by the metric it shows, in the order of the page.

``<agent>`` and ``<part>`` stand for one line per agent and one per part of the reward. Metrics in percent are stored
as fractions.
"""


def draw_training_charts(metrics: StageMetrics, config: RunConfig) -> Iterator[Panel]:
    """Draw the charts of :data:`CHARTS`, except those without a value."""
    for pattern, (title, unit) in CHARTS.items():
        scale = 100 if unit == PERCENT else 1
        series = {}
        for label, key in _expand_pattern(pattern, config).items():
            points = [(iteration, scale * value) for iteration, value in metric_series(metrics, key)]
            if points:
                series[label] = points
        if series:
            yield series_panel(title, series, unit)


def _expand_pattern(pattern: str, config: RunConfig) -> Mapping[str, str]:
    """Return the metric of each line of a chart, by the line's label."""
    if "<agent>" in pattern:
        return {agent.name: pattern.replace("<agent>", agent.name) for agent in config.agents}
    if "<part>" in pattern:
        parts = list(config.reward.maxima)
        if config.penalty.is_on:
            parts.append(PENALTY)
        return {quantity_title(part): pattern.replace("<part>", part) for part in parts}
    return {"": pattern}


def tabulate_training_metrics(metrics: StageMetrics) -> ReportTable:
    """Tabulate every metric of the training stages: its first and last value, and the range in between."""
    by_iteration = metrics_by_iteration(metrics).values()
    keys = dict.fromkeys(key for values in by_iteration for key in values)
    rows = []
    for key in keys:
        values = [values[key] for values in by_iteration if key in values]
        rows.append((key, *map(_format_value, (values[0], values[-1], min(values), max(values)))))
    columns = ("metric", "first", "last", "lowest", "highest")
    note = "Every metric of the training iterations, as MLflow has them. docs/metrics.md says what is healthy."
    return ReportTable("Training metrics", columns, rows, note)


def _format_value(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"


def list_training_returns(metrics: StageMetrics, config: RunConfig) -> Sequence[tuple[int, float]]:
    """Return the return of each iteration in percent of the maximum."""
    returns = metric_series(metrics, "reward/joint")
    return [(iteration, 100 * config.reward.fraction(value)) for iteration, value in returns]
