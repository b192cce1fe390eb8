"""The pages of comparisons: runs side by side, and settings over their seeds.

:mod:`magrpo.reports.comparison` has the verdicts, :mod:`magrpo.reports.over_seeds` the means and intervals over seeds.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from magrpo.reports import figures
from magrpo.reports.budget import UNITS, format_count
from magrpo.reports.charts import COLOURS, comparison_panels
from magrpo.reports.comparison import (
    RunComparison,
    compare_means,
    judge_settings,
    list_differences,
    score_alike,
    share_problems,
)
from magrpo.reports.evaluations import EvaluatedRun, interval_over_seeds, shared_keys
from magrpo.reports.over_seeds import (
    MIN_SEEDS,
    OVER_SEEDS,
    SEED,
    TOO_FEW_SEEDS,
    Evaluation,
    Evaluations,
    Settings,
    average_evaluations,
    format_over_seeds,
    format_seed_difference,
    has_interval,
    hide_intervals,
    subtract_over_seeds,
    tokens_by_iteration,
)
from magrpo.reports.page import Pictures, ReportTable, Section, write_page
from magrpo.reports.verdict import judge_run
from magrpo.run.steps import STAGES, TRAINING_STAGES
from magrpo.types import HEADLINE

NUM_KEYS = 12
"""Number of differing configuration keys that a page shows without a click."""
COMPARED = ("return", "pass_at_1")
"""Quantities for which curves and differences are shown."""
SHOWN = ("return", "tests", "cooperation", "pass_at_1")
_SWEEP_NOTE = (
    "Means over seeds, 95 % intervals for new seeds on new problems. A setting with one finished seed has an interval "
    "over problems instead, which says nothing about other seeds. Return is in percent of the setting's own maximum: "
    "where the parts of the rewards differ, compare tests and pass@1."
)


# ----------------------------------------------------------------------------------------------------------------- runs
def comparison_sections(runs: Sequence[EvaluatedRun]) -> Iterator[Section]:
    """Yield the sections after the curves: configuration and one table, then, folded, differences to the first run."""
    keys = figures.sort_summary_keys(shared_keys([run.last.summary for run in runs]))
    yield Section(_run_table(runs, HEADLINE))
    labels = [run.label for run in runs]
    rows = [(key, *values) for key, values in list_differences(runs).items()]
    note = "" if rows else "None: the configurations are equal."
    title = "Configuration, where it differs"
    configuration = ReportTable(title, ("key", *labels), rows, note, text=True)
    finding = f"{title}: {format_count(len(rows), 'keys')}" if rows else ""
    yield Section(configuration, finding, folded=len(rows) > NUM_KEYS)
    comparable = [run for run in runs[1:] if share_problems(runs[0], run) and score_alike(runs[0], run)]
    if comparable:
        yield Section(_return_differences(runs[0], comparable, keys), folded=True)
    for key in keys:
        if key != HEADLINE:
            yield Section(_run_table(runs, key), folded=True)
    trained = {run.label: [run] for run in runs if run.budgets[-1].updates}
    if len(trained) > 1:
        for table in equal_tokens_tables(trained):
            yield Section(table, folded=True)
    costs = [list_run_costs(run) for run in runs]
    names = dict.fromkeys(name for of_run in costs for name in of_run)
    rows = [(name, *(of_run.get(name, figures.UNDEFINED) for of_run in costs)) for name in names]
    note = "Stages in seconds, all iterations together; tokens are those sampled."
    yield Section(ReportTable("Cost", ("", *labels), rows, note), folded=True)


def summary_table(runs: Sequence[EvaluatedRun]) -> ReportTable:
    """Tabulate each run's held-out return, its gain in training, and tokens, within 60 columns."""
    rows = []
    for run in runs:
        verdict = judge_run(run)
        gain = figures.UNDEFINED if verdict.gain is None else figures.format_difference(verdict.gain)
        tokens = f"{run.budgets[-1].tokens:,}"
        cells = (figures.format_interval("return", verdict.after), gain)
        rows.append((run.label, *(cell.replace(" [", "\n[") for cell in cells), tokens))
    note = "Held-out return in percent of the maximum and its gain in training, with 95 % intervals over problems."
    return ReportTable("Runs", ("", "return", "gain", "tokens"), rows, note)


