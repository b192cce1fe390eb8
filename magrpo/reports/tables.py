"""Tables with a title, shown on a terminal or as a block of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_MANY = 6
"""With more columns an interval stands below its mean."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table under its title; the first column names the row. ``text``: the others hold words, not figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: bool = False

    def html(self) -> Iterator[str]:
        """The lines of :class:`magrpo.reports.page.Block`."""
        if self.rows:
            head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
            kind = "text" if self.text else "many" if len(self.columns) > _MANY else "few"
            yield f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>'
            for row in self.rows:
                yield f"<tr>{''.join(f'<td>{_html_cell(cell)}</td>' for cell in row)}</tr>"
            yield "</tbody></table></div>"
        if self.note:
            yield f"<p>{escape(self.note)}</p>"

    def markdown(self) -> Iterator[str]:
        """The lines of :class:`magrpo.reports.page.Block`."""
        if self.rows:
            right = ":---" if self.text else "---:"
            yield _line(self.columns)
            yield f"|:---|{f'{right}|' * (len(self.columns) - 1)}"
            yield from map(_line, self.rows)
        if self.note:
            yield from [""] * bool(self.rows) + [self.note]


def show(sections: Sequence[Section], console: Console) -> None:
    """Print every section as a table."""
    for section in sections:
        table = Table(box=box.SIMPLE_HEAD, title=section.title, title_justify="left", title_style="bold")
        for index, column in enumerate(section.columns):
            table.add_column(column, justify="left" if section.text or index == 0 else "right", overflow="fold")
        for row in section.rows:
            table.add_row(*map(Text, row))  # figures in brackets are no markup
        if section.rows:
            console.print(table)
        else:
            console.print(f"[bold]{section.title}[/bold]")
        if section.note:
            console.print(section.note, style="dim", markup=False)
        console.print()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _html_cell(cell: str) -> str:
    if cell.startswith(("http://", "https://")):
        return f'<a href="{escape(cell)}">{escape(cell)}</a>'
    return re.sub(r" (\[[^\]]*\])$", r' <span class="range">\1</span>', escape(cell))
