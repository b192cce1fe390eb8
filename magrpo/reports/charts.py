"""Charts of training runs: learning curves, and the first turn against the last.

They follow the figures of arXiv 2508.04652. Drawn without pyplot, so importing this module changes no global state and
needs no display. The colours are Okabe and Ito's, which stay distinct under common colour blindness; marker shapes
differ, too.
"""

import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from magrpo.interfaces import Reward
from magrpo.reports.figures import SPLIT_TITLES, quantity_title
from magrpo.types import EvalReport, Interval

INK, GREY, GRID = "#222222", "#8a8a8a", "#e6e6e6"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BEFORE, AFTER = "#E69F00", "#0072B2"
STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
}
MODE = "sampled"
OVER_PROBLEMS = "Sampled completions; the bands are bootstrap 95 % intervals over problems."
MAX_LABEL = 20
"""Longest label in the legend of a panel, in characters."""
Point = tuple[float, float]
Curve = Sequence[tuple[float, Interval]]
"""Values with intervals over iterations or tokens."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes under its title."""

    title: str
    draw: Callable[[Axes], None]
    height: float = 3.6
    """Height in inches when drawn alone, 5.2 inches wide."""


def render_svg(panel: Panel, name: str) -> str:
    """Render the panel without its title as an ``<svg>`` element; equal arguments give equal text.

    Colours are the page's custom properties ``--ink``, ``--line``, ``--series-0`` and so on. ``name`` must be unique in
    the page; it makes the identifiers in the element unique.
    """
    text = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5.2, panel.height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
        panel.draw(figure.subplots())
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, dpi=200, metadata=metadata)
    element = "<svg" + text.getvalue().partition("<svg")[2]
    colours = {INK: "--ink", GRID: "--line", **{colour: f"--series-{i}" for i, colour in enumerate(COLOURS)}}
    for colour, custom_property in colours.items():
        element = element.replace(colour.lower(), f"var({custom_property})")
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    opening = rf'<svg viewBox="\1" role="img" aria-label="{escape(panel.title)}">'
    return re.sub(r'<svg .*?viewBox="([^"]*)"[^>]*>', opening, element, count=1, flags=re.DOTALL)


def _list_splits(reports: Sequence[EvalReport]) -> list[str]:
    """Return the evaluated splits in display order."""
    return [split for split in SPLIT_TITLES if f"{split}/{MODE}" in reports[-1].summary]


# -------------------------------------------------------------------------------------------------- learning curves
def learning_panels(reports: Sequence[EvalReport], parts: Collection[str], training: Sequence[Point]) -> list[Panel]:
    """Draw the return of every split over the training iterations, then the parts of each split, held-out first.

    Markers are evaluations of sampled completions, with bootstrap 95 % intervals over problems as bands. ``training``:
    the return of each iteration in percent, drawn as a thin line.
    """
    splits = _list_splits(reports)
    returns = {"held-out" if split == "test" else split: _make_curve(reports, split, "return") for split in splits}
    panels = [Panel("Joint return", partial(_draw_curves, curves=returns, colours=(INK, GREY), training=training))]
    for split in splits:
        curves = {quantity_title(part): _make_curve(reports, split, part) for part in parts}
        panels.append(Panel(f"Parts of the return, {SPLIT_TITLES[split]}", partial(_draw_curves, curves=curves)))
    return panels


def series_panel(title: str, series: Mapping[str, Sequence[Point]], unit: str) -> Panel:
    """Draw a quantity over the training iterations, one line for each label."""
    return Panel(title, partial(_draw_series, series=series, unit=unit), 2.6)


def _draw_series(axes: Axes, series: Mapping[str, Sequence[Point]], unit: str) -> None:
    for (label, points), colour in zip(series.items(), itertools.cycle(COLOURS)):
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.5, label=label, marker=_mark_alone(points))
    axes.set(xlabel="training iterations", ylabel=unit)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.grid(axis="y")
    if len(series) > 1:
        _place_legend(axes)


def _place_legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=9.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.2)


def _mark_alone(points: Sequence[Point]) -> str:
    """Return the marker of a line: a dot for one point, of which a line shows nothing, else none."""
    return "o" if len(points) == 1 else "None"


