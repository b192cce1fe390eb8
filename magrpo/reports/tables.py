"""The tables of reports, and how a terminal shows them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

_NAME_WIDTH = 14
"""Smallest width of the column of row names in a printed table, if the figures leave so much."""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table under its title; the first column names the row. ``text``: the others hold words instead of figures."""

    kind: ClassVar = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: bool = False


def print_tables(tables: Sequence[ReportTable], console: Console) -> None:
    """Print tables with their titles and notes; where one is too wide, intervals stand below their figures."""
    for shown in tables:
        if not shown.text and _measure_figures(shown) + _NAME_WIDTH > console.width:
            shown = replace(shown, rows=[[cell.replace(" [", "\n[") for cell in row] for row in shown.rows])
        title = Text(shown.title, style="bold")
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)
        figures_fit = not shown.text and _measure_figures(shown) + _NAME_WIDTH <= console.width
        table.add_column(Text(shown.columns[0]), overflow="fold")
        for column in shown.columns[1:]:
            justify: JustifyMethod = "left" if shown.text else "right"
            table.add_column(Text(column), justify=justify, overflow="fold", no_wrap=figures_fit)
        for row in shown.rows:
            table.add_row(*map(Text, row))  # Text, because brackets must not be read as markup
        console.print(table if shown.rows else title, soft_wrap=False)
        if shown.note:
            console.print(shown.note, style="dim", markup=False)
        console.print()


def _measure_figures(table: ReportTable) -> int:
    """Measure the width of a printed table without the names of its rows, with two spaces before each figure."""
    columns = list(zip(table.columns, *table.rows, strict=True))[1:]
    return sum(2 + max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns)
