"""The tables of ``magrpo evaluate --baselines``, from the committed rows: HTML, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import msgspec

from magrpo.config import BaselineRow, RunConfig
from magrpo.reports.figures import NO_DIFFERENCE, SPLIT_TITLES, cell, column_title, difference_cell
from magrpo.reports.page import write_page
from magrpo.reports.paper import QUANTITIES, beside_the_paper, trained_row
from magrpo.reports.problem_means import (
    Means,
    common_parts,
    common_share,
    interval_over_seeds,
    problem_means,
    subtracted,
)
from magrpo.reports.tables import Section
from magrpo.store import RunStore, read_records
from magrpo.types import HEADLINE, EvalReport, Interval, TimedAnswer
from pipelines.experiments.baselines import BASELINES, REFERENCE

COST = ("seconds", "tokens_per_s", "generated_tokens")
UNDEFINED = "-"
TITLE = "Agents and baselines"


@dataclass
class Measured:
    """A row as it was measured."""

    row: BaselineRow
    report: EvalReport
    timed: Sequence[TimedAnswer]
    common: Mapping[str, float]
    """The parts that all rows have, with their maxima."""
    whole: bool
    """Whether its reward has the parts of the run's, so that returns compare."""
    others: Sequence[Measured] = ()
    """The same row of runs with other seeds."""

    def values(self, key: str, quantity: str) -> list[Mapping[str, float]]:
        """The mean of each problem, of this run and of the others; empty where the quantity is not defined."""
        found = [one.means.get(key, {}).get(quantity, {}) for one in (self, *self.others)]
        return found if all(found) else []

    @cached_property
    def means(self) -> dict[str, Means]:
        """By split and mode. ``common`` is what the parts that all rows have come to, as a share of their maximum."""
        found: dict[str, Means] = {}
        for key, means in problem_means(self.report, self.row.reward).items():
            means["common"] = {
                task_id: common_share({part: means[part][task_id] for part in self.common}, self.common)
                for task_id in means["return"]
            }
            if not self.whole:
                del means["return"]
            found[key] = means
        timed = {one.task_id: one for one in self.timed}
        found[HEADLINE] = {
            **found[HEADLINE],
            "seconds": {task_id: one.seconds for task_id, one in timed.items()},
            "tokens_per_s": {task_id: one.tokens / one.seconds for task_id, one in timed.items()},
        }
        return found


def measured(config: RunConfig, folders: Sequence[Path]) -> list[Measured]:
    """Read back what the stages of the rows committed, in their order."""
    rows = config.baselines.rows
    common = common_parts([row.reward.maxima for row in rows])
    return [
        Measured(
            row,
            msgspec.json.decode((folder / "report.json").read_bytes(), type=EvalReport),
            read_records(folder / "timed.jsonl.gz", TimedAnswer),
            common,
            dict(row.reward.maxima) == dict(config.reward.maxima),
        )
        for row, folder in zip(rows, folders, strict=True)
    ]


def pooled(runs: Sequence[Sequence[Measured]]) -> list[Measured]:
    """The rows that all runs have, each with what all of them measured; the order is that of the first run."""
    by_name = [{one.row.name: one for one in rows} for rows in runs]
    found = []
    for name, first in by_name[0].items():
        others = [rows[name] for rows in by_name[1:] if name in rows]
        if len(others) == len(runs) - 1:
            same = all(one.row.title == first.row.title for one in others)
            title = first.row.title if same else BASELINES[name].title
            found.append(replace(first, row=first.row.model_copy(update={"title": title}), others=others))
    return found


def folders_of(store: RunStore, config: RunConfig) -> list[Path]:
    """Where the stages of the rows lie."""
    return [store.path / "stages" / "00000" / f"baseline.{row.name}" for row in config.baselines.rows]


