"""Blocks of reports, and pages of them: one HTML file that loads nothing from anywhere, and its twin in Markdown."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from magrpo.reports.charts import Panel, render_svg


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table under its title; the first column names the row. ``text``: the other columns hold words, not figures."""

    kind: ClassVar = "table"
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The headline figures: each a name, a value and a remark."""

    kind: ClassVar = "facts"
    title: str
    facts: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Pictures:
    """Panels drawn in the page; Markdown shows the file ``image`` beside it, if there is one."""

    kind: ClassVar = "pictures"
    title: str
    panels: Sequence[Panel]
    image: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """Completions for one problem: a table of the reward, and for each side (before, after) every agent's text."""

    title: str
    problem: str
    reward: ReportTable
    sides: Mapping[str, Sequence[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Exhibits:
    """Several exhibits; if ``folded``, each opens at a click."""

    kind: ClassVar = "exhibits"
    title: str
    exhibits: Sequence[Exhibit]
    note: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """Preformatted text, folded away."""

    kind: ClassVar = "listing"
    title: str
    text: str


Block = ReportTable | Facts | Pictures | Exhibits | Listing
"""A part of a page. Its ``kind`` names the macro of ``page.html.j2`` and ``page.md.j2`` that renders it."""


def write_page(path: Path, title: str, blocks: Sequence[Block], lead: str = "", width: str = "72rem") -> list[Path]:
    """Write ``path.html``, at most ``width`` wide, and ``path.md``; returns both. ``lead`` stands below the title."""
    paths = [path.with_name(f"{path.name}.{form}") for form in ("html", "md")]
    for written in paths:
        page = render_template(f"page{written.suffix}.j2", title=title, blocks=blocks, lead=lead, width=width)
        written.write_text(page, encoding="utf-8")
    return paths


def render_template(name: str, **values: object) -> str:
    """A template beside this module, filled in. HTML escapes every text: completions are whatever a model wrote."""
    return _ENVIRONMENT.get_template(name).render(values).lstrip()


def print_tables(tables: Sequence[ReportTable], console: Console) -> None:
    """Print tables with their titles and notes."""
    for shown in tables:
        table = Table(box=box.SIMPLE_HEAD, title=shown.title, title_justify="left", title_style="bold")
        for index, column in enumerate(shown.columns):
            table.add_column(column, justify="left" if shown.text or index == 0 else "right", overflow="fold")
        for row in shown.rows:
            table.add_row(*map(Text, row))  # Text: brackets in cells are not markup
        console.print(table if shown.rows else f"[bold]{shown.title}[/bold]")
        if shown.note:
            console.print(shown.note, style="dim", markup=False)
        console.print()


def _fence(text: str) -> str:
    """The text as a code block of Markdown, its fence longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _dump_json(value: object) -> str:
    """JSON with texts as they are written; of texts, lists and dictionaries it is Python, too."""
    return json.dumps(value, ensure_ascii=False)


def _split_interval(cell: str) -> tuple[str, str]:
    """``1.0 [0.9, 1.1]`` as ``1.0`` and ``[0.9, 1.1]``; the second is empty if there is none."""
    found = re.fullmatch(r"(.*) (\[[^\]]*\])", cell, re.DOTALL)
    return (found[1], found[2]) if found else (cell, "")


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html.j2"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters.update(fence=_fence, json=_dump_json, quote=shlex.quote)
_ENVIRONMENT.globals.update(render_svg=render_svg, split_interval=_split_interval)
