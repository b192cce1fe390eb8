"""The comparison at the end of a sweep: each setting's mean over its seeds, with intervals, and what it took."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from magrpo.layout import is_finished
from magrpo.reports.charts import COLOURS, comparison_panels, comparison_picture, save
from magrpo.reports.comparison import Compared, evaluation_title, load_compared
from magrpo.reports.equal_bar import reached_bars
from magrpo.reports.figures import SPLIT_TITLES, cell, column_title, columns_of
from magrpo.reports.over_seeds import (
    OVER_SEEDS,
    Settings,
    at_equal_tokens,
    averaged,
    cost,
    less_first,
    shared_keys,
    tokens_at,
)
from magrpo.reports.page import Block, Pictures, write_page
from magrpo.reports.tables import Section, show
from magrpo.types import HEADLINE, EvalReport, Interval
from pipelines.experiments.sweep_grid import Sweep

_NOTE = (
    "Means over seeds, 95 % intervals for new seeds on new problems. A setting with one finished seed has the interval "
    "over problems in its place, which says nothing about other seeds."
)


def write(sweep: Sweep, console: Console) -> list[Path]:
    """Print the comparison of the runs that are finished and write it; the paths, none if no run is finished."""
    done = finished_runs(sweep)
    if not done:
        return []
    means = {title: averaged(runs) for title, runs in done.items()}
    sections = list(_sections(sweep, done, means))
    title = f"Sweep {sweep.name}"
    best = sorted(means, key=lambda name: -_return(means[name][-1]).mean)[: len(COLOURS)]
    words = short(sweep)
    shown = {words[name]: means[name] for name in means if name in best}
    of = {words[name]: done[name] for name in means if name in best}
    tokens = tokens_at(of, shown)
    pictures = save(comparison_picture(shown, OVER_SEEDS, tokens), sweep.folder / "curves")
    blocks: list[Block] = [
        Pictures("Learning curves", comparison_panels(shown, tokens), "curves.png", OVER_SEEDS),
        Pictures("Parts of the return", comparison_panels(shown, quantities=_parts(done)), note=OVER_SEEDS),
        *sections,
    ]
    paths = [*write_page(sweep.folder / "sweep", title, blocks), sweep.folder / "sweep.csv"]
    _write_csv(paths[-1], done, means)
    wide = Console(highlight=False)
    if not wide.is_terminal:
        wide.width = 160
    show(sections, wide)
    console.print(f"written: {paths[0]}, sweep.md, sweep.csv and curves beside it", soft_wrap=True, markup=False)
    return [*paths, *pictures]


def _parts(done: Settings) -> list[tuple[str, str]]:
    """The parts of the reward in every split."""
    parts = next(iter(done.values()))[0].config.reward.maxima
    return [(split, part) for part in parts for split in SPLIT_TITLES]


def finished_runs(sweep: Sweep) -> dict[str, list[Compared]]:
    """The runs of each setting that went to their end, by its title."""
    done: dict[str, list[Compared]] = {}
    for child in sweep.children:
        if is_finished(sweep.store(child)):
            done.setdefault(child.title, []).append(load_compared(child.run_id, sweep.store(child)))
    return done


def short(sweep: Sweep) -> dict[str, str]:
    """What a picture calls each setting: its values, if they tell it from the others."""
    names = {child.title: " ".join(child.setting.values()) or child.title for child in sweep.children}
    return names if len(set(names.values())) == len(names) else {title: title for title in names}


def _return(report: EvalReport) -> Interval:
    return report.summary[HEADLINE]["return"]


def _sections(sweep: Sweep, done: Settings, means: Mapping[str, Sequence[EvalReport]]) -> Iterator[Section]:
    last = {title: reports[-1].summary for title, reports in means.items()}
    parts = next(iter(done.values()))[0].config.reward.maxima
    order = list(SPLIT_TITLES)
    for key in sorted(
        shared_keys(last.values()), key=lambda key: (order.index(key.split("/")[0]), key.endswith("/greedy"))
    ):
        summaries = {title: summary[key] for title, summary in last.items()}
        names = shared_keys(summaries.values())
        some = next(iter(summaries.values()))
        columns = columns_of(
            {name: some[name] for name in names}, {part: parts[part] for part in parts if part in names}
        )
        rows = [
            (title, str(len(done[title])), *(cell(column, summary[column]) for column in columns))
            for title, summary in summaries.items()
        ]
        note = _NOTE if key == HEADLINE else ""
        yield Section(evaluation_title(key), ("setting", "seeds", *map(column_title, columns)), rows, note)
    ends = {title: [len(run.reports) - 1 for run in runs] for title, runs in done.items()}
    yield from less_first("Held-out problems, sampled, at the end of training", done, ends)
    if len(done) > 1:
        yield from at_equal_tokens(done)
    yield from reached_bars(done)
    yield cost(done)
    yield _runs(sweep, done)


def _runs(sweep: Sweep, done: Settings) -> Section:
    returns = {run.store.run_id: _return(run.last) for runs in done.values() for run in runs}
    rows = [
        (
            child.run_id,
            child.title,
            str(child.seed),
            cell("return", returns[child.run_id]) if child.run_id in returns else "not finished",
        )
        for child in sweep.children
    ]
    note = "Held-out return, sampled, percent of the maximum; intervals over problems."
    return Section("Runs", ("run", "setting", "seed", "return"), rows, note, text=True)


def _write_csv(path: Path, done: Settings, means: Mapping[str, Sequence[EvalReport]]) -> None:
    """Every figure in long form: of each run, and, without a seed, of each setting; fractions of the maximum."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["setting", "seed", "policy_version", "split", "mode", "quantity", "mean", "low", "high"])
        for title, runs in done.items():
            series = [(str(run.config.train.seed), run.reports) for run in runs] + [("", means[title])]
            for seed, reports in series:
                for report in reports:
                    for key, summary in report.summary.items():
                        for name, value in summary.items():
                            figures = (value.mean, value.low, value.high)
                            writer.writerow([title, seed, report.policy_version, *key.split("/"), name, *figures])
