"""The two pictures of a training run, after the figures of arXiv 2508.04652: learning curves, turn against turn.

Drawn without pyplot, so importing this changes no global state and needs no display. The colours are those of Okabe and
Ito, which stay apart under every common colour blindness; marker shapes say the same again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from magrpo.types import EvalReport, Interval

INK, GREY = "#222222", "#8a8a8a"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
BEFORE, AFTER = "#E69F00", "#0072B2"
STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "magrpo",
}
MODE = "sampled"
TITLES = {"train": "Training problems", "test": "Held-out problems", "ood": "New compositions (ood)"}
Point = tuple[float, float]
Curve = Sequence[tuple[float, Interval]]


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem.png`` (1800 pixels wide, meant to be shown at 900) and ``stem.svg``; equal figures, equal bytes."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    with mpl.rc_context(STYLE):
        figure.savefig(paths[0], dpi=200, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


# -------------------------------------------------------------------------------------------------- learning curves
def learning_picture(reports: Sequence[EvalReport], maxima: Mapping[str, float]) -> Figure:
    """Normalised return (left, every split) and its parts (right, held-out problems) over the training iterations.

    Every marker is an evaluation of sampled completions, every band its bootstrap 95 % interval over problems.
    """
    with mpl.rc_context(STYLE):
        figure, (left, right) = _panels(2, height=4.4)
        left.set_title("Joint return")
        right.set_title("Its parts, held-out problems")
        splits = [key.split("/")[0] for key in reports[-1].summary if key.endswith(f"/{MODE}")]
        returns = {"held-out" if split == "test" else split: (f"{split}/{MODE}", "return") for split in splits}
        _draw_curves(left, _curves(reports, returns), (INK, GREY))
        _draw_curves(
            right, _curves(reports, {part.replace("_", " "): (f"test/{MODE}", part) for part in maxima}), COLOURS
        )
        for axes in (left, right):
            axes.set_xlabel("training iterations")
            axes.set_ylim(0, 103)
            axes.grid(axis="y")
        left.set_ylabel("percent of the maximum")
        note = "Sampled completions; the bands are bootstrap 95 % intervals over problems."
        figure.supxlabel(note, fontsize=9.5, color=GREY)
    return figure


def _curves(reports: Sequence[EvalReport], quantities: Mapping[str, tuple[str, str]]) -> dict[str, Curve]:
    return {
        label: [(report.policy_version, report.summary[key][name]) for report in reports]
        for label, (key, name) in quantities.items()
    }


def _draw_curves(axes: Axes, curves: Mapping[str, Curve], colours: Sequence[str]) -> None:
    """One line and band for each label, the label written at the line's end."""
    ends = {}
    for (label, curve), colour, marker in zip(curves.items(), colours, MARKERS, strict=False):
        iterations = [iteration for iteration, _ in curve]
        mean, low, high = ([100 * getattr(value, field) for _, value in curve] for field in ("mean", "low", "high"))
        axes.fill_between(iterations, low, high, color=colour, alpha=0.14, linewidth=0)
        axes.plot(iterations, mean, color=colour, marker=marker, markersize=4.5, linewidth=1.8)
        ends[label] = (mean[-1], colour)
    for label, height in _spread({label: end for label, (end, _) in ends.items()}, gap=7.0, top=101.0).items():
        axes.annotate(
            f"{label} {ends[label][0]:.0f}",
            (1.0, height),
            xycoords=axes.get_yaxis_transform(),
            xytext=(6, 0),
            textcoords="offset points",
            color=ends[label][1],
            va="center",
            annotation_clip=False,
        )


def _spread(heights: Mapping[str, float], gap: float, top: float) -> dict[str, float]:
    """Heights at least ``gap`` apart and at most ``top``, in the same order, pushed down from the highest."""
    placed: dict[str, float] = {}
    ceiling = top
    for label in sorted(heights, key=heights.__getitem__, reverse=True):
        placed[label] = min(heights[label], ceiling)
        ceiling = placed[label] - gap
    return placed


OVER_PROBLEMS = "Sampled completions; the bands are bootstrap 95 % intervals over problems."


RETURNS = (("test", "return"), ("ood", "return"))


