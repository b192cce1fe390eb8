"""The tables of ``magrpo compare``: how runs differ in configuration, evaluation and cost."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from magrpo.algo.stats import bootstrap_difference
from magrpo.config_diff import list_differing_keys, read_flat_config
from magrpo.layout import TRAINING_STAGES
from magrpo.reports import figures
from magrpo.reports.budget import UNITS
from magrpo.reports.evaluations import EvaluatedRun, paired_gain, shared_keys
from magrpo.reports.over_seeds import equal_bar_tables
from magrpo.reports.page import ReportTable
from magrpo.types import Interval

_SEED = 0
"""Of the resampling, so that equal runs compare equal."""


def comparison_tables(runs: Sequence[EvaluatedRun]) -> Iterator[ReportTable]:
    """Every table; differences are to the first run."""
    labels = [run.label for run in runs]
    configs = [read_flat_config(run.store.path) for run in runs]
    rows = [(key, *(config.get(key, "(none)") for config in configs)) for key in list_differing_keys(configs)]
    note = "" if rows else "None: the configurations are equal."
    yield ReportTable("Configuration, where it differs", ("key", *labels), rows, note, text=True)
    keys = figures.sort_summary_keys(shared_keys([run.last.summary for run in runs]))
    yield _return_differences(runs, keys)
    for key in keys:
        yield _evaluation_table(runs, key)
    yield from _at_equal_tokens(runs, keys)
    yield from equal_bar_tables({run.label: [run] for run in runs})
    costs = [_run_costs(run) for run in runs]
    rows = [(name, *(of_run[name] for of_run in costs)) for name in costs[0]]
    yield ReportTable(
        "Cost", ("", *labels), rows, "Stages in seconds, all iterations together; tokens are those sampled."
    )


def compare_returns(first: EvaluatedRun, second: EvaluatedRun, key: str) -> tuple[Interval, str]:
    """The second run's mean return less the first's, a fraction, and a note on the pairing.

    Paired by problem if every problem of one evaluation is in the other with the same text, else unpaired.
    """
    minuend, subtrahend = (run.means[-1][key]["return"] for run in (second, first))
    same = [t for t in subtrahend if t in minuend and first.problems[t] == second.problems[t]]
    if same and len(same) == min(len(minuend), len(subtrahend)):
        return paired_gain(subtrahend, {t: minuend[t] for t in same}, _SEED), f"{len(same)} the same, paired"
    value = bootstrap_difference(list(minuend.values()), list(subtrahend.values()), _SEED)
    return value, f"not the same, unpaired ({len(same)} in both)"


def _return_differences(runs: Sequence[EvaluatedRun], keys: Sequence[str]) -> ReportTable:
    rows = []
    for key in keys:
        for run in runs[1:]:
            value, pairing = compare_returns(runs[0], run, key)
            labels = f"{run.label} \u2212 {runs[0].label}"
            rows.append((figures.summary_title(key), labels, figures.format_tested_difference(value), pairing))
    note = (
        "Percentage points of the maximum, bootstrap 95 % intervals over problems. They cover new problems of the same "
        f"kind, not other seeds of the training. {figures.NO_DIFFERENCE}"
    )
    return ReportTable("Differences of return", ("", "runs", "difference", "problems"), rows, note)


def _evaluation_table(runs: Sequence[EvaluatedRun], key: str) -> ReportTable:
    summaries = [run.last.summary[key] for run in runs]
    shared = {name: summaries[0][name] for name in shared_keys(summaries)}
    parts = {part: value for part, value in runs[0].config.reward.maxima.items() if part in shared}
    rows = [
        (figures.quantity_title(name), *(figures.format_interval(name, summary[name]) for summary in summaries))
        for name in figures.shown_quantities(shared, parts)
    ]
    rows.append(("problems", *(str(len(run.means[-1][key]["return"])) for run in runs)))
    note = "Percent of each run's maximum, 95 % intervals over problems; tokens are counts."
    return ReportTable(figures.summary_title(key), ("", *(run.label for run in runs)), rows, note)


def _at_equal_tokens(runs: Sequence[EvaluatedRun], keys: Sequence[str]) -> Iterator[ReportTable]:
    """Each run's evaluation nearest to the tokens of the cheapest one; no table unless two runs trained."""
    trained = [run for run in runs if run.budgets[-1].updates]
    if len(trained) < 2:
        return
    tokens = min(run.budgets[-1].tokens for run in trained)
    rows = []
    for run in trained:
        report = run.reports[run.nearest_evaluation(tokens)]
        counts = (f"{count:,}" for count in run.budget_at(report).counts.values())
        returns = (figures.format_interval("return", report.summary[key]["return"]) for key in keys)
        rows.append((run.label, str(report.policy_version), *counts, *returns))
    note = (
        f"Each run at the evaluation nearest to {tokens:,} tokens generated in training, the total of the cheapest "
        "run, and its cost by then. Return in percent of the run's own maximum."
    )
    columns = ("run", "iteration", *UNITS.values(), *map(figures.summary_title, keys))
    yield ReportTable("At an equal budget of tokens", columns, rows, note)


def _run_costs(run: EvaluatedRun) -> dict[str, str]:
    seconds: dict[str, float] = defaultdict(float)
    gpus = 0.0
    for _, stage, metrics in run.store.stage_metrics():
        name = stage.partition(".")[0]
        seconds[name] += metrics.get(f"time/{name}_s", 0.0)
        gpus += metrics.get("start/gpus", 0.0)
    total = sum(seconds.values())
    # Evaluations older than generated_tokens have 0 there; their response_tokens count the last turn.
    evaluated = sum(row.generated_tokens or row.response_tokens for report in run.reports for row in report.rows)
    costs = {f"{UNITS[unit]}, training": f"{count:,}" for unit, count in run.budgets[-1].counts.items()}
    costs["tokens generated, evaluation"] = f"{evaluated:,}"
    costs |= {stage: f"{seconds[stage]:.1f}" for stage in ("prepare", *TRAINING_STAGES, "evaluate", "report")}
    return costs | {"all": figures.format_duration(total), "GPU-hours": f"{gpus * total / 3600:.2f}"}
