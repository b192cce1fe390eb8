"""Figures as text: CSV files, titles of quantities, formats of intervals and durations, the tables of a run.

Fractions of the maximum are shown in percent, with bootstrap 95 % intervals.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from magrpo.config.run import RunConfig
from magrpo.files.writing import atomic_write
from magrpo.reports.budget import UNITS, Budget
from magrpo.reports.evaluations import EvaluatedRun, shared_keys
from magrpo.reports.series import first_and_last
from magrpo.reports.tables import ReportTable
from magrpo.text import format_count
from magrpo.tracking.wall_time import WallTime
from magrpo.types import PENALTY, EvalReport, Interval

BEFORE = "before training"
LOADED = "before training (start_from)"
ONLY_LOADED = "as loaded (start_from)"
NO_DIFFERENCE = "~: the interval holds 0, so no difference is shown."
UNDEFINED = "-"
_COUNTS = ("generated_tokens", "response_tokens", "seconds", "tokens_per_s")
"""Quantities that are counts or times instead of fractions, by name; by the end of the name if each agent has one."""
SPLIT_TITLES = {"train": "training problems", "test": "held-out problems", "ood": "new compositions (ood)"}


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write rows below a row of column names, all of them or none."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    atomic_write(path, text.getvalue().encode())


def format_budget(budget: Budget) -> str:
    """``1,234 tokens generated, 40 answer sets scored (joint actions), 12 programs run, 2 updates``."""
    counts = {unit: count for unit, count in budget.counts.items() if count or unit != "executions"}  # 0 for texts
    return ", ".join(format_count(count, UNITS[unit]) for unit, count in counts.items())


def tabulate_quantities(run: EvaluatedRun) -> dict[str, ReportTable]:
    """Tabulate each split and mode, by key: the agents before training and after it, and the paired difference."""
    columns = title_evaluations(run.reports, start_title(run.config))
    shows_gain = len(columns) == 2
    heads = ["", *columns]
    if shows_gain:
        heads.append("gain, paired by problem")
    note = f"Percent of the maximum, bootstrap 95 % intervals over problems; tokens are counts. {NO_DIFFERENCE}"
    tables: dict[str, ReportTable] = {}
    for key in sort_summary_keys(shared_keys([report.summary for report in columns.values()])):
        lines = []
        gains = run.list_gains(key)
        for name in shown_quantities(share_quantities([*columns.values()], key), run.config.reward.maxima):
            cells = [format_interval(name, report.summary[key][name]) for report in columns.values()]
            if shows_gain:
                cells.append(format_tested_difference(gains.get(name), quantity_scale(name)))
            lines.append([quantity_title(name), *cells])
        tables[key] = ReportTable(summary_title(key), heads, lines, note)
        note = ""  # stands under the first table only
    return tables


def share_quantities(reports: Sequence[EvalReport], key: str) -> dict[str, Interval]:
    """Return the quantities of the last report, in its summary ``key``, that the summaries of all reports have.

    Where the sandbox failed on a sample, its evaluation may lack the pass@k that needs all samples of a problem.
    """
    last = reports[-1].summary[key]
    return {name: last[name] for name in shared_keys([report.summary[key] for report in reports])}


def start_title(config: RunConfig) -> str:
    """Return the title of a run's agents before training; a run that only evaluates may have trained agents."""
    if not any(agent.start_from is not None for agent in config.agents):
        return BEFORE
    return LOADED if config.train.num_iterations else ONLY_LOADED


def sort_summary_keys(keys: Iterable[str]) -> list[str]:
    """Sort keys of summaries (``test/sampled``) for display: by split, sampled before greedy."""
    order = list(SPLIT_TITLES)
    return sorted(keys, key=lambda key: (order.index(key.split("/")[0]), key.endswith("/greedy")))


def summary_title(key: str) -> str:
    """Return the title of a summary: ``Held-out problems, sampled`` for ``test/sampled``."""
    split, mode = key.split("/")
    return f"{SPLIT_TITLES[split][0].upper()}{SPLIT_TITLES[split][1:]}, {mode}"


def title_evaluations(reports: Sequence[EvalReport], start: str) -> dict[str, EvalReport]:
    """Return the evaluations before training (titled ``start``) and after it, by title, as far as they exist."""
    first, last = reports[0], reports[-1]
    before = {start: first} if first.policy_version == 0 else {}
    after = {f"after {format_count(last.policy_version, 'iterations')}": last} if last.policy_version else {}
    return before | after


def shown_quantities(summary: Mapping[str, Interval], maxima: Mapping[str, float]) -> list[str]:
    """Return the quantities of a summary that tables show, in display order."""
    pass_at = sort_pass_at(summary)
    penalty = [PENALTY] if PENALTY in summary and PENALTY not in maxima else []
    return [*maxima, *penalty, "return", *first_and_last(pass_at), "generated_tokens"]


def sort_pass_at(names: Iterable[str]) -> list[str]:
    """Return the names of pass@k among ``names``, sorted by k."""
    return sorted((name for name in names if name.startswith("pass_at_")), key=lambda name: int(name[8:]))


def quantity_title(name: str) -> str:
    """Return the title of a quantity: ``pass@1`` for ``pass_at_1``, ``length ratio`` for ``length_ratio``."""
    return name.replace("pass_at_", "pass@").replace("_", " ")


def format_interval(name: str, value: Interval | None) -> str:
    """``mean [low, high]`` in the unit in which tables show the quantity ``name``; a dash without a value."""
    if value is None:
        return UNDEFINED
    scale = quantity_scale(name)
    digits = {"seconds": 3, "tokens_per_s": 0}.get(name, 1)
    return _add_limits(value, lambda figure: f"{figure * scale:.{digits}f}")


def format_share(value: Interval) -> str:
    """``81.2% [75.0%, 87.5%]``: a fraction in percent."""
    return _add_limits(value, "{:.1%}".format)


def _add_limits(value: Interval, write: Callable[[float], str]) -> str:
    """``mean [low, high]``; ``mean`` alone if nothing varied, as over a single problem or several with equal values."""
    mean, low, high = map(write, (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]" if value.has_width else mean


def quantity_scale(name: str) -> float:
    """Return the factor from stored values to values in tables: 100 for fractions, 1 for tokens and times.

    No part of a reward has the name of a count (:mod:`magrpo.checks.part_names`).
    """
    return 1.0 if name.rpartition("/")[2] in _COUNTS else 100.0


def format_difference(difference: Interval, scale: float = 100.0) -> str:
    """``+3.2 [+1.0, +5.4]``: a difference of fractions in percentage points, or of counts if ``scale`` is 1."""
    return _add_limits(difference, lambda value: f"{round(scale * value, 1) + 0.0:+,.1f}")  # + 0.0 turns -0.0 into 0.0


def format_tested_difference(difference: Interval | None, scale: float = 100.0) -> str:
    """:func:`format_difference`, preceded by ``~`` if the interval holds 0 (:data:`NO_DIFFERENCE`); a dash for None."""
    if difference is None:
        return UNDEFINED
    mark = "" if difference.sign else "~ "
    return mark + format_difference(difference, scale)


def format_duration(seconds: float) -> str:
    """Format a duration: ``45 s``, ``4 min 33 s``, ``2 h 05 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def format_wall_time(wall_time: WallTime) -> str:
    """``1 min 02 s``, and the number of attempts if there were several."""
    attempts = f" in {wall_time.num_attempts} attempts" if wall_time.num_attempts > 1 else ""
    return format_duration(wall_time.seconds) + attempts
