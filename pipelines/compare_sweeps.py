"""``magrpo compare`` of sweeps: all their settings beside each other, over seeds, at equal generated tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from magrpo.algo.stats import seed_interval
from magrpo.ledger import UNITS, Budget
from magrpo.pictures import COLOURS, comparison_panels, comparison_picture, save
from magrpo.registry import ConfigError
from magrpo.report import cell, column_title, signed
from magrpo.types import EvalReport, Interval
from pipelines.compare import HEADLINE, Compared, reached
from pipelines.page import Block, Pictures, markdown, page
from pipelines.sweep import load
from pipelines.sweep_report import averaged, cost, finished_runs, shared_keys, short
from pipelines.tables import Section, show

Settings = Mapping[str, Sequence[Compared]]
"""The finished runs of each setting, one for each seed, by its title."""
_DRAWN = ("return", "pass_at_1")
_SHOWN = ("return", "tests", "cooperation", "pass_at_1")


def compare_sweeps(names: Sequence[str], root: Path, folder: Path, console: Console) -> int:
    """Print the settings of the sweeps side by side and write them to ``folder``; the exit code, 0.

    Raises:
        ConfigError: a sweep has no run that is finished, or there are more settings than colours.
    """
    done: dict[str, Sequence[Compared]] = {}
    for name in names:
        sweep = load(root, name)
        runs = finished_runs(sweep)
        if not runs:
            raise ConfigError(f"sweep {name} has no finished run yet; magrpo sweep --resume {name} goes on with it")
        words = short(sweep)
        done |= {f"{name} {words[title]}" if len(words) > 1 else name: of for title, of in runs.items()}
    if len(done) > len(COLOURS):
        raise ConfigError(f"compare takes sweeps of {len(COLOURS)} settings together, got {len(done)}")
    means = {title: averaged([run.reports for run in runs]) for title, runs in done.items()}
    tokens = {
        title: {report.policy_version: _tokens(done[title], report.policy_version) for report in reports}
        for title, reports in means.items()
    }
    title = f"Comparison of the sweeps {', '.join(names[:-1])} and {names[-1]}"
    sections = [*_sections(done)]
    folder.mkdir(parents=True, exist_ok=True)
    note = "Sampled completions; means and 95 % intervals over seeds."
    quantities = [("test", quantity) for quantity in _DRAWN]
    save(comparison_picture(means, note, tokens, quantities), folder / "curves")
    curves = Pictures("Learning curves", comparison_panels(means, tokens, quantities), "curves.png", note)
    blocks: list[Block] = [curves, *sections]
    (folder / "compare.md").write_text(markdown(title, blocks), encoding="utf-8")
    (folder / "compare.html").write_text(page(title, blocks), encoding="utf-8")
    show(sections, console)
    console.print(f"written: {folder / 'compare.html'}, compare.md and curves beside it", soft_wrap=True)
    return 0


def _tokens(runs: Sequence[Compared], iteration: int) -> float:
    return fmean(budget.tokens for run in runs for budget in run.budgets if budget.iteration == iteration)


def _sections(done: Settings) -> Iterator[Section]:
    ends = {title: [(run.last, run.budgets[-1]) for run in runs] for title, runs in done.items()}
    note = (
        "Means over seeds, 95 % intervals over seeds (Student's t). Return is in percent of the setting's own maximum: "
        "where the parts of the rewards differ, compare tests and pass@1."
    )
    yield _table("At the end of training", ends, note)
    tokens = min(run.budgets[-1].tokens for runs in done.values() for run in runs)
    equal = {title: [run.nearest(tokens) for run in runs] for title, runs in done.items()}
    note = f"Each run at the evaluation nearest to {tokens:,} tokens generated in training, all that the cheapest took."
    yield _table("At an equal budget of tokens", equal, note)
    yield from _differences(done, equal)
    yield reached(done)
    yield cost(done)


def _table(title: str, made: Mapping[str, Sequence[tuple[EvalReport, Budget]]], note: str) -> Section:
    names = shared_keys([report.summary[HEADLINE] for runs in made.values() for report, _ in runs])
    columns = [name for name in _SHOWN if name in names]
    rows = []
    for setting, runs in made.items():
        counts = (f"{fmean(getattr(budget, unit) for _, budget in runs):,.0f}" for unit in ("iteration", *UNITS))
        values = (cell(column, over_seeds([r.summary[HEADLINE][column].mean for r, _ in runs])) for column in columns)
        rows.append((setting, str(len(runs)), *counts, *values))
    heads = ("setting", "seeds", "iteration", *UNITS.values(), *map(column_title, columns))
    return Section(title, heads, rows, note)


def over_seeds(values: Sequence[float]) -> Interval:
    """The mean and its interval over seeds; of one value that value alone."""
    return seed_interval(values) if len(values) > 1 else Interval(values[0], values[0], values[0])


def _differences(done: Settings, made: Mapping[str, Sequence[tuple[EvalReport, Budget]]]) -> Iterator[Section]:
    """Each setting less the first, seed by seed."""
    of = {
        title: {
            run.config.train.seed: report.summary[HEADLINE] for run, (report, _) in zip(runs, made[title], strict=True)
        }
        for title, runs in done.items()
    }
    first, *others = of
    rows = []
    for title in others:
        seeds = [seed for seed in of[title] if seed in of[first]]
        pairs = {q: [of[title][seed][q].mean - of[first][seed][q].mean for seed in seeds] for q in _DRAWN}
        if len(seeds) > 1:
            rows.append((title, *(signed(seed_interval(values)) for values in pairs.values()), str(len(seeds))))
    if rows:
        note = "Points of percent, the same seeds subtracted from each other; 95 % intervals over seeds (Student's t)."
        columns = ("setting", *map(column_title, _DRAWN), "seeds")
        yield Section(f"At an equal budget of tokens, less {first}", columns, rows, note)
