"""Which completions a report shows, by rule, so that equal runs show equal ones; and the watch list.

The watch list is after the advice to look at what a reward pays for: problems whose return rose in training while
their tests did not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from magrpo.interfaces import Reward
from magrpo.reports.figures import SPLIT_TITLES
from magrpo.reports.page import Exhibit, Exhibits
from magrpo.reports.tables import Section
from magrpo.types import EvalReport, EvalRow, Problem

TESTS = "tests"
"""The part of a reward that says whether programs do what was asked."""
LISTED = 20
SHOWN = 5
_Pair = tuple[EvalRow, EvalRow]


def examples(reports: Sequence[EvalReport], reward: Reward, problems: Mapping[str, Problem]) -> Exhibits:
    """The first sampled trajectory of three held-out problems, before and after training.

    They are those whose return gained most, middling and least; of one evaluation those with the highest, the middle
    and the lowest return.
    """
    before, after = _first(reports[0]), _first(reports[-1])
    one = len(reports) == 1
    shared = [task_id for task_id in after if task_id in before]
    last, first = ({t: 100 * reward.fraction(rows[t].returns[-1]) for t in shared} for rows in (after, before))
    gains = last if one else {t: last[t] - first[t] for t in shared}
    order = sorted(shared, key=lambda task_id: (gains[task_id], task_id))
    lost = not one and gains[order[0]] < 0
    words = (
        ("Highest return", "Middle return", "Lowest return")
        if one
        else ("Largest gain", "Median gain", "Largest loss" if lost else "Smallest gain")
    )
    chosen: dict[str, str] = {}
    for task_id, word in zip((order[-1], order[len(order) // 2], order[0]), words, strict=True):
        chosen.setdefault(task_id, word)  # of few problems one may be two of these
    exhibits = [
        _exhibit(
            f"{word}, {gains[task_id]:{'.1f' if one else '+.1f'}} {'%' if one else 'points'}: {task_id}",
            {"": after[task_id]} if one else _sides((before[task_id], after[task_id])),
            reward,
            problems,
        )
        for task_id, word in chosen.items()
    ]
    rule = (
        "with the highest, the middle and the lowest return" if one else "whose return gained most, middling and least"
    )
    note = f"The first sampled trajectory of the held-out problems {rule}; {_last_turn(reports)}"
    return Exhibits("Examples", exhibits, note)


@dataclass(frozen=True, slots=True)
class Watched:
    """A problem whose mean return rose while its tests did not; fractions of the maximum, before and after."""

    task_id: str
    split: str
    returns: tuple[float, float]
    tests: tuple[float, float]
    parts: Mapping[str, float]
    """What every part gained."""


def watch_list(reports: Sequence[EvalReport], reward: Reward) -> list[Watched]:
    """The problems to be looked at, the largest gain of return first; sampled trajectories of every split.

    Problems that pass all their tests after training are left out: there is nothing to gain. Empty if the reward has no
    part ``tests`` or there are not two evaluations.
    """
    if TESTS not in reward.maxima or len(reports) < 2:
        return []
    before, after = (_by_problem(report, reward) for report in (reports[0], reports[-1]))
    found = []
    for (split, task_id), now in after.items():
        then = before.get((split, task_id))
        if then is not None and now["return"] > then["return"] and now[TESTS] <= then[TESTS] < 1:
            gains = {part: now[part] - then[part] for part in reward.maxima}
            found.append(Watched(task_id, split, (then["return"], now["return"]), (then[TESTS], now[TESTS]), gains))
    return sorted(found, key=lambda one: (one.returns[0] - one.returns[1], one.task_id))


def watch_table(reports: Sequence[EvalReport], reward: Reward, watched: Sequence[Watched]) -> Section:
    """The watch list as a table, or why there is none."""
    title = "Watch list: the return rose, the tests did not"
    if TESTS not in reward.maxima:
        parts = ", ".join(reward.maxima)
        return Section(title, (), (), f"Does not apply: this reward runs no tests (its parts: {parts}).")
    if len(reports) < 2:
        return Section(title, (), (), "Does not apply: one evaluation has nothing to rise from.")
    total = len(_by_problem(reports[-1], reward))
    columns = ("problem", "of", "return, %", "tests, %", "what rose, points")
    rows = [
        (
            one.task_id,
            SPLIT_TITLES[one.split],
            _arrow(one.returns),
            _arrow(one.tests),
            ", ".join(f"{part.replace('_', ' ')} {100 * gain:+.0f}" for part, gain in one.parts.items() if gain > 0),
        )
        for one in watched[:LISTED]
    ]
    more = f" The first {LISTED} are shown." if len(watched) > LISTED else ""
    note = (
        f"{len(watched)} of {total} problems, means over their sampled trajectories, before and after training; "
        f"problems that pass every test are left out.{more} A rise without tests is what an exploited reward looks "
        "like; it is no proof of one."
    )
    return Section(title, columns, rows, note, text=True)


def watch_exhibits(
    reports: Sequence[EvalReport], reward: Reward, problems: Mapping[str, Problem], watched: Sequence[Watched]
) -> Exhibits:
    """Completions of the problems at the top of the watch list."""
    exhibits = [
        _exhibit(f"{one.task_id}: return {_arrow(one.returns)} %", _sides(_paid(reports, one)), reward, problems)
        for one in watched[:SHOWN]
    ]
    note = (
        "The trajectory with the highest return of those that fail a test, after training, and the one of the same "
        f"number before; {_last_turn(reports)}"
    )
    return Exhibits("Completions of the watch list", exhibits, note, folded=True)


def _paid(reports: Sequence[EvalReport], one: Watched) -> _Pair:
    before, after = (
        {
            row.index: row
            for row in report.rows
            if (row.task_id, row.split, row.mode) == (one.task_id, one.split, "sampled")
        }
        for report in (reports[0], reports[-1])
    )
    failing = [row for row in after.values() if row.index in before and not row.passed[-1]]
    chosen = max(failing or after.values(), key=lambda row: (row.returns[-1], -row.index))
    return before[chosen.index], chosen


def _first(report: EvalReport) -> dict[str, EvalRow]:
    """The first sampled trajectory of each held-out problem."""
    rows = [row for row in report.rows if (row.split, row.mode) == ("test", "sampled")]
    return {row.task_id: row for row in sorted(rows, key=lambda row: -row.index)}


def _by_problem(report: EvalReport, reward: Reward) -> dict[tuple[str, str], dict[str, float]]:
    """Means over the sampled trajectories of each problem, fractions of the maximum: the return and every part."""
    rows: dict[tuple[str, str], list[EvalRow]] = {}
    for row in report.rows:
        if row.mode == "sampled":
            rows.setdefault((row.split, row.task_id), []).append(row)
    return {
        key: {"return": reward.fraction(fmean(row.returns[-1] for row in members))}
        | {part: fmean(row.parts[-1].get(part, 0.0) for row in members) / top for part, top in reward.maxima.items()}
        for key, members in rows.items()
    }


def _sides(pair: _Pair) -> dict[str, EvalRow]:
    return dict(zip(("before", "after"), pair, strict=True))


def _exhibit(title: str, sides: Mapping[str, EvalRow], reward: Reward, problems: Mapping[str, Problem]) -> Exhibit:
    """What was written on a problem, and its reward part by part and turn by turn."""
    turns = [
        (f"{name}{f', turn {turn + 1}' if len(row.returns) > 1 else ''}".lstrip(", "), row, turn)
        for name, row in sides.items()
        for turn in range(len(row.returns))
    ]
    [row] = {row.task_id for row in sides.values()}
    parts = [
        (part.replace("_", " "), f"{top:g}", *(f"{of.parts[turn].get(part, 0.0):.2f}" for _, of, turn in turns))
        for part, top in reward.maxima.items()
    ]
    total = ("return, %", "100", *(f"{100 * reward.fraction(of.returns[turn]):.1f}" for _, of, turn in turns))
    table = Section("", ("", "at most", *(name or "reward" for name, _, _ in turns)), [*parts, total])
    texts = {name or "completions": list(of.texts.items()) for name, of in sides.items()}
    return Exhibit(title, problems[row].prompt, table, texts)


def _last_turn(reports: Sequence[EvalReport]) -> str:
    many = any(len(row.returns) > 1 for row in reports[-1].rows)
    return f"what every agent wrote{' in the last turn' if many else ''}, and the reward's parts."


def _arrow(values: tuple[float, float]) -> str:
    return f"{100 * values[0]:.1f} \u2192 {100 * values[1]:.1f}"
