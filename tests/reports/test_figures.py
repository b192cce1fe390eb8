"""The formats of figures, and the pictures."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from rich.console import Console

from magrpo.config.run import load_config
from magrpo.reports.charts import Curve, Panel, budget_panels, learning_panels, render_svg, series_panel, turn_panels
from magrpo.reports.figures import format_interval, format_tested_difference, start_title
from magrpo.reports.tables import ReportTable, print_tables
from magrpo.rewards.returned import ReturnedReward
from magrpo.types import EvalReport, EvalRow, Interval, Split
from tests.pipelines.micro import write_config

MAXIMA = {"structure": 1.0, "tests": 3.0}


class ScaledParts(ReturnedReward):
    def fraction(self, total: float) -> float:
        return total / 10 / sum(MAXIMA.values())


REWARD = ScaledParts()


def draw(panel: Panel) -> Axes:
    axes: Axes = Figure().subplots()
    panel.draw(axes)
    return axes


def read_legend(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def _row(task_id: str, *turns: tuple[float, float], split: Split = "test", index: int = 0) -> EvalRow:
    parts = tuple({"structure": structure, "tests": tests} for structure, tests in turns)
    returns = tuple(10 * (structure + tests) for structure, tests in turns)
    return EvalRow(task_id, split, "sampled", index, returns, parts, (False,) * len(turns), {}, {}, 7)


def _report(version: int, structure: float, rows: tuple[EvalRow, ...]) -> EvalReport:
    """A report with a made-up summary, independent of the rows, in which only ``structure`` and the return vary."""

    def summary(mode: Literal["sampled", "greedy"]) -> dict[str, Interval]:
        values = {"structure": structure, "tests": 0.5, "return": structure / 2, "pass_at_1": 0.25}
        if mode == "sampled":
            values |= {"pass_at_3": 0.5, "pass_at_10": 0.75}
        fractions = {name: Interval(value, value - 0.01, value + 0.02) for name, value in values.items()}
        return fractions | {"generated_tokens": Interval(7.0, 6.0, 8.0)}

    return EvalReport(version, rows, {"test/sampled": summary("sampled"), "test/greedy": summary("greedy")})


ONE_TURN = [
    _report(0, 0.5, (_row("a", (0, 0)), _row("a", (1, 1), index=1), _row("b", (1, 0)))),
    _report(40, 0.9, (_row("a", (1, 3)), _row("a", (1, 1), index=1), _row("b", (1, 3)))),
]
NEW_COMPOSITIONS = {"ood/sampled": ONE_TURN[1].summary["test/sampled"]}
TWO_TURNS = [
    _report(0, 0.5, (_row("a", (0, 0), (1, 0)), _row("b", (1, 0), (1, 1)))),
    _report(40, 0.9, (_row("a", (1, 0), (1, 3)), _row("b", (1, 3)))),  # b ended after its first turn
]


def test_every_part_of_a_reward_is_drawn_however_many_there_are() -> None:
    names = [f"part{i}" for i in range(9)]
    means = {name: Interval(0.5, 0.4, 0.6) for name in (*names, "return")}
    reports = [EvalReport(version, (), {"test/sampled": means}) for version in (0, 10)]
    _, parts = learning_panels(reports, names, ())
    axes = draw(parts)
    assert read_legend(axes) == [f"{name} 50" for name in names]
    lines = {(line.get_color(), line.get_marker()) for line in axes.lines}
    assert len(lines) == len(names), "no two look alike"


def test_training_returns_below_0_are_drawn_whole() -> None:
    returns = [(1, -40.0), (2, -25.0), (3, 10.0)]
    low, high = draw(learning_panels(ONE_TURN, MAXIMA, returns)[0]).get_ylim()
    assert (low, high) == (-40, 103)


def test_long_names_that_end_alike_stay_whole() -> None:
    curve: Curve = [(0, Interval(0.5, 0.4, 0.6))]
    names = ["aligned-dynamic-sampling", "crossed-dynamic-sampling", "a-name-of-more-than-20-characters"]
    axes = draw(budget_panels("Return", dict.fromkeys(names, curve))[0])
    assert read_legend(axes) == [f"{names[0]} 50", f"{names[1]} 50", "\u2026-than-20-characters 50"]


def test_a_run_that_only_evaluates_is_not_titled_as_before_training(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path))
    agents = (config.agents[0].model_copy(update={"start_from": Path("w")}), *config.agents[1:])
    loaded = config.model_copy(update={"agents": agents})
    only = loaded.model_copy(update={"train": config.train.model_copy(update={"num_iterations": 0})})
    assert [start_title(one) for one in (config, loaded, only)] == [
        "before training",
        "before training (start_from)",
        "as loaded (start_from)",
    ]


def test_a_curve_begins_where_its_split_could_be_judged() -> None:
    before, after = ONE_TURN
    reports = [before, replace(after, summary=after.summary | NEW_COMPOSITIONS)]
    axes = draw(learning_panels(reports, MAXIMA, ())[0])
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 40], [40]]
    scatter = draw(turn_panels([TWO_TURNS[0], replace(TWO_TURNS[1], summary=reports[1].summary)], REWARD)[0])
    assert len(read_legend(scatter)) == 2


def test_learning_curves_show_percent_over_iterations() -> None:
    left, right = map(draw, learning_panels(ONE_TURN, MAXIMA, ()))
    assert [list(line.get_xdata()) for line in left.lines] == [[0, 40]]
    assert list(left.lines[0].get_ydata()) == pytest.approx([25, 45])
    assert [list(line.get_ydata()) for line in right.lines] == [pytest.approx([50, 90]), pytest.approx([50, 50])]
    assert read_legend(right) == ["structure 90", "tests 50"]


@pytest.mark.parametrize(("num_points", "marker"), [(1, "o"), (2, "None")])
def test_one_iteration_is_drawn_as_a_point(num_points: int, marker: str) -> None:
    points = [(float(iteration), 50.0) for iteration in range(1, num_points + 1)]
    series, training = series_panel("", {"a": points}, ""), learning_panels(ONE_TURN, MAXIMA, points)[0]
    assert [draw(panel).lines[0].get_marker() for panel in (series, training)] == [marker, marker]


def test_turns_are_set_against_each_other_in_percent_of_the_maximum() -> None:
    [axes] = map(draw, turn_panels(TWO_TURNS, REWARD))
    before, _, after, _ = axes.collections
    assert sorted(map(tuple, before.get_offsets().tolist())) == [(0, 25), (25, 50)]
    assert sorted(map(tuple, after.get_offsets().tolist())) == [(25, 100), (100, 100)]
    assert axes.get_xlabel() == "joint return turn 1, % of maximum"
    assert read_legend(axes) == ["before training, mean 12 → 38 (n = 2)", "after training, mean 62 → 100 (n = 2)"]


def test_turns_without_a_price_are_not_drawn() -> None:
    """Agents who write one after the other get a reward once all have written."""

    def begin_late(report: EvalReport) -> EvalReport:
        rows = (replace(row, returns=(0.0, *row.returns), parts=({}, *row.parts)) for row in report.rows)
        return replace(report, rows=tuple(rows))

    late = [begin_late(report) for report in TWO_TURNS]
    [axes], [shown] = (map(draw, turn_panels(one, REWARD)) for one in (late, TWO_TURNS))
    assert axes.get_xlabel() == "joint return turn 2, % of maximum"
    for points, others in zip(axes.collections, shown.collections, strict=True):
        assert points.get_offsets().tolist() == others.get_offsets().tolist()


def test_points_that_coincide_are_one_with_their_area() -> None:
    rows = (*(_row(f"p{i}", (1, 3), (1, 3)) for i in range(3)), _row("q", (0, 0), (1, 3)))
    [axes] = map(draw, turn_panels([_report(0, 0.5, rows), _report(5, 0.5, rows)], REWARD))
    points = axes.collections[0]
    assert isinstance(points, PathCollection)
    sizes = dict(zip(map(tuple, points.get_offsets().tolist()), points.get_sizes(), strict=True))
    assert sizes[100.0, 100.0] == pytest.approx(3 * sizes[0.0, 100.0])


def test_a_panel_for_a_page_takes_the_colours_of_the_page() -> None:
    panel = learning_panels(ONE_TURN, MAXIMA, ())[1]
    element = render_svg(panel, "a")
    assert element == render_svg(panel, "a")
    assert f'aria-label="{panel.title}"' in element
    assert "var(--series-0)" in element
    assert "#0072b2" not in element
    ids = re.findall(r' id="([^"]*)"', element)
    others = re.findall(r' id="([^"]*)"', render_svg(panel, "b"))
    assert ids
    assert not set(ids) & set(others), "two panels of a page share no id"


def test_a_change_is_called_one_only_where_its_interval_is_without_0() -> None:
    up, none = Interval(0.02, 0.001, 0.04), Interval(0.02, -0.001, 0.04)
    assert [format_tested_difference(gain) for gain in (up, none)] == ["+2.0 [+0.1, +4.0]", "~ +2.0 [-0.1, +4.0]"]
    assert format_tested_difference(Interval(-28000.0, -30000.0, -26000.0), 1.0) == "-28,000.0 [-30,000.0, -26,000.0]"


def test_parts_are_percent_whatever_their_names_end_in() -> None:
    half = Interval(0.5, 0.25, 0.75)
    assert format_interval("few_tokens", half) == "50.0 [25.0, 75.0]"
    counts = ("generated_tokens", "helper/response_tokens", "few_tokens/response_tokens")
    assert {format_interval(name, half) for name in counts} == {"0.5 [0.2, 0.8]"}
    assert format_interval("few_tokens/cut_off_frac", half) == "50.0 [25.0, 75.0]"


def test_brackets_of_tables_are_printed() -> None:
    out = io.StringIO()
    tables = [ReportTable("[/t]", ["", "[/c]"], [["[/r]", "[/v]"]]), ReportTable("[/empty]", [""], [])]
    print_tables(tables, Console(file=out))
    assert all(text in out.getvalue() for text in ("[/t]", "[/c]", "[/r]", "[/v]", "[/empty]"))
