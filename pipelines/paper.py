"""What arXiv 2508.04652 reports for its tasks, to set beside our own figures of the same tasks.

The figures are quoted at second hand. Speed is in tokens a second, all else in percent of the maximum; what is not
given is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from magrpo.config import RunConfig
from magrpo.report import column_title
from pipelines.tables import Section

QUANTITIES = ("tokens_per_s", "structure", "syntax", "tests", "cooperation", "return")

_CODE: Mapping[str, Mapping[str, str]] = {
    name: {quantity: f"{figure:.1f}" for quantity, figure in zip(QUANTITIES, figures, strict=False)}
    for name, figures in {
        "single": (73.1, 100.0, 100.0, 64.8),
        "naive": (99.6, 98.4, 96.5, 56.4, 35.1, 63.1),
        "sequential": (97.4, 97.5, 96.3, 55.2, 35.2, 62.5),
        "discussion": (82.5, 98.1, 94.8, 41.2, 30.2, 57.5),
        "one_turn": (190.0, 100.0, 97.8, 61.6, 83.4, 83.7),
        "two_turns": (95.2, 99.9, 97.3, 67.9, 84.9, 85.8),
    }.items()
}
PAPER: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "humaneval": _CODE,
    "coophumaneval": _CODE,
    "tldr": {"naive": {"return": "22.7"}, "one_turn": {"return": "93.5 to 94.5"}},
    "arxiv": {"naive": {"return": "49.0"}, "one_turn": {"return": "93.1"}},
}
"""By ``problems.kind`` and the row (:data:`pipelines.baselines.BASELINES`); one table is of both code tasks."""

_TITLES = {
    "single": "paper: single agent",
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
    paper = PAPER.get(config.problems.kind, {})
    rows = [row for row in rows if row[1] in paper]
    if not rows:
        return
    shown = [quantity for quantity in QUANTITIES if any(quantity in ours for _, _, ours in rows)]
    lines = []
    for title, name, ours in rows:
        for called, figures in ((title, ours), (_TITLES[name], paper[name])):
            lines.append((called, *(figures.get(quantity, "-") for quantity in shown)))
    models = ", ".join(dict.fromkeys(agent.model for agent in config.agents))
    theirs = "Qwen2.5-Coder, one of 7B as the single agent, else two of 3B" if paper is _CODE else "two of Qwen3-1.7B"
    note = (
        f"Percent of the maximum. Ours: {models}. Paper: arXiv 2508.04652, second-hand, theirs: {theirs}. Not the same "
        "models or machines unless yours are."
    )
    yield Section("Beside the paper", ("", *map(column_title, shown)), lines, note)