def write_tables(folder: Path, config: RunConfig, rows: Sequence[Measured], title: str = TITLE) -> None:
    """Write ``baselines.html``, ``.md``, ``.csv`` and ``.json``."""
    sections = list(tables(config, rows))
    write_page(folder / "baselines", title, sections, width="90rem")
    figures = list(_figures(config, rows))
    with (folder / "baselines.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        columns = ("mean", "low", "high")
        writer.writerow(["row", "split", "mode", "quantity", *columns, *(f"less_{REFERENCE}_{c}" for c in columns)])
        for row, key, quantity, value, less in figures:
            writer.writerow([row, *key.split("/"), quantity, *_flat(value), *_flat(less)])
    tree = {
        "rows": [json.loads(row.row.model_dump_json()) for row in rows],
        "left_out": config.baselines.left_out,
        "figures": [
            {"row": row, "of": key, "quantity": name, "value": _dict(value), f"less_{REFERENCE}": _dict(less)}
            for row, key, name, value, less in figures
        ],
    }
    (folder / "baselines.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def tables(config: RunConfig, rows: Sequence[Measured]) -> Iterator[Section]:
    """Every table, the one that says most first."""
    seed = config.eval.seed
    part_of = "" if all(row.whole for row in rows) else f" Common: {', '.join(rows[0].common)} together."
    yield _short(rows, seed, part_of)
    order = list(SPLIT_TITLES)
    keys = sorted(rows[0].means, key=lambda key: (order.index(key.split("/")[0]), key.endswith("/greedy")))
    for key in keys:
        yield _section(rows, key, _quality(rows, key), seed, part_of)
        yield _section(rows, key, _quality(rows, key), seed, part_of, paired=True)
    yield _cost(rows, seed)
    if any(row.row.name.startswith("partners_") for row in rows):
        yield _matrix(rows, seed)
    yield from _beside_the_paper(config, rows)
    yield _how(rows)
    if config.baselines.left_out:
        columns = ("row", "why")
        yield Section("Left out", columns, list(config.baselines.left_out.items()), text=True)


def _short(rows: Sequence[Measured], seed: int, part_of: str) -> Section:
    lines = []
    shared = [] if all(row.whole for row in rows) else ["common"]
    solved = ["pass_at_1"] if any("pass_at_1" in row.means[HEADLINE] for row in rows) else []
    for row in rows:
        cells = [row.row.title]
        for quantity in ["return", *shared]:
            cells += [_cell(row, HEADLINE, quantity, seed), _less(rows, row, HEADLINE, quantity, seed)]
        cells += [
            *(_cell(row, HEADLINE, name, seed) for name in solved),
            _mean(row, "generated_tokens"),
            _mean(row, "seconds"),
        ]
        lines.append(cells)
    heads = [head for name in ["return", *shared] for head in (name, f"\u2212 {REFERENCE}")]
    note = (
        "Percent of the maximum; differences in points, problem by problem; 95 % intervals "
        f"{_over(rows)}. {NO_DIFFERENCE} Tokens of all agents and turns; seconds of sampling for one problem asked "
        f"alone.{part_of} A dash: not defined for this row."
    )
    return Section(
        "Held-out problems, sampled, in short",
        ("", *heads, *map(column_title, solved), "tokens", "seconds"),
        lines,
        note,
    )


def _section(
    rows: Sequence[Measured], key: str, names: Sequence[str], seed: int, part_of: str, paired: bool = False
) -> Section:
    split, mode = key.split("/")
    title = f"{SPLIT_TITLES[split]}, {mode}{f', less {REFERENCE}' if paired else ''}"
    here = [row for row in rows if key in row.means]
    lines = [
        [
            row.row.title,
            *(_less(rows, row, key, name, seed) if paired else _cell(row, key, name, seed) for name in names),
        ]
        for row in here
    ]
    note = f"Percent of the maximum.{part_of}" if not paired else f"Points, paired by problem. {NO_DIFFERENCE}"
    return Section(title[0].upper() + title[1:], ("", *map(column_title, names)), lines, note)


def _quality(rows: Sequence[Measured], key: str) -> list[str]:
    """The quantities of a split and mode but for what answers cost, in the order in which they are shown."""
    found = dict.fromkeys(name for row in rows for name in row.means.get(key, {}))
    shared = [] if all(row.whole for row in rows) else ["common"]
    parts = dict.fromkeys(part for row in rows for part in row.row.reward.maxima)
    wanted = max((dict(row.row.reward.maxima) for row in rows), key=len)
    passes = sorted((name for name in found if name.startswith("pass_at_")), key=lambda name: int(name[8:]))
    return [*wanted, *(part for part in parts if part not in wanted), "return", *shared, *passes]


def _cost(rows: Sequence[Measured], seed: int) -> Section:
    lines = [[row.row.title, *(_cell(row, HEADLINE, name, seed) for name in COST)] for row in rows]
    note = (
        f"Seconds and tokens a second: {len(rows[0].timed)} held-out problems, asked one at a time; sampling only, all "
        "turns and all samples of a vote, without the sandbox. Tokens: those of all held-out problems, sampled."
    )
    return Section("What an answer costs", ("", "response time, s", "tokens/s", "tokens"), lines, note)


def _matrix(rows: Sequence[Measured], seed: int) -> Section:
    """Returns of the first role's agent of one run with the others of another."""
    played = {_who(row): row for row in rows if row.row.name == "magrpo" or row.row.name.startswith("partners_")}
    runs = list(dict.fromkeys(first for first, _ in played))
    lines = [
        [
            first,
            *(
                _cell(played[first, rest], HEADLINE, "return", seed) if (first, rest) in played else UNDEFINED
                for rest in runs
            ),
        ]
        for first in runs
    ]
    role = next(iter(played.values())).row.env.roles()[0]
    title = f"Cross-play of runs: return with {role} from the run of the line, others from that of the column"
    return Section(title, ("", *runs), lines, "Held-out problems, sampled.")


def _who(row: Measured) -> tuple[str, str]:
    """The runs that the first agent and the others come from: folders of weights lie four below their run's."""
    runs = [agent.start_from.parents[4].name for agent in row.row.agents if agent.start_from is not None]
    return runs[0], runs[-1]


def _beside_the_paper(config: RunConfig, rows: Sequence[Measured]) -> Iterator[Section]:
    ours = []
    for row in rows:
        name = trained_row(row.row.env.num_turns) if row.row.name == "magrpo" else row.row.name
        cells = {quantity: _mean(row, quantity) for quantity in QUANTITIES}
        ours.append((row.row.title, name, {name: cell for name, cell in cells.items() if cell != UNDEFINED}))
    yield from beside_the_paper(config, ours)


def _how(rows: Sequence[Measured]) -> Section:
    lines = []
    for row in rows:
        env = ", ".join(f"{key} {value}" for key, value in row.row.env.model_dump().items() if value is not None)
        agents = "; ".join(f"{agent.role}: {agent.start_from or 'untrained'}" for agent in row.row.agents)
        votes = "" if row.row.votes == "none" else f"; one of several by {row.row.votes}"
        stop = "" if row.row.stop_above is None else f"; oracle: stops above a reward of {row.row.stop_above:g}"
        tries = "" if row.row.max_tries == 1 else f", at most {row.row.max_tries} tries"
        lines.append((row.row.name, row.row.title, env, agents + votes + stop + tries, str(row.row.max_new_tokens)))
    columns = ("name", "row", "environment", "agents", "most tokens of a completion")
    return Section("How the rows are made", columns, lines, text=True)


def _over(rows: Sequence[Measured]) -> str:
    """What intervals are over."""
    return f"for new seeds on new problems, from {len(rows[0].others) + 1} runs" if rows[0].others else "over problems"


def _interval(row: Measured, key: str, quantity: str, seed: int) -> Interval | None:
    return interval_over_seeds(row.values(key, quantity), seed)


def _difference(rows: Sequence[Measured], row: Measured, key: str, quantity: str, seed: int) -> Interval | None:
    """The row's mean less that of the reference, problem by problem; None where one of the two is not defined."""
    reference = next((one for one in rows if one.row.name == REFERENCE), None)
    if reference is None or row is reference:
        return None
    pairs = zip(row.values(key, quantity), reference.values(key, quantity), strict=False)
    return interval_over_seeds([subtracted(ours, theirs) for ours, theirs in pairs], seed)


def _cell(row: Measured, key: str, quantity: str, seed: int) -> str:
    value = _interval(row, key, quantity, seed)
    if value is None:
        return UNDEFINED
    if quantity in ("seconds", "tokens_per_s"):
        digits = 3 if quantity == "seconds" else 0
        return f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"
    return cell(quantity, value)


def _less(rows: Sequence[Measured], row: Measured, key: str, quantity: str, seed: int) -> str:
    value = _difference(rows, row, key, quantity, seed)
    return UNDEFINED if value is None else difference_cell(value)


def _mean(row: Measured, quantity: str) -> str:
    values = row.values(HEADLINE, quantity)
    if not values:
        return UNDEFINED
    mean = fmean(fmean(one.values()) for one in values)
    return f"{mean:.2f}" if quantity == "seconds" else f"{mean * (1.0 if 'tokens' in quantity else 100.0):.1f}"


def _figures(config: RunConfig, rows: Sequence[Measured]) -> Iterator[tuple[str, str, str, Interval, Interval | None]]:
    """Every quantity of every row in long form, and its paired difference."""
    seed = config.eval.seed
    for row in rows:
        for key, means in row.means.items():
            for quantity in means:
                value = _interval(row, key, quantity, seed)
                if value is not None:
                    yield row.row.name, key, quantity, value, _difference(rows, row, key, quantity, seed)


def _flat(value: Interval | None) -> Sequence[float | str]:
    return ("", "", "") if value is None else (value.mean, value.low, value.high)


def _dict(value: Interval | None) -> dict[str, float] | None:
    return None if value is None else asdict(value)
