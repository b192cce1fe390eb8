"""What arXiv 2508.04652 reports for two agents that write code, to set beside our own figures of the same tasks.

Its models are Qwen2.5-Coder: one of 7B in the first row, two of 3B in the others. The figures are quoted at second
hand. Speed is in tokens a second, all else in percent of the maximum; what is not given is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from magrpo.config import RunConfig
from magrpo.reports.figures import column_title
from magrpo.reports.tables import Section

TASKS = ("humaneval", "coophumaneval")
"""Problem sets of which the paper speaks, by ``problems.kind``."""
QUANTITIES = ("tokens_per_s", "structure", "syntax", "tests", "cooperation", "return")

PAPER: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(QUANTITIES, figures, strict=False))
    for name, figures in {
        "single": (73.1, 100.0, 100.0, 64.8),
        "naive": (99.6, 98.4, 96.5, 56.4, 35.1, 63.1),
        "sequential": (97.4, 97.5, 96.3, 55.2, 35.2, 62.5),
        "discussion": (82.5, 98.1, 94.8, 41.2, 30.2, 57.5),
        "one_turn": (190.0, 100.0, 97.8, 61.6, 83.4, 83.7),
        "two_turns": (95.2, 99.9, 97.3, 67.9, 84.9, 85.8),
    }.items()
}
"""By the name of the row: see :data:`pipelines.experiments.baselines.BASELINES`."""

_TITLES = {
    "single": "paper: single agent, 7B",
    "naive": "paper: naive concatenation",
    "sequential": "paper: sequential pipeline",
    "discussion": "paper: one-round discussion",
    "one_turn": "paper: MAGRPO, one turn",
    "two_turns": "paper: MAGRPO, two turns",
}


def trained_row(num_turns: int) -> str:
    """The paper's row of agents trained together; empty if it has none with so many turns."""
    return {1: "one_turn", 2: "two_turns"}.get(num_turns, "")


def beside_the_paper(config: RunConfig, rows: Sequence[tuple[str, str, Mapping[str, str]]]) -> Iterator[Section]:
    """Our rows, each above the paper's, where the task is one of the paper's; else nothing.

    ``rows``: what ours is called, the name of the paper's, and our figures by quantity; rows it has not are left out.
    """
    rows = [row for row in rows if row[1] in PAPER]
    if config.problems.kind not in TASKS or not rows:
        return
    shown = [quantity for quantity in QUANTITIES if any(quantity in ours for _, _, ours in rows)]
    lines = []
    for title, name, ours in rows:
        theirs = {quantity: f"{value:.1f}" for quantity, value in PAPER[name].items()}
        for called, figures in ((title, ours), (_TITLES[name], theirs)):
            lines.append((called, *(figures.get(quantity, "-") for quantity in shown)))
    models = ", ".join(dict.fromkeys(agent.model for agent in config.agents))
    note = (
        f"Percent of the maximum. Ours: {models}. Paper: arXiv 2508.04652, second-hand, theirs; Qwen2.5-Coder, one of "
        "7B for the single agent and two of 3B for the others. Not the same models or machines unless yours are."
    )
    yield Section("Beside the paper", ("", *map(column_title, shown)), lines, note)
