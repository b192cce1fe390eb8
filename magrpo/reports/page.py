"""A page of blocks under their titles: one file of HTML that loads nothing from anywhere, and the same as Markdown.

Every text is escaped: completions are whatever a model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Protocol

from magrpo.reports.charts import Panel, svg
from magrpo.reports.tables import Section

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --dim: #5f5f5f; --line: #e6e6e6; --rule: #8a8a8a; --paper: #fff;
  --soft: #f5f6f8; --link: #0072b2; --series-0: #0072b2; --series-1: #e69f00; --series-2: #009e73; --series-3: #d55e00;
  --series-4: #cc79a7; --series-5: #56b4e9 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --dim: #a3a3a3; --line: #33363b; --rule: #777;
  --paper: #17191c; --soft: #202328; --link: #6cb8ea; --series-0: #4aa8e0; --series-1: #f0b429; --series-2: #2cc296;
  --series-3: #f0803c; --series-4: #e29bc2; --series-5: #8fd0f5 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: var(--width);
  margin: 2rem auto 4rem; padding: 0 1rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2.6rem 0 .6rem }
h3 { font-size: 1rem; margin: 1.8rem 0 .4rem } h4 { margin: .8rem 0 .2rem; font-size: .95rem }
p { margin: .4rem 0; color: var(--dim); max-width: 52rem } a { color: var(--link) }
nav { margin: .8rem 0 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem 0 .3rem 1.4rem; text-align: right; vertical-align: top; white-space: nowrap }
th { border-bottom: 1px solid var(--rule); font-weight: 600; vertical-align: bottom }
td { border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0;
  background: var(--paper) }
.text th, .text td { text-align: left }
.text td { white-space: normal; overflow-wrap: anywhere; min-width: 6rem } .text td:first-child { white-space: nowrap }
.range { color: var(--dim) } .many .range { display: block; font-size: .87rem }
.many th { white-space: normal } .many th, .many td { padding-left: .9rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: .8rem; margin: 1rem 0 }
dl div { background: var(--soft); border-radius: .4rem; padding: .7rem .9rem }
dt { color: var(--dim); font-size: .87rem } dd { margin: 0 }
dd.value { font-size: 1.25rem; font-weight: 600; white-space: nowrap; font-variant-numeric: tabular-nums }
dd.note { color: var(--dim); font-size: .87rem; font-variant-numeric: tabular-nums }
.panels, .sides { display: grid; gap: 1rem 1.6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) }
figure { margin: .4rem 0; max-width: 37rem }
figcaption { font-weight: 600 } svg { width: 100%; height: auto; display: block }
svg text { font-family: system-ui, sans-serif !important }
pre { background: var(--soft); border-radius: .4rem; padding: .6rem .8rem; margin: .2rem 0 .7rem; overflow-x: auto;
  font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.sides > div { min-width: 0 } .who { color: var(--dim); font-size: .87rem }
summary { cursor: pointer; color: var(--link) } h3, summary { overflow-wrap: anywhere }
@media (max-width: 40rem) { .range { display: block; font-size: .87rem } th { white-space: normal }
  th, td { padding-left: .9rem } }
"""


class Block(Protocol):
    """A part of a page."""

    @property
    def title(self) -> str: ...

    def html(self) -> Iterator[str]:
        """Its lines below the title, everything escaped."""
        ...

    def markdown(self) -> Iterator[str]:
        """Its lines below the title."""
        ...


def write_page(path: Path, title: str, blocks: Sequence[Block], lead: str = "", width: str = "72rem") -> list[Path]:
    """Write the blocks as ``path`` with the endings ``.html`` and ``.md``, see :func:`page`; returns both paths."""
    texts = {".html": page(title, blocks, lead, width), ".md": markdown(title, blocks, lead)}
    paths = [path.with_name(path.name + ending) for ending in texts]
    for written, text in zip(paths, texts.values(), strict=True):
        written.write_text(text, encoding="utf-8")
    return paths


