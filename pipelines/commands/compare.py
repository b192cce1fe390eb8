"""``magrpo compare``: compares runs, or runs of baselines; prints the result and writes a page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from magrpo.errors import ConfigError
from magrpo.experiments.baselines import BASELINES
from magrpo.process.environment import shorten_path
from magrpo.reports.baselines import BaselineResult, BaselineTable, pool_baselines, read_baselines
from magrpo.reports.charts import COLOURS, OVER_PROBLEMS, comparison_panels
from magrpo.reports.comparison import judge_difference, list_differences
from magrpo.reports.comparison_tables import comparison_sections, summary_table
from magrpo.reports.evaluations import EvaluatedRun
from magrpo.reports.page import PageSection, Pictures, print_banners, write_page
from magrpo.reports.pooling import check_rows_match, check_settings_match, list_repeated_rows, read_evaluated
from magrpo.reports.tables import print_tables
from magrpo.reports.verdict import judge_run
from magrpo.run.steps import makes_tables, steps
from magrpo.run.store import RunStore
from magrpo.types import HEADLINE, Interval
from pipelines.arguments import HomePath, Json, Root, RunId

NUM_PRINTED = 6
"""Number of differing configuration keys that are printed; the page has all of them."""


def compare_runs(*run: RunId, output: HomePath | None = None, as_json: Json = False, root: Root = Path("runs")) -> int:
    """Compare runs by id; the exit code, 0. Raises ConfigError for names that cannot be compared.

    Args:
        run: Ids of runs; each is compared with the first.
        output: Folder to write to; by default ROOT/comparisons/RUN-vs-RUN.
    """
    if not 2 <= len(run) <= len(COLOURS):
        raise ConfigError(f"compare takes 2 to {len(COLOURS)} runs, got {len(run)}")
    stores = [RunStore.open(root, name) for name in run]
    names = [store.run_id for store in stores]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"compare: run {twice} is named twice")
    folder = output or root / "comparisons" / "-vs-".join(names)[:200]
    console = Console(highlight=False, quiet=as_json)
    if not console.is_terminal:
        console.width = 160
    tables = [store.run_id for store in stores if makes_tables(store.config())]
    if tables and len(tables) < len(stores):
        raise ConfigError(
            f"compare: run {tables[0]} compares baselines, but the others do not; compare only like with like"
        )
    compare = _compare_baselines if tables else _compare_trainings
    tree = compare(stores, folder, console)
    if as_json:
        print(json.dumps(tree, indent=1))
    return 0


def _compare_trainings(stores: Sequence[RunStore], folder: Path, console: Console) -> dict[str, Any]:
    runs = [EvaluatedRun.read(store) for store in stores]
    tokens = {
        run.run_id: {report.policy_version: float(run.budget_at(report).tokens) for report in run.reports}
        for run in runs
    }
    evaluations = {run.run_id: run.reports for run in runs}
    curves = Pictures("Learning curves", comparison_panels(evaluations, tokens), OVER_PROBLEMS)
    ends = [f"{run.run_id} ended at {run.last.summary[HEADLINE]['return'].mean:.1%}" for run in runs]
    comparisons = [judge_difference(runs[0], run) for run in runs[1:]]
    *others, last = (run.run_id for run in runs)
    title = f"Comparison of {', '.join(others)} and {last}"
    banners = [comparison.banner for comparison in comparisons]
    curves_section = PageSection(curves, f"Return: {', '.join(ends)}")
    write_page(folder / "compare.html", title, [*banners, curves_section, *comparison_sections(runs)])
    print_banners(banners, console)
    print_tables([summary_table(runs)], console)
    differing = list_differences(runs)
    for key, values in list(differing.items())[:NUM_PRINTED]:
        console.print(f"{key}: {', '.join(map(str, values))}", markup=False)
    if len(differing) > NUM_PRINTED:
        console.print(f"and {len(differing) - NUM_PRINTED} more keys of the configuration differ")
    _print_written(folder / "compare.html", console)
    return {
        "runs": [_describe_run(run) for run in runs],
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "configuration": differing,
        "page": str(folder / "compare.html"),
    }


def _describe_run(run: EvaluatedRun) -> dict[str, Any]:
    """Describe a run for scripts, in fractions of the maximum."""
    verdict = judge_run(run)
    evaluation, budget = _describe_summary(run.last.summary), asdict(run.budgets[-1])
    return {"run": run.run_id, "verdict": asdict(verdict), "evaluation": evaluation, "budget": budget}


def _describe_summary(summary: Mapping[str, Mapping[str, Interval]]) -> dict[str, dict[str, Any]]:
    return {key: {name: asdict(value) for name, value in values.items()} for key, values in summary.items()}


def _print_written(page: Path, console: Console) -> None:
    console.print(f"page: {shorten_path(page)}", soft_wrap=True, markup=False)


def _compare_baselines(stores: Sequence[RunStore], folder: Path, console: Console) -> dict[str, Any]:
    """Pool the rows that all runs of baselines have into one table."""
    configs = {store.run_id: store.config() for store in stores}
    tables: dict[str, list[BaselineResult]] = {}
    for store in stores:
        config = configs[store.run_id]
        if not all(store.is_committed(step.output) for step in steps(config) if step.stage == "baseline"):
            raise ConfigError(f"run {store.run_id} is not finished; resume it: {store.format_command('resume')}")
        tables[store.run_id] = read_baselines(store, config)
    evaluated = [read_evaluated(store, tables[store.run_id]) for store in stores]
    for store, problems in zip(stores, evaluated, strict=True):
        if problems != evaluated[0]:
            first = stores[0].run_id
            raise ConfigError(
                f"run {store.run_id} was evaluated on other problems than {first}, so they cannot be compared"
            )
    check_rows_match(tables)
    check_settings_match(configs)
    repeated = list_repeated_rows(tables)
    runs = [[result for result in results if result.row.name not in repeated] for results in tables.values()]
    pooled = pool_baselines(runs, {name: entry.title for name, entry in BASELINES.items()})
    names = {result.row.name for result in pooled}
    rows = [result.row.name for results in runs for result in results]
    others = {name: "not in all of the runs" for name in rows if name not in names}
    others |= dict.fromkeys(sorted(repeated), "two of the runs load the same weights, so they are no two seeds")
    config = configs[stores[0].run_id]
    baselines = config.baselines.model_copy(update={"left_out": {**config.baselines.left_out, **others}})
    table = BaselineTable(config.model_copy(update={"baselines": baselines}), pooled)
    table.write_files(folder, f"Agents and baselines of {', '.join(store.run_id for store in stores)}")
    print_banners([table.judge_rows()], console)
    print_tables([table.paper_table(), table.summary_table(brief=True)], console)
    for name, reason in others.items():
        console.print(f"left out: {name}: {reason}", markup=False)
    _print_written(folder / "baselines.html", console)
    return {**json.loads((folder / "baselines.json").read_text()), "page": str(folder / "baselines.html")}