def _return_differences(first: EvaluatedRun, others: Sequence[EvaluatedRun], keys: Sequence[str]) -> ReportTable:
    rows = []
    for key in keys:
        for run in others:
            value, pairing = compare_means(first, run, key, "return")
            labels = f"{run.label} \u2212 {first.label}"
            rows.append((figures.summary_title(key), labels, figures.format_tested_difference(value), pairing))
    note = (
        "Percentage points of the maximum, bootstrap 95 % intervals over problems. They cover new problems of the same "
        f"kind, not other seeds of the training. {figures.NO_DIFFERENCE}"
    )
    return ReportTable("Differences of return", ("", "runs", "difference", "problems"), rows, note)


def _run_table(runs: Sequence[EvaluatedRun], key: str) -> ReportTable:
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


def list_run_costs(run: EvaluatedRun) -> dict[str, str]:
    seconds: dict[str, float] = defaultdict(float)
    gpus = 0.0
    for _, stage, metrics in run.store.stage_metrics():
        name = stage.partition(".")[0]
        seconds[name] += metrics.get(f"time/{name}_s", 0.0)
        gpus += metrics.get("start/gpus", 0.0)
    total = sum(seconds.values())
    evaluated = sum(row.generated_tokens for report in run.reports for row in report.rows)
    costs = {f"{UNITS[unit]}, training": f"{count:,}" for unit, count in run.budgets[-1].counts.items()}
    costs["tokens generated, evaluation"] = f"{evaluated:,}"
    needed = [stage for stage in TRAINING_STAGES if STAGES[stage].is_needed(run.config)]
    costs |= {stage: f"{seconds[stage]:.1f}" for stage in ("prepare", *needed, "evaluate", "report")}
    return costs | {"all": figures.format_duration(total), "GPU-hours": f"{gpus * total / 3600:.2f}"}


# ------------------------------------------------------------------------------------------- settings, over their seeds
def setting_table(settings: Settings) -> ReportTable:
    """Tabulate the settings at the end of training on held-out problems, within 60 columns."""
    lines = []
    for title, runs in settings.items():
        summary = average_evaluations(runs)[-1].summary[HEADLINE]
        shown = [name for name in COMPARED if name in summary]
        cells = (format_over_seeds(name, summary[name], len(runs)) for name in shown)
        lines.append((title, str(len(runs)), *(cell.replace(" [", "\n[") for cell in cells)))
    note = "Held-out problems, sampled; percent of the maximum."
    if all(len(runs) == 1 for runs in settings.values()):
        note += " 95 % intervals over problems, which say nothing about other seeds."
    elif all(has_interval(len(runs)) for runs in settings.values()):
        note += " 95 % intervals for new seeds on new problems."
    else:
        note += f" {TOO_FEW_SEEDS}"
    heads = ("setting", "seeds", *map(figures.quantity_title, shown))
    return ReportTable("At the end of training", heads, lines, note)


def write_settings(
    page: Path, title: str, settings: Settings, details: Sequence[ReportTable] = ()
) -> list[RunComparison]:
    """Write the page that compares settings over their seeds, ending with ``details``; return its verdicts.

    Its curves show the best settings, as many as there are colours.
    """
    means = {name: average_evaluations(runs) for name, runs in settings.items()}
    order = sorted(means, key=lambda name: -means[name][-1].summary[HEADLINE]["return"].mean)
    best = order[: len(COLOURS)]
    shown = {name: hide_intervals(means[name], len(runs)) for name, runs in settings.items() if name in best}
    quantities = [("test", quantity) for quantity in COMPARED]
    curves = comparison_panels(shown, tokens_by_iteration(settings, shown), quantities)
    ends = {name: [(run, -1) for run in runs] for name, runs in settings.items()}
    headline, *tables = setting_tables(settings)
    tables += difference_tables("Held-out problems, sampled, at the end of training", ends)
    if len(settings) > 1:
        tables += equal_tokens_tables(settings)
    tables.append(budget_table(settings))
    comparisons = judge_settings(settings)
    sections = [Section(table, folded=True) for table in (*tables, *details)]
    banners = [one.banner for one in comparisons]
    write_page(page, title, [*banners, Pictures("Learning curves", curves, OVER_SEEDS), headline, *sections])
    return comparisons


def setting_tables(settings: Settings) -> Iterator[ReportTable]:
    """Yield a table for each split and mode, with a line for each setting at the end of training."""
    parts = next(iter(settings.values()))[0].config.reward.maxima
    last = {title: average_evaluations(runs)[-1].summary for title, runs in settings.items()}
    for key in figures.sort_summary_keys(shared_keys(list(last.values()))):
        summaries = {title: summary[key] for title, summary in last.items()}
        first = next(iter(summaries.values()))
        shared = {name: first[name] for name in shared_keys(list(summaries.values()))}
        columns = figures.shown_quantities(shared, {part: 1.0 for part in parts if part in shared})
        rows = []
        for title, summary in summaries.items():
            num_seeds = len(settings[title])
            cells = (format_over_seeds(column, summary[column], num_seeds) for column in columns)
            rows.append((title, str(num_seeds), *cells))
        heads = ("setting", "seeds", *map(figures.quantity_title, columns))
        yield ReportTable(figures.summary_title(key), heads, rows, _SWEEP_NOTE if key == HEADLINE else "")