def comparison_panels(
    runs: Mapping[str, Sequence[EvalReport]], tokens: Mapping[str, Mapping[int, float]]
) -> list[Panel]:
    """Draw the held-out return and the one on new compositions, if all runs have it, over iterations and over tokens.

    ``runs`` holds the evaluations of each run by a short label, at most as many runs as there are colours. ``tokens``
    holds the tokens generated in training up to each evaluated iteration.
    """
    assert len(runs) <= len(COLOURS), "more runs than colours"
    last = [reports[-1].summary for reports in runs.values()]
    splits = [split for split in ("test", "ood") if all(f"{split}/{MODE}" in summary for summary in last)]
    panels = []
    for over in (None, tokens):
        xlabel = "training iterations" if over is None else "thousands of tokens generated in training"
        for split in splits:
            curves = {label: _make_curve(reports, split, "return") for label, reports in runs.items()}
            if over is not None:
                curves = {label: _place_over_tokens(curve, over[label]) for label, curve in curves.items()}
            draw = partial(_draw_curves, curves=curves, xlabel=xlabel)
            panels.append(Panel(f"Joint return, {SPLIT_TITLES[split]}", draw))
    return panels


def _place_over_tokens(curve: Curve, tokens: Mapping[int, float]) -> Curve:
    """Return a curve over thousands of tokens; ``tokens`` holds the tokens generated up to each of its iterations."""
    return [(tokens[int(iteration)] / 1000, value) for iteration, value in curve]


def budget_panels(title: str, curves: Mapping[str, Curve]) -> list[Panel]:
    """Draw curves over thousands of generated tokens, at most as many in a panel as there are colours.

    The first curve is in every panel.
    """
    (first, reference), *others = curves.items()
    size = len(COLOURS) - 1
    groups = [dict(others[start : start + size]) for start in range(0, max(len(others), 1), size)]
    xlabel = "thousands of tokens generated in training"
    return [Panel(title, partial(_draw_curves, curves={first: reference, **group}, xlabel=xlabel)) for group in groups]


def _make_curve(reports: Sequence[EvalReport], split: str, name: str) -> Curve:
    """Return the mean of a quantity at each evaluation in which any answer of the split could be judged."""
    key = f"{split}/{MODE}"
    return [(report.policy_version, report.summary[key][name]) for report in reports if key in report.summary]


def _draw_curves(
    axes: Axes,
    curves: Mapping[str, Curve],
    colours: Sequence[str] = COLOURS,
    xlabel: str = "training iterations",
    training: Sequence[Point] = (),
) -> None:
    """Draw a line and a band for each label; the legend has the last value of each."""
    bottom = min([0.0, *(value for _, value in training)])  # returns may be negative
    if training:
        style: dict[str, Any] = {"color": COLOURS[0], "linewidth": 0.8, "alpha": 0.8, "zorder": 1}
        label = f"training {training[-1][1]:.0f}"
        axes.plot(*zip(*training, strict=True), marker=_mark_alone(training), markersize=4.5, label=label, **style)
    shown = _shorten_labels(curves)
    # There is a marker more than colours, so that lines beyond the last colour still differ.
    for (label, curve), colour, marker in zip(curves.items(), itertools.cycle(colours), itertools.cycle(MARKERS)):
        places = [place for place, _ in curve]
        mean, low, high = ([100 * getattr(value, field) for _, value in curve] for field in ("mean", "low", "high"))
        bottom = min(bottom, *low)
        axes.fill_between(places, low, high, color=colour, alpha=0.14, linewidth=0)
        legend = f"{shown[label]} {mean[-1]:.0f}"
        axes.plot(places, mean, color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=legend)
    axes.set(xlabel=xlabel, ylabel="percent of the maximum", ylim=(bottom, 103))
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.grid(axis="y")
    _place_legend(axes)


def _shorten_labels(labels: Collection[str]) -> dict[str, str]:
    """Cut long labels to their ends, which differ most often; those that would look alike stay whole."""
    shown = {label: label if len(label) <= MAX_LABEL else f"\u2026{label[1 - MAX_LABEL :]}" for label in labels}
    uses = Counter(shown.values())
    return {label: short if uses[short] == 1 else label for label, short in shown.items()}


# ------------------------------------------------------------------------------------------------------------- rows
def dot_panel(title: str, values: Mapping[str, Interval], highlighted: Collection[str]) -> Panel:
    """Draw a dot for each row, with its interval; ``highlighted`` rows get a colour and a line."""
    draw = partial(_draw_dots, values=values, highlighted=highlighted)
    return Panel(title, draw, 0.9 + 0.42 * len(values))


