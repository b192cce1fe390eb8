"""Tables with a title, printed on a terminal or shown as a block of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_MANY_COLUMNS = 6
"""Wider tables show an interval below its mean."""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table under its title; the first column names the row. ``text``: the other columns hold words, not figures."""

    kind: ClassVar = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: bool = False

    @property
    def layout(self) -> Literal["text", "many", "few"]:
        """The table's class in the style sheet."""
        return "text" if self.text else "many" if len(self.columns) > _MANY_COLUMNS else "few"

    def markdown_lines(self) -> Iterator[str]:
        """As :meth:`magrpo.reports.page.Block.markdown_lines`."""
        if self.rows:
            alignment = ":---" if self.text else "---:"
            yield _markdown_row(self.columns)
            yield f"|:---|{f'{alignment}|' * (len(self.columns) - 1)}"
            yield from map(_markdown_row, self.rows)
        if self.note:
            yield from [""] * bool(self.rows) + [self.note]


def print_tables(tables: Sequence[ReportTable], console: Console) -> None:
    """Print tables with their titles and notes."""
    for shown in tables:
        table = Table(box=box.SIMPLE_HEAD, title=shown.title, title_justify="left", title_style="bold")
        for index, column in enumerate(shown.columns):
            table.add_column(column, justify="left" if shown.text or index == 0 else "right", overflow="fold")
        for row in shown.rows:
            table.add_row(*map(Text, row))  # Text: brackets in cells are not markup
        if shown.rows:
            console.print(table)
        else:
            console.print(f"[bold]{shown.title}[/bold]")
        if shown.note:
            console.print(shown.note, style="dim", markup=False)
        console.print()


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