def page(title: str, blocks: Sequence[Block], lead: str = "", width: str = "72rem") -> str:
    """The blocks as one file of HTML, at most ``width`` wide; ``lead`` stands below the title."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}:root {{ --width: {width} }}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *([f"<p>{escape(lead)}</p>"] if lead else []),
            "<nav>",
            *(f'<a href="#part-{number}">{escape(block.title)}</a>' for number, block in enumerate(blocks)),
            "</nav>",
            *(line for number, block in enumerate(blocks) for line in _section(number, block)),
            "</body></html>\n",
        ]
    )


def _section(number: int, block: Block) -> Iterator[str]:
    yield f'<section id="part-{number}"><h2>{escape(block.title)}</h2>'
    yield from block.html()
    yield "</section>"


def markdown(title: str, blocks: Sequence[Block], lead: str = "") -> str:
    """The blocks as Markdown."""
    lines = [f"# {title}", *(["", lead] if lead else [])]
    for block in blocks:
        lines += ["", f"## {block.title}", "", *block.markdown()]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is to be seen first: each a name, a value and a remark."""

    title: str
    facts: Sequence[tuple[str, str, str]]

    def html(self) -> Iterator[str]:
        yield "<dl>"
        for name, value, remark in self.facts:
            cells = f'<dt>{escape(name)}</dt><dd class="value">{escape(value)}</dd>'
            yield f'<div>{cells}<dd class="note">{escape(remark)}</dd></div>'
        yield "</dl>"

    def markdown(self) -> Iterator[str]:
        for name, value, remark in self.facts:
            yield f"- {name}: **{value}**{f' ({remark})' if remark else ''}"


@dataclass(frozen=True, slots=True)
class Pictures:
    """Panels drawn in the page; Markdown shows the file ``image`` beside it, if there is one."""

    title: str
    panels: Sequence[Panel]
    image: str = ""
    note: str = ""

    def html(self) -> Iterator[str]:
        yield '<div class="panels">'
        for number, panel in enumerate(self.panels):
            drawn = svg(panel, f"{self.title} {number}")
            yield f"<figure><figcaption>{escape(panel.title)}</figcaption>{drawn}</figure>"
        yield "</div>"
        if self.note:
            yield f"<p>{escape(self.note)}</p>"

    def markdown(self) -> Iterator[str]:
        yield f"![{self.title}]({self.image})" if self.image else "Drawn in the page of HTML."
        if self.note:
            yield from ("", self.note)


@dataclass(frozen=True, slots=True)
class Exhibit:
    """What was written on one problem: its worth as a table, and for each side what every agent wrote."""

    title: str
    problem: str
    worth: Section
    sides: Mapping[str, Sequence[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Exhibits:
    """Several exhibits; with ``folded`` each opens at a click."""

    title: str
    exhibits: Sequence[Exhibit]
    note: str = ""
    folded: bool = False

    def html(self) -> Iterator[str]:
        if self.note:
            yield f"<p>{escape(self.note)}</p>"
        for exhibit in self.exhibits:
            title = escape(exhibit.title)
            yield f"<details><summary>{title}</summary>" if self.folded else f"<h3>{title}</h3>"
            yield f'<div class="who">problem</div><pre>{escape(exhibit.problem)}</pre>'
            yield from exhibit.worth.html()
            yield '<div class="sides">'
            for name, texts in exhibit.sides.items():
                yield f"<div><h4>{escape(name)}</h4>"
                for agent, text in texts:
                    yield f'<div class="who">{escape(agent)}</div><pre>{escape(text)}</pre>'
                yield "</div>"
            yield "</div></details>" if self.folded else "</div>"

    def markdown(self) -> Iterator[str]:
        yield self.note
        for exhibit in self.exhibits:
            yield from ("", f"### {exhibit.title}", "", *_fenced(exhibit.problem), "", *exhibit.worth.markdown())
            for name, texts in exhibit.sides.items():
                for agent, text in texts:
                    yield from ("", f"{name}, {agent}:", "", *_fenced(text))


@dataclass(frozen=True, slots=True)
class Listing:
    """A text in a fixed pitch, folded away."""

    title: str
    text: str

    def html(self) -> Iterator[str]:
        yield f"<details><summary>show</summary><pre>{escape(self.text)}</pre></details>"

    def markdown(self) -> Iterator[str]:
        yield from _fenced(self.text)


def _fenced(text: str) -> tuple[str, str, str]:
    """The text as a block of code; its fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return fence, text, fence