def comparison_picture(
    runs: Mapping[str, Sequence[EvalReport]],
    note: str = OVER_PROBLEMS,
    tokens: Mapping[str, Mapping[int, float]] | None = None,
    quantities: Sequence[tuple[str, str]] = RETURNS,
) -> Figure:
    """``quantities``, by split and name, of several runs over their training iterations: those that all runs have.

    ``runs`` holds the evaluations of each run by a short label; as many as there are colours. Each value is a fraction
    of its own run's maximum. ``note`` says below it what the bands are. ``tokens``: those generated for training up to
    each iteration that was evaluated; a second row of panels has them in place of the iterations.
    """
    assert len(runs) <= len(COLOURS), "more runs than colours"
    last = [reports[-1].summary for reports in runs.values()]
    shown = [(split, name) for split, name in quantities if all(name in s.get(f"{split}/{MODE}", {}) for s in last)]
    with mpl.rc_context(STYLE):
        rows = 1 if tokens is None else 2
        figure, panels = _panels(len(shown), height=4.4 * rows, rows=rows)
        for number, axes in enumerate(panels):
            (split, name), over_tokens = shown[number % len(shown)], number >= len(shown)
            curves = {label: _curves(r, {"": (f"{split}/{MODE}", name)})[""] for label, r in runs.items()}
            if tokens is not None and over_tokens:
                curves = {label: [(tokens[label][int(i)] / 1000, v) for i, v in c] for label, c in curves.items()}
            _draw_curves(axes, curves, COLOURS)
            title = "Joint return" if name == "return" else name.replace("pass_at_", "pass@")
            axes.set(title=f"{title}, {TITLES[split].lower()}", ylim=(0, 103))
            axes.set_xlabel("thousands of tokens generated in training" if over_tokens else "training iterations")
            axes.grid(axis="y")
            if number % len(shown) == 0:
                axes.set_ylabel("percent of the maximum")
        figure.supxlabel(note, fontsize=9.5, color=GREY)
    return figure


# ----------------------------------------------------------------------------------------------------- turn by turn
def turns_picture(reports: Sequence[EvalReport], maxima: Mapping[str, float]) -> Figure:
    """Joint return of the first turn against the last one's, for every sampled trajectory, before and after training.

    Where trajectories have one turn there is nothing to set it against: then each problem's mean return before training
    is set against that after training, and the picture says so. Points that coincide are drawn as one, its area the
    number of them. A trajectory that ended early keeps the return it ended with, on the diagonal.
    """
    before, after = reports[0], reports[-1]
    num_turns = max(len(row.parts) for report in (before, after) for row in report.rows)
    splits = [split for split in TITLES if any(row.split == split for row in after.rows)]
    with mpl.rc_context(STYLE):
        figure, panels = _panels(len(splits), height=5.0 + 0.3 * (num_turns == 1))
        for axes, split in zip(panels, splits, strict=True):
            if num_turns > 1:
                _draw_points(axes, _first_and_last(before, split, maxima), BEFORE, "before training", hollow=True)
                _draw_points(axes, _first_and_last(after, split, maxima), AFTER, "after training")
                _finish_scatter(axes, TITLES[split], "turn 1", f"turn {num_turns}")
            else:
                x, y = _per_problem(before, split, maxima), _per_problem(after, split, maxima)
                _draw_points(axes, [(x[task_id], y[task_id]) for task_id in x], AFTER, "problem")
                _finish_scatter(axes, TITLES[split], "before training", "after training")
        if num_turns == 1:
            note = "Trajectories have one turn here, so each problem is drawn before training against after it."
            figure.supxlabel(note, fontsize=9.5, color=GREY)
    return figure


def _first_and_last(report: EvalReport, split: str, maxima: Mapping[str, float]) -> list[Point]:
    rows = [row for row in report.rows if row.split == split and row.mode == MODE]
    return [(_percent(row.parts[0], maxima), _percent(row.parts[-1], maxima)) for row in rows]


def _per_problem(report: EvalReport, split: str, maxima: Mapping[str, float]) -> dict[str, float]:
    returns = defaultdict(list)
    for row in report.rows:
        if row.split == split and row.mode == MODE:
            returns[row.task_id].append(_percent(row.parts[-1], maxima))
    return {task_id: fmean(values) for task_id, values in returns.items()}


def _percent(parts: Mapping[str, float], maxima: Mapping[str, float]) -> float:
    return 100 * sum(parts.values()) / sum(maxima.values())


def _draw_points(axes: Axes, points: Sequence[Point], colour: str, label: str, hollow: bool = False) -> None:
    counts = Counter((round(x, 1), round(y, 1)) for x, y in points)
    x, y = zip(*counts, strict=True)
    areas = [max(14.0, 1200 * count / len(points)) for count in counts.values()]
    style: dict[str, Any] = {"facecolors": "none" if hollow else colour, "edgecolors": colour if hollow else "white"}
    style |= {"alpha": 0.9 if hollow else 0.6, "linewidths": 1.4 if hollow else 0.8, "zorder": 4 if hollow else 3}
    axes.scatter(x, y, s=areas, **style)
    means = " \u2192 ".join(f"{fmean(values):.0f}" for values in zip(*points, strict=True))
    axes.scatter([], [], s=45, label=f"{label}, mean {means} (n = {len(points)})", **style)


def _finish_scatter(axes: Axes, title: str, x: str, y: str) -> None:
    axes.plot([0, 100], [0, 100], color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set(title=title, xlabel=f"joint return {x}, % of maximum", ylabel=f"joint return {y}, % of maximum")
    axes.set(xlim=(-4, 106), ylim=(-20, 106), aspect="equal", xticks=range(0, 101, 20), yticks=range(0, 101, 20))
    axes.grid()
    axes.legend(loc="lower right", frameon=False, borderpad=0, handletextpad=0.2, fontsize=9.5)


def _panels(number: int, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure 9 inches wide with ``rows`` rows of ``number`` panels side by side, row by row."""
    figure = Figure(figsize=(9, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, number, squeeze=False).flat)
