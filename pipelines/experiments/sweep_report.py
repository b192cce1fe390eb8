"""The comparison at the end of a sweep: each setting's mean over its seeds, with intervals, and what it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from magrpo.layout import is_finished
from magrpo.reports.charts import COLOURS, comparison_panels, compose_figure, save_figure
from magrpo.reports.evaluations import EvaluatedRun, load_evaluated_run, shared_keys
from magrpo.reports.figures import (
    EVALUATION_COLUMNS,
    SPLIT_TITLES,
    evaluation_rows,
    format_interval,
    quantity_title,
    shown_quantities,
    sort_summary_keys,
    summary_title,
    write_csv,
)
from magrpo.reports.over_seeds import (
    OVER_SEEDS,
    Settings,
    average_evaluations,
    budget_table,
    difference_tables,
    equal_bar_tables,
    equal_tokens_tables,
    tokens_by_iteration,
)
from magrpo.reports.page import Block, Pictures, ReportTable, print_tables, write_page
from magrpo.types import HEADLINE, EvalReport, Interval
from pipelines.experiments.sweep_grid import Sweep

_NOTE = (
    "Means over seeds, 95 % intervals for new seeds on new problems. A setting with one finished seed has the interval "
    "over problems in its place, which says nothing about other seeds."
)


def write_sweep_report(sweep: Sweep, console: Console) -> list[Path]:
    """Print the comparison of the runs that are finished and write it; the paths, none if no run is finished."""
    done = finished_runs(sweep)
    if not done:
        return []
    means = {title: average_evaluations(runs) for title, runs in done.items()}
    sections = list(_sections(sweep, done, means))
    title = f"Sweep {sweep.name}"
    best = sorted(means, key=lambda name: -_return(means[name][-1]).mean)[: len(COLOURS)]
    words = short_titles(sweep)
    shown = {words[name]: means[name] for name in means if name in best}
    of = {words[name]: done[name] for name in means if name in best}
    tokens = tokens_by_iteration(of, shown)
    panels = comparison_panels(shown, tokens)
    pictures = save_figure(compose_figure(panels, OVER_SEEDS, rows=2), sweep.folder / "curves")
    blocks: list[Block] = [
        Pictures("Learning curves", panels, "curves.png", OVER_SEEDS),
        Pictures("Parts of the return", comparison_panels(shown, quantities=_parts(done)), note=OVER_SEEDS),
        *sections,
    ]
    paths = [*write_page(sweep.folder / "sweep", title, blocks), sweep.folder / "sweep.csv"]
    _write_csv(paths[-1], done, means)
    wide = Console(highlight=False)
    if not wide.is_terminal:
        wide.width = 160
    print_tables(sections, wide)
    console.print(f"written: {paths[0]}, sweep.md, sweep.csv and curves beside it", soft_wrap=True, markup=False)
    return [*paths, *pictures]


def _parts(done: Settings) -> list[tuple[str, str]]:
    """The parts of the reward in every split."""
    parts = next(iter(done.values()))[0].config.reward.maxima
    return [(split, part) for part in parts for split in SPLIT_TITLES]


def finished_runs(sweep: Sweep) -> dict[str, list[EvaluatedRun]]:
    """The runs of each setting that went to their end, by its title."""
    done: dict[str, list[EvaluatedRun]] = {}
    for child in sweep.children:
        if is_finished(sweep.store(child)):
            done.setdefault(child.title, []).append(load_evaluated_run(child.run_id, sweep.store(child)))
    return done


def short_titles(sweep: Sweep) -> dict[str, str]:
    """What a picture calls each setting: its values, if they tell it from the others."""
    names = {child.title: " ".join(child.setting.values()) or child.title for child in sweep.children}
    return names if len(set(names.values())) == len(names) else {title: title for title in names}


def _return(report: EvalReport) -> Interval:
    return report.summary[HEADLINE]["return"]


def _sections(sweep: Sweep, done: Settings, means: Mapping[str, Sequence[EvalReport]]) -> Iterator[ReportTable]:
    last = {title: reports[-1].summary for title, reports in means.items()}
    parts = next(iter(done.values()))[0].config.reward.maxima
    for key in sort_summary_keys(shared_keys(list(last.values()))):
        summaries = {title: summary[key] for title, summary in last.items()}
        names = shared_keys(list(summaries.values()))
        some = next(iter(summaries.values()))
        columns = shown_quantities(
            {name: some[name] for name in names}, {part: parts[part] for part in parts if part in names}
        )
        rows = [
            (title, str(len(done[title])), *(format_interval(column, summary[column]) for column in columns))
            for title, summary in summaries.items()
        ]
        note = _NOTE if key == HEADLINE else ""
        yield ReportTable(summary_title(key), ("setting", "seeds", *map(quantity_title, columns)), rows, note)
    ends = {title: [(run, -1) for run in runs] for title, runs in done.items()}
    yield from difference_tables("Held-out problems, sampled, at the end of training", ends)
    if len(done) > 1:
        yield from equal_tokens_tables(done)
    yield from equal_bar_tables(done)
    yield budget_table(done)
    yield _runs(sweep, done)


def _runs(sweep: Sweep, done: Settings) -> ReportTable:
    returns = {run.store.run_id: _return(run.last) for runs in done.values() for run in runs}
    rows = [
        (
            child.run_id,
            child.title,
            str(child.seed),
            format_interval("return", returns[child.run_id]) if child.run_id in returns else "not finished",
        )
        for child in sweep.children
    ]
    note = "Held-out return, sampled, percent of the maximum; intervals over problems."
    return ReportTable("Runs", ("run", "setting", "seed", "return"), rows, note, text=True)


def _write_csv(path: Path, done: Settings, means: Mapping[str, Sequence[EvalReport]]) -> None:
    """Every figure in long form: of each run, and, without a seed, of each setting; fractions of the maximum."""
    rows = (
        (title, seed, *row)
        for title, runs in done.items()
        for seed, reports in [*((str(run.config.train.seed), run.reports) for run in runs), ("", means[title])]
        for row in evaluation_rows(reports)
    )
    write_csv(path, ("setting", "seed", *EVALUATION_COLUMNS), rows)