def _draw_dots(axes: Axes, values: Mapping[str, Interval], highlighted: Collection[str]) -> None:
    left = min(0.0, *(100 * value.low for value in values.values()))  # returns may be negative
    for place, (title, value) in enumerate(values.items()):
        colour = AFTER if title in highlighted else INK
        mean, low, high = (100 * number for number in (value.mean, value.low, value.high))
        if title in highlighted:
            axes.axvline(mean, color=AFTER, linewidth=0.8, alpha=0.5, zorder=1)
        axes.plot([low, high], [place, place], color=colour, linewidth=1.8, solid_capstyle="butt", zorder=2)
        axes.plot([mean], [place], color=colour, marker="o", markersize=5.5, zorder=3)
        axes.text(left, place - 0.16, f"{title}  {mean:.0f}", color=colour, fontsize=9.5, va="bottom")
    axes.set(xlim=(left, 100), ylim=(len(values) - 0.5, -1.0), yticks=[], xlabel="percent of the maximum")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


# ----------------------------------------------------------------------------------------------------- turn by turn
def turn_panels(reports: Sequence[EvalReport], reward: Reward) -> list[Panel]:
    """Draw the return of the first turn against the last for every sampled trajectory, before and after training.

    One panel for each split. The area of a point is the number of points that coincide there. A trajectory that ended
    early counts with its last turn.
    """
    turns = list_priced_turns(reports)

    def draw(axes: Axes, split: str) -> None:
        if len(reports) > 1:
            _draw_points(axes, _turn_points(reports[0], split, reward), BEFORE, "before training", hollow=True)
        label = "after training" if len(reports) > 1 else "trajectories"
        _draw_points(axes, _turn_points(reports[-1], split, reward), AFTER, label)
        _finish_scatter(axes, f"turn {turns[0]}", f"turn {turns[-1]}")

    splits = _list_splits(reports)
    return [Panel(SPLIT_TITLES[split].capitalize(), partial(draw, split=split), 4.6) for split in splits]


def list_priced_turns(reports: Sequence[EvalReport]) -> list[int]:
    """Return the numbers of the turns with a reward before or after training.

    Where agents write one after the other, a turn has none, and no parts of one, until all have written.
    """
    rows = (row for report in (reports[0], reports[-1]) for row in report.rows)
    return sorted({turn for row in rows for turn, parts in enumerate(row.parts, 1) if parts})


def _turn_points(report: EvalReport, split: str, reward: Reward) -> list[Point]:
    points = []
    for row in (row for row in report.rows if (row.split, row.mode) == (split, MODE)):
        priced = [100 * reward.fraction(value) for value, parts in zip(row.returns, row.parts, strict=True) if parts]
        points.append((priced[0], priced[-1]))
    return points


def _draw_points(axes: Axes, points: Sequence[Point], colour: str, label: str, hollow: bool = False) -> None:
    if not points:
        return
    counts = Counter((round(x, 1), round(y, 1)) for x, y in points)
    x, y = zip(*counts, strict=True)
    areas = [max(14.0, 1200 * count / len(points)) for count in counts.values()]
    style: dict[str, Any] = {"facecolors": colour, "edgecolors": "white", "alpha": 0.6, "linewidths": 0.8, "zorder": 3}
    if hollow:
        style = {"facecolors": "none", "edgecolors": colour, "alpha": 0.9, "linewidths": 1.4, "zorder": 4}
    axes.scatter(x, y, s=areas, **style)
    means = " \u2192 ".join(f"{fmean(values):.0f}" for values in zip(*points, strict=True))
    axes.scatter([], [], s=45, label=f"{label}, mean {means} (n = {len(points)})", **style)


def _finish_scatter(axes: Axes, x: str, y: str) -> None:
    axes.plot([0, 100], [0, 100], color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set(xlabel=f"joint return {x}, % of maximum", ylabel=f"joint return {y}, % of maximum")
    left, bottom = min(-4.0, axes.dataLim.x0 - 1), min(-20.0, axes.dataLim.y0 - 1)  # returns may be negative
    axes.set(xlim=(left, 106), ylim=(bottom, 106), aspect="equal", xticks=range(0, 101, 20), yticks=range(0, 101, 20))
    axes.grid()
    axes.legend(loc="lower right", frameon=False, borderpad=0, handletextpad=0.2, fontsize=9.5)
