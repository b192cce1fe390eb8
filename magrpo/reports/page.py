"""The blocks of reports, and pages made of them: single HTML files that load nothing from elsewhere."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from rich.console import Console
from rich.text import Text

from magrpo.algo.repetition import Span
from magrpo.reports.charts import Panel, render_svg
from magrpo.reports.health import Finding, list_advice, list_warnings
from magrpo.reports.tables import ReportTable
from magrpo.reports.verdict import Verdict
from magrpo.text import fence_text


@dataclass(frozen=True, slots=True)
class Banner:
    """The verdict at the top of a page: its word, a sentence, findings that the return hides, and next steps."""

    kind: ClassVar = "banner"
    title: str
    word: str
    sentence: str
    advice: str = ""
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Headline figures, each a name, a value and a remark."""

    kind: ClassVar = "facts"
    title: str
    facts: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Pictures:
    """Panels drawn in the page."""

    kind: ClassVar = "pictures"
    title: str
    panels: Sequence[Panel]
    note: str = ""


@dataclass(frozen=True, slots=True)
class ShownText:
    """An agent's completion. ``remark``: says if it was cut or copied; ``copied``: parts that occur in its prompt."""

    agent: str
    text: str
    remark: str = ""
    copied: Sequence[Span] = ()


@dataclass(frozen=True, slots=True)
class Exhibit:
    """Completions for one problem: a table of the reward, and the text of every agent on each side (before, after)."""

    title: str
    problem: str
    reward: ReportTable
    sides: Mapping[str, Sequence[ShownText]]
    is_code: bool
    """Whether the problem and the texts are Python, to be highlighted."""
    prompts: Mapping[str, str]
    """Prompt of each agent, by its name."""


@dataclass(frozen=True, slots=True)
class Exhibits:
    """Several exhibits."""

    kind: ClassVar = "exhibits"
    title: str
    exhibits: Sequence[Exhibit]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Preformatted text."""

    kind: ClassVar = "listing"
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Terms:
    """Names with their explanations: words and meanings, or, if ``code``, purposes and commands."""

    kind: ClassVar = "terms"
    title: str
    terms: Sequence[tuple[str, str]]
    code: bool = False


Block = ReportTable | Banner | Facts | Pictures | Exhibits | Listing | Terms
"""A part of a page. Its ``kind`` names the macro of ``page.html.j2`` that renders it."""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A block under a heading that states its finding; the table of contents lists the block's title.

    A ``folded`` section opens at a click.
    """

    block: Block
    finding: str = ""
    folded: bool = False

    @property
    def heading(self) -> str:
        return self.finding or self.block.title


def make_banner(verdict: Verdict, findings: Sequence[Finding]) -> Banner:
    """Build the banner of a verdict, with the findings that the return hides."""
    sentence = verdict.sentence.removeprefix(f"{verdict.word}: ")
    advice = "; ".join(list_advice(findings, verdict.advice))
    return Banner(
        title="Verdict",
        word=verdict.word,
        sentence=_capitalize(sentence),
        advice=f"What to do: {advice}." if advice else "",
        warnings=[_capitalize(warning) for warning in list_warnings(findings, verdict.sentence)],
    )


def _capitalize(sentence: str) -> str:
    return f"{sentence[0].upper()}{sentence[1:]}."


def write_page(
    path: Path, title: str, parts: Sequence[Block | PageSection], lead: str = "", width: str = "72rem"
) -> None:
    """Write an HTML page to ``path``, at most ``width`` wide, with ``lead`` below the title."""
    sections = [part if isinstance(part, PageSection) else PageSection(part) for part in parts]
    page = render_template("page.html.j2", title=title, sections=sections, lead=lead, width=width)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def render_template(name: str, **values: object) -> str:
    """Fill in a template beside this module. HTML escapes every text, because completions may hold anything."""
    return _ENVIRONMENT.get_template(name).render(values).lstrip()


def print_banners(banners: Sequence[Banner], console: Console) -> None:
    """Print verdicts: the word and the sentence of each, then the next steps."""
    for banner in banners:
        style = {"better": "bold green", "worse": "bold red"}.get(banner.word, "bold")
        console.print(Text.assemble((banner.word, style), ": ", banner.sentence))
    for advice in dict.fromkeys(banner.advice for banner in banners if banner.advice):
        console.print(advice, style="dim", markup=False)


def _highlight_python(text: str) -> Markup:
    """Render Python as HTML, with its tokens in elements of Pygments' classes."""
    return Markup(highlight(text, PythonLexer(stripnl=False, ensurenl=False), HtmlFormatter(nowrap=True)))


def _mark_spans(text: str, spans: Sequence[Span]) -> Markup:
    """Render the text as HTML with some of its parts marked."""
    pieces, end = [], 0
    for start, stop in spans:
        pieces += [escape(text[end:start]), Markup("<mark>{}</mark>").format(text[start:stop])]
        end = stop
    return Markup("").join([*pieces, escape(text[end:])])


def _dump_json(value: object) -> str:
    """Dump JSON with non-ASCII text as it is; for texts, lists and dictionaries the result is also Python."""
    return json.dumps(value, ensure_ascii=False)


def _split_interval(cell: str) -> tuple[str, str]:
    """Split ``1.0 [0.9, 1.1]`` into ``1.0`` and ``[0.9, 1.1]``; the second is empty if there is no interval."""
    found = re.fullmatch(r"(.*) (\[[^\]]*\])", cell, re.DOTALL)
    return (found[1], found[2]) if found else (cell, "")


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html.j2"], default_for_string=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters.update(
    fence=fence_text, json=_dump_json, quote=shlex.quote, highlight=_highlight_python, mark=_mark_spans
)
# Looked up when a page is written, so that tests can leave out the drawing.
_ENVIRONMENT.globals.update(render_svg=lambda *args: render_svg(*args), split_interval=_split_interval)
