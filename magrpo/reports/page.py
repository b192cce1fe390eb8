"""Pages of blocks under their titles: one HTML file that loads nothing from anywhere, and its twin in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from magrpo.reports.charts import Panel, render_svg
from magrpo.reports.tables import ReportTable


class Block(Protocol):
    """A part of a page."""

    kind: ClassVar[str]
    """Names the macro of ``page.html.j2`` that renders it."""

    @property
    def title(self) -> str: ...

    def markdown_lines(self) -> Iterator[str]:
        """Its lines below the title."""
        ...


def write_page(path: Path, title: str, blocks: Sequence[Block], lead: str = "", width: str = "72rem") -> list[Path]:
    """Write ``path.html`` (see :func:`render_html`) and ``path.md``; returns both paths."""
    texts = {".html": render_html(title, blocks, lead, width), ".md": render_markdown(title, blocks, lead)}
    paths = [path.with_name(path.name + ending) for ending in texts]
    for written, text in zip(paths, texts.values(), strict=True):
        written.write_text(text, encoding="utf-8")
    return paths


def render_html(title: str, blocks: Sequence[Block], lead: str = "", width: str = "72rem") -> str:
    """The blocks as one HTML file, at most ``width`` wide; ``lead`` stands below the title.

    Jinja escapes every text: completions are whatever a model wrote.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(render_svg=render_svg, split_interval=_split_interval)
    page = environment.get_template("page.html.j2")
    return page.render(title=title, blocks=blocks, lead=lead, width=width).lstrip() + "\n"


def render_markdown(title: str, blocks: Sequence[Block], lead: str = "") -> str:
    """The blocks as Markdown."""
    lines = [f"# {title}", *(["", lead] if lead else [])]
    for block in blocks:
        lines += ["", f"## {block.title}", "", *block.markdown_lines()]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Facts:
    """The headline figures: each a name, a value and a remark."""

    kind: ClassVar = "facts"
    title: str
    facts: Sequence[tuple[str, str, str]]

    def markdown_lines(self) -> Iterator[str]:
        for name, value, remark in self.facts:
            yield f"- {name}: **{value}**{f' ({remark})' if remark else ''}"


@dataclass(frozen=True, slots=True)
class Pictures:
    """Panels drawn in the page; Markdown shows the file ``image`` beside it, if there is one."""

    kind: ClassVar = "pictures"
    title: str
    panels: Sequence[Panel]
    image: str = ""
    note: str = ""

    def markdown_lines(self) -> Iterator[str]:
        yield f"![{self.title}]({self.image})" if self.image else "Drawn in the page of HTML."
        if self.note:
            yield from ("", self.note)


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

    def markdown_lines(self) -> Iterator[str]:
        yield self.note
        for exhibit in self.exhibits:
            yield from ("", f"### {exhibit.title}", "", *_fence(exhibit.problem), "", *exhibit.reward.markdown_lines())
            for name, texts in exhibit.sides.items():
                for agent, text in texts:
                    yield from ("", f"{name}, {agent}:", "", *_fence(text))


@dataclass(frozen=True, slots=True)
class Listing:
    """Preformatted text, folded away."""

    kind: ClassVar = "listing"
    title: str
    text: str

    def markdown_lines(self) -> Iterator[str]:
        yield from _fence(self.text)


def _fence(text: str) -> tuple[str, str, str]:
    """The text as a code block, its fence longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return fence, text, fence


def _split_interval(cell: str) -> tuple[str, str]:
    """``1.0 [0.9, 1.1]`` as ``1.0`` and ``[0.9, 1.1]``; the second is empty if there is none."""
    found = re.fullmatch(r"(.*) (\[[^\]]*\])", cell, re.DOTALL)
    return (found[1], found[2]) if found else (cell, "")
