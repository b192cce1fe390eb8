"""Figures that arXiv 2508.04652 reports for two agents that write code, shown beside ours on the same tasks.

Its models are Qwen2.5-Coder: 7B for the single agent, two of 3B otherwise. The figures are quoted second-hand. Speed is
in tokens per second, everything else in percent of the maximum; figures not reported are absent.
"""

from collections.abc import Iterator, Mapping, Sequence

from magrpo.config.run import RunConfig
from magrpo.reports.figures import UNDEFINED, quantity_title
from magrpo.reports.page import ReportTable

TASKS = ("humaneval", "coophumaneval")
"""The paper's problem sets, by ``problems.kind``."""
QUANTITIES = ("tokens_per_s", "structure", "syntax", "tests", "cooperation", "return")

PAPER = {
    "single": ("single agent, 7B", (73.1, 100.0, 100.0, 64.8)),
    "naive": ("naive concatenation", (99.6, 98.4, 96.5, 56.4, 35.1, 63.1)),
    "sequential": ("sequential pipeline", (97.4, 97.5, 96.3, 55.2, 35.2, 62.5)),
    "discussion": ("one-round discussion", (82.5, 98.1, 94.8, 41.2, 30.2, 57.5)),
    "one_turn": ("MAGRPO, one turn", (190.0, 100.0, 97.8, 61.6, 83.4, 83.7)),
    "two_turns": ("MAGRPO, two turns", (95.2, 99.9, 97.3, 67.9, 84.9, 85.8)),
}
"""Title and figures, in the order of :data:`QUANTITIES`, by name of the row in the table of baselines."""


def trained_row_name(num_turns: int) -> str:
    """The paper's row of agents trained together; empty if it reports none with so many turns."""
    return {1: "one_turn", 2: "two_turns"}.get(num_turns, "")


def paper_tables(config: RunConfig, rows: Sequence[tuple[str, str, Mapping[str, str]]]) -> Iterator[ReportTable]:
    """Our rows, each above the paper's; no table unless the task is one of the paper's.

    A row is its title, the name of the paper's row and our figures by quantity; rows the paper lacks are left out.
    """
    rows = [row for row in rows if row[1] in PAPER]
    if config.problems.kind not in TASKS or not rows:
        return
    shown = [quantity for quantity in QUANTITIES if any(quantity in ours for _, _, ours in rows)]
    lines = []
    for title, name, ours in rows:
        paper_title, values = PAPER[name]
        theirs = {quantity: f"{value:.1f}" for quantity, value in zip(QUANTITIES, values, strict=False)}
        for line_title, figures in ((title, ours), (f"paper: {paper_title}", theirs)):
            lines.append((line_title, *(figures.get(quantity, UNDEFINED) for quantity in shown)))
    models = ", ".join(dict.fromkeys(agent.model for agent in config.agents))
    note = (
        f"Percent of the maximum. Ours: {models}. Paper: arXiv 2508.04652, quoted from secondary sources; "
        "Qwen2.5-Coder, one of 7B as the single agent, two of 3B otherwise. Models and machines differ unless yours "
        "are the same."
    )
    yield ReportTable("Comparison with the paper", ("", *map(quantity_title, shown)), lines, note)
