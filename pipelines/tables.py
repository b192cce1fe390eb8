"""Tables with a title, shown on a terminal, in Markdown and in a page of HTML that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: var(--width); margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem }
p { margin: .4rem 0; color: #555 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem 1.1rem .3rem 0; text-align: right; vertical-align: top; white-space: nowrap }
th { border-bottom: 1px solid #8a8a8a; font-weight: 600 } td { border-bottom: 1px solid #e6e6e6 }
th:first-child, td:first-child, .text th, .text td { text-align: left }
.text td { white-space: normal; overflow-wrap: anywhere }
.text td:first-child { white-space: nowrap }
img { width: 100%; max-width: 900px; display: block; margin: 1rem 0 }
a { color: #0072B2 }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A table under its title; the first column names the row. ``text``: the others hold words, not figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: bool = False


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


def markdown(title: str, sections: Sequence[Section], picture: Path | None = None) -> str:
    """The sections as Markdown; ``picture`` is linked beside the text."""
    lines = [f"# {title}", *([] if picture is None else ["", f"![learning curves]({picture.name})"])]
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        if section.rows:
            right = ":---" if section.text else "---:"
            lines += [_line(section.columns), f"|:---|{f'{right}|' * (len(section.columns) - 1)}"]
            lines += [_line(row) for row in section.rows]
        if section.note:
            lines += [""] * bool(section.rows) + [section.note]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(title: str, sections: Sequence[Section], picture: Path | None = None, width: str = "62rem") -> str:
    """The sections as one file of HTML, at most ``width`` wide, with the picture (PNG), if there is one, in it."""
    data = None if picture is None else base64.b64encode(picture.read_bytes()).decode()
    shown = () if data is None else (f'<img src="data:image/png;base64,{data}" alt="learning curves of the runs">',)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>:root {{ --width: {width} }}{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *shown,
            *(line for section in sections for line in _html(section)),
            "</body></html>\n",
        ]
    )


def _html(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    if section.rows:
        head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
        yield f'<div class="wide"><table{" class=text" * section.text}><thead><tr>{head}</tr></thead><tbody>'
        for row in section.rows:
            yield f"<tr>{''.join(f'<td>{_html_cell(cell)}</td>' for cell in row)}</tr>"
        yield "</tbody></table></div>"
    if section.note:
        yield f"<p>{escape(section.note)}</p>"


def _html_cell(cell: str) -> str:
    if cell.startswith(("http://", "https://")):
        return f'<a href="{escape(cell)}">{escape(cell)}</a>'
    return escape(cell)
