"""``magrpo compare`` of sweeps: all their settings beside each other, over seeds, at equal generated tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from magrpo.plugins import ConfigError
from magrpo.reports.charts import COLOURS, comparison_panels, comparison_picture
from magrpo.reports.comparison import Compared, write_comparison
from magrpo.reports.equal_bar import reached_bars
from magrpo.reports.over_seeds import (
    DRAWN,
    OVER_SEEDS,
    Settings,
    at_equal_tokens,
    averaged,
    cost,
    less_first,
    table_at,
    tokens_at,
)
from magrpo.reports.page import Pictures
from magrpo.reports.tables import Section
from pipelines.experiments.sweep_grid import load_sweep
from pipelines.experiments.sweep_report import finished_runs, short


def compare_sweeps(names: Sequence[str], root: Path, folder: Path, console: Console) -> int:
    """Print the settings of the sweeps side by side and write them to ``folder``; the exit code, 0.

    Raises:
        ConfigError: a sweep has no run that is finished, or there are more settings than colours.
    """
    done: dict[str, Sequence[Compared]] = {}
    for name in names:
        sweep = load_sweep(root, name)
        runs = finished_runs(sweep)
        if not runs:
            raise ConfigError(f"sweep {name} has no finished run yet; magrpo sweep --resume {name} goes on with it")
        words = short(sweep)
        done |= {f"{name} {words[title]}" if len(words) > 1 else name: of for title, of in runs.items()}
    if len(done) > len(COLOURS):
        raise ConfigError(f"compare takes sweeps of {len(COLOURS)} settings together, got {len(done)}")
    means = {title: averaged(runs) for title, runs in done.items()}
    tokens = tokens_at(done, means)
    title = f"Comparison of the sweeps {', '.join(names[:-1])} and {names[-1]}"
    sections = [*_sections(done)]
    quantities = [("test", quantity) for quantity in DRAWN]
    picture = comparison_picture(means, OVER_SEEDS, tokens, quantities)
    curves = Pictures("Learning curves", comparison_panels(means, tokens, quantities), "curves.png", OVER_SEEDS)
    write_comparison(folder, title, picture, curves, sections, console)
    return 0


def _sections(done: Settings) -> Iterator[Section]:
    ends = {title: [len(run.reports) - 1 for run in runs] for title, runs in done.items()}
    note = (
        "Means over seeds, 95 % intervals for new seeds on new problems; with one seed over problems alone. Return is "
        "in percent of the setting's own maximum: where the parts of the rewards differ, compare tests and pass@1."
    )
    yield table_at("At the end of training", done, ends, note)
    yield from less_first("At the end of training", done, ends)
    yield from at_equal_tokens(done)
    yield from reached_bars(done)
    yield cost(done)