def budget_table(settings: Settings) -> ReportTable:
    """Tabulate the mean cost of training of each setting's runs."""
    rows = []
    for title, runs in settings.items():
        budgets = [run.budgets[-1] for run in runs]
        counts = (f"{fmean(budget.counts[unit] for budget in budgets):,.0f}" for unit in UNITS)
        rows.append((title, *counts, figures.format_duration(fmean(budget.seconds for budget in budgets))))
    note = "Training only, a mean over the finished runs of each setting; cached programs are not run again."
    return ReportTable("Budget of a run", ("setting", *UNITS.values(), "time in stages"), rows, note)


def evaluation_table(title: str, evaluations: Evaluations, note: str) -> ReportTable:
    """Tabulate results and cost of each setting at the given evaluations of its runs."""
    columns = _shared_quantities(SHOWN, evaluations)
    rows = []
    for setting, chosen in evaluations.items():
        budgets = [run.budget_at(run.reports[index]) for run, index in chosen]
        counts = (f"{fmean(getattr(budget, unit) for budget in budgets):,.0f}" for unit in ("iteration", *UNITS))
        cells = []
        for name in columns:
            means = [run.means[index][HEADLINE][name] for run, index in chosen]
            cells.append(format_over_seeds(name, interval_over_seeds(means, SEED), len(chosen)))
        rows.append((setting, str(len(chosen)), *counts, *cells))
    heads = ("setting", "seeds", "iteration", *UNITS.values(), *map(figures.quantity_title, columns))
    if any(len(chosen) == MIN_SEEDS - 1 for chosen in evaluations.values()):
        note += f" {TOO_FEW_SEEDS}"
    return ReportTable(title, heads, rows, note)


def difference_tables(title: str, evaluations: Evaluations) -> Iterator[ReportTable]:
    """Yield the differences of each setting to the first, paired by seed and problem; needs two shared seeds."""
    first, *others = evaluations
    shown = _shared_quantities(COMPARED, evaluations)
    by_seed = {name: {one[0].config.train.seed: one for one in chosen} for name, chosen in evaluations.items()}
    rows = []
    for setting in others:
        pairs = [(chosen, by_seed[first][seed]) for seed, chosen in by_seed[setting].items() if seed in by_seed[first]]
        if len(pairs) > 1:
            rows.append((setting, *(_format_seed_difference(pairs, name) for name in shown), str(len(pairs))))
    if rows:
        note = "Percentage points, paired by seed and problem; 95 % intervals for new seeds on new problems. "
        columns = ("setting", *map(figures.quantity_title, shown), "seeds")
        yield ReportTable(
            f"{title}, difference to {first}", columns, rows, f"{note}{figures.NO_DIFFERENCE} {TOO_FEW_SEEDS}"
        )


def equal_tokens_tables(settings: Settings) -> Iterator[ReportTable]:
    """Yield results at the evaluations nearest to the cheapest run's tokens, and differences to the first setting."""
    tokens = min(run.budgets[-1].tokens for runs in settings.values() for run in runs)
    nearest = {title: [(run, run.nearest_evaluation(tokens)) for run in runs] for title, runs in settings.items()}
    title = "At an equal budget of tokens"
    note = (
        f"Each run at the evaluation nearest to {tokens:,} tokens generated in training, the total of the cheapest run."
    )
    yield evaluation_table(title, nearest, note)
    yield from difference_tables(title, nearest)


def _shared_quantities(names: Sequence[str], evaluations: Evaluations) -> list[str]:
    """Return those ``names`` that every evaluation has on held-out problems, sampled."""
    means = [run.means[index][HEADLINE] for chosen in evaluations.values() for run, index in chosen]
    return [name for name in names if all(name in of_run for of_run in means)]


def _format_seed_difference(pairs: Sequence[tuple[Evaluation, Evaluation]], quantity: str) -> str:
    value = subtract_over_seeds(pairs, quantity)
    if value is None:
        return "other problems"
    if len(pairs) < MIN_SEEDS:
        return format_seed_difference(value, len(pairs))
    return figures.format_tested_difference(value)
