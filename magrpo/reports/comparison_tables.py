"""The tables of comparisons: runs side by side. :mod:`magrpo.reports.comparison` has the verdicts."""

from collections.abc import Iterator, Sequence

from magrpo.reports import figures
from magrpo.reports.budget import UNITS
from magrpo.reports.comparison import (
    compare_means,
    list_differences,
    returns_compare,
)
from magrpo.reports.evaluations import EvaluatedRun, shared_keys
from magrpo.reports.page import PageSection
from magrpo.reports.tables import ReportTable
from magrpo.reports.verdict import judge_run
from magrpo.run.steps import STAGES, TRAINING_STAGES
from magrpo.run.store import merge_metrics
from magrpo.text import format_count
from magrpo.tracking.wall_time import read_wall_time
from magrpo.types import HEADLINE

NUM_KEYS = 12
"""Number of differing configuration keys that a page shows without a click."""


# ----------------------------------------------------------------------------------------------------------------- runs
def comparison_sections(runs: Sequence[EvaluatedRun]) -> Iterator[PageSection]:
    """Yield the sections after the curves: configuration and one table, then, folded, differences to the first run."""
    keys = figures.sort_summary_keys(shared_keys([run.last.summary for run in runs]))
    yield PageSection(_run_table(runs, HEADLINE))
    labels = [run.run_id for run in runs]
    rows = [(key, *map(str, values)) for key, values in list_differences(runs).items()]
    note = "" if rows else "None: the configurations are equal."
    title = "Configuration, where it differs"
    configuration = ReportTable(title, ("key", *labels), rows, note, text=True)
    finding = f"{title}: {format_count(len(rows), 'keys')}" if rows else ""
    yield PageSection(configuration, finding, folded=len(rows) > NUM_KEYS)
    comparable = [run for run in runs[1:] if returns_compare(runs[0], run)]
    if comparable:
        yield PageSection(_return_differences(runs[0], comparable, keys), folded=True)
    for key in keys:
        if key != HEADLINE:
            yield PageSection(_run_table(runs, key), folded=True)
    costs = [list_run_costs(run) for run in runs]
    names = dict.fromkeys(name for of_run in costs for name in of_run)
    rows = [(name, *(of_run.get(name, figures.UNDEFINED) for of_run in costs)) for name in names]
    note = "Stages in seconds, all iterations together; tokens are those sampled. GPU-hours are of wall time."
    yield PageSection(ReportTable("Cost", ("", *labels), rows, note), folded=True)


def summary_table(runs: Sequence[EvaluatedRun]) -> ReportTable:
    """Tabulate each run's held-out return, its gain in training, and tokens."""
    rows = []
    for run in runs:
        verdict = judge_run(run)
        gain = figures.UNDEFINED if verdict.gain is None else figures.format_difference(verdict.gain)
        tokens = f"{run.budgets[-1].tokens:,}"
        rows.append((run.run_id, figures.format_interval("return", verdict.after), gain, tokens))
    note = "Held-out return in percent of the maximum and its gain in training, with 95 % intervals over problems."
    return ReportTable("Runs", ("", "return", "gain", "tokens"), rows, note)


def _return_differences(first: EvaluatedRun, others: Sequence[EvaluatedRun], keys: Sequence[str]) -> ReportTable:
    rows = []
    for key in keys:
        for run in others:
            compared = compare_means(first, run, key, "return")
            difference = figures.format_tested_difference(compared.value)
            labels = f"{run.run_id} \u2212 {first.run_id}"
            rows.append((figures.summary_title(key), labels, difference, compared.pairing))
    note = (
        "Percentage points of the maximum, bootstrap 95 % intervals over problems. They cover new problems of the same "
        f"kind, not other seeds of the training. {figures.NO_DIFFERENCE}"
    )
    return ReportTable("Differences of return", ("", "runs", "difference", "problems"), rows, note)


def _run_table(runs: Sequence[EvaluatedRun], key: str) -> ReportTable:
    shared = {name: runs[0].last.summary[key][name] for name in shared_keys([run.last.summary[key] for run in runs])}
    parts = {part: value for part, value in runs[0].config.reward.maxima.items() if part in shared}
    rows = [
        (figures.quantity_title(name), *(figures.format_interval(name, run.last.summary[key][name]) for run in runs))
        for name in figures.shown_quantities(shared, parts)
    ]
    rows.append(("problems", *(str(len(run.means[-1][key]["return"])) for run in runs)))
    note = "Percent of each run's maximum, 95 % intervals over problems; tokens are counts."
    return ReportTable(figures.summary_title(key), ("", *(run.run_id for run in runs)), rows, note)


def list_run_costs(run: EvaluatedRun) -> dict[str, str]:
    metrics: dict[str, float] = {}
    for _, _, of_stage in run.store.stage_metrics():
        merge_metrics(metrics, of_stage)
    total = sum(value for key, value in metrics.items() if key.startswith("time/"))
    gpus = metrics.get("start/gpus", 0.0)
    evaluated = sum(row.generated_tokens for report in run.reports for row in report.rows)
    costs = {f"{UNITS[unit]}, training": f"{count:,}" for unit, count in run.budgets[-1].counts.items()}
    costs["tokens generated, evaluation"] = f"{evaluated:,}"
    needed = [stage for stage in TRAINING_STAGES if STAGES[stage].is_needed(run.config)]
    costs |= {
        stage: f"{metrics.get(f'time/{stage}_s', 0.0):.1f}"
        for stage in ("prepare", "start", *needed, "evaluate", "report")
    }
    wall_time = read_wall_time(run.store.path)
    hours = figures.UNDEFINED if wall_time is None else f"{gpus * wall_time.seconds / 3600:.2f}"
    return costs | {"all": figures.format_duration(total), "GPU-hours": hours}
