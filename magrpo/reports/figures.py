"""The figures that a run ends with: what they are called, how they are written, the closing table, the CSV files.

Fractions of the maximum are shown in percent, with their bootstrap 95 % intervals. The untrained agents are the paper's
baseline "naive concatenation": both write blind, and nothing has taught them to fit together.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from magrpo.config import RunConfig
from magrpo.reports.budget import UNITS, Budget
from magrpo.types import EvalReport, Interval

UNTRAINED = "untrained (naive concatenation)"
LOADED = "loaded (start_from)"
NO_DIFFERENCE = "~: the interval holds 0, so no difference is shown."
SPLIT_TITLES = {"train": "training problems", "test": "held-out problems", "ood": "new compositions (ood)"}


def evaluation_csv(reports: Sequence[EvalReport]) -> str:
    """Every figure of every evaluation in long form: fractions of the maximum, tokens as counts."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["policy_version", "split", "mode", "quantity", "mean", "low", "high"])
    for report in reports:
        for key, summary in report.summary.items():
            for name, value in summary.items():
                writer.writerow([report.policy_version, *key.split("/"), name, value.mean, value.low, value.high])
    return text.getvalue()


def budget_csv(budgets: Sequence[Budget]) -> str:
    """A run's ledger, one line for each iteration: what it had taken by then. Programs run depend on interruptions."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["iteration", *UNITS, "seconds"])
    for budget in budgets:
        writer.writerow([budget.iteration, *(getattr(budget, unit) for unit in UNITS), f"{budget.seconds:.3f}"])
    return text.getvalue()


def spent(budget: Budget) -> str:
    """``1,234 tokens generated, 40 joint actions scored, 12 programs run, 2 updates``."""
    return ", ".join(f"{getattr(budget, unit):,} {title}" for unit, title in UNITS.items())


def closing_table(
    reports: Sequence[EvalReport], maxima: Mapping[str, float], start: str = UNTRAINED, mode: str = "sampled"
) -> Table:
    """What a run prints at its end: a section for each split, a line for each quantity; fits 80 columns."""
    rows = compared(reports, start)
    table = Table(box=box.SIMPLE_HEAD, title=f"{mode}; percent of the maximum, 95 % interval over problems")
    table.add_column("")
    for name, _ in rows:
        table.add_column(name.replace(" (", "\n("), justify="right")
    for split, key_mode, key in keys_of(rows[-1][1]):
        summary = rows[-1][1].summary[key]
        if key_mode == mode:
            table.add_section()
            table.add_row(SPLIT_TITLES[split], style="italic")
            for column in columns_of(summary, maxima):
                cells = (cell(column, report.summary[key][column]) for _, report in rows)
                table.add_row(f"  {column_title(column)}", *cells, style="bold" if column == "return" else None)
    return table


def start_title(config: RunConfig) -> str:
    """What to call the agents of a run before training: a naive concatenation only where several act side by side."""
    if any(agent.start_from is not None for agent in config.agents):
        return LOADED
    return UNTRAINED if len(config.env.acting(0)) == len(config.agents) > 1 else "untrained"


def keys_of(report: EvalReport) -> list[tuple[str, str, str]]:
    """Split, mode and key of the summaries, in the order in which they are shown."""
    order = list(SPLIT_TITLES)
    keys = sorted(report.summary, key=lambda key: (order.index(key.split("/")[0]), key.endswith("/greedy")))
    return [(*key.split("/"), key) for key in keys]  # type: ignore[misc]


def compared(reports: Sequence[EvalReport], start: str) -> list[tuple[str, EvalReport]]:
    """The agents before training and the last ones, by name; only what there is."""
    first, last = reports[0], reports[-1]
    before = [(start, first)] if first.policy_version == 0 else []
    after = [(f"MAGRPO, {last.policy_version} iterations", last)] if last.policy_version else []
    return before + after


def columns_of(summary: Mapping[str, Interval], maxima: Mapping[str, float]) -> list[str]:
    """The quantities of a summary that are shown, in the order in which they are."""
    pass_at = sorted((name for name in summary if name.startswith("pass_at_")), key=lambda name: int(name[8:]))
    return [*maxima, "return", *dict.fromkeys([*pass_at[:1], *pass_at[-1:]]), "response_tokens"]


def column_title(column: str) -> str:
    """What a quantity is called in a table."""
    return column.replace("pass_at_", "pass@").replace("_", " ")


def cell(column: str, value: Interval) -> str:
    """``mean [low, high]`` in percent, tokens as a count."""
    scale = 1.0 if column.endswith("_tokens") else 100.0
    return f"{value.mean * scale:.1f} [{value.low * scale:.1f}, {value.high * scale:.1f}]"


def difference_cell(difference: Interval, scale: float = 100.0) -> str:
    """:func:`signed`, behind a ``~`` where the interval holds 0: see ``NO_DIFFERENCE``."""
    mark = "~ " if difference.low <= 0 <= difference.high else ""
    return mark + signed(difference, scale)


def verdict(gain: Interval) -> str:
    """What a paired interval of a change says of it: ``improved``, ``worse`` or ``no reliable change``."""
    if gain.low > 0:
        return "improved"
    return "worse" if gain.high < 0 else "no reliable change"


def signed(difference: Interval, scale: float = 100.0) -> str:
    """``+3.2 [+1.0, +5.4]``, a difference of fractions in percent, or of counts with a ``scale`` of 1."""
    mean, low, high = (round(scale * value, 1) + 0.0 for value in (difference.mean, difference.low, difference.high))
    return f"{mean:+,.1f} [{low:+,.1f}, {high:+,.1f}]"  # adding 0 takes the sign off a negative zero


def format_duration(seconds: float) -> str:
    """``45 s``, ``4 min 33 s``, ``2 h 05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
