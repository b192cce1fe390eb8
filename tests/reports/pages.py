"""Reports of a run that was never made: two evaluations of four problems, whose last texts attack the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

from magrpo.config.run import RunConfig
from magrpo.reports.budget import Budget
from magrpo.reports.run import RunReport
from magrpo.run.store import RunStore
from magrpo.stages.evaluate import summarise_rows
from magrpo.types import AnswerStats, EvalReport, EvalRow, Mode, Problem, Split

CONFIG = Path(__file__).parents[2] / "pipelines" / "configs" / "embedded.toml"
ATTACK = '</pre><script>alert("x")</script><img src=x onerror=alert(1)>'
IDS = [f"{split}/{name}" for split in ("test", "ood") for name in "abcdef"]
PROBLEMS = {task_id: Problem(task_id, f"def {task_id[-1]}(xs): ...", entry_point=task_id[-1]) for task_id in IDS}

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page, whose elements must be closed in order: what it loads, its text, its headings, its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.loaded: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        """Rows of cells, the first of them names of columns, of the tables under each heading."""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset"):
                self.loaded.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self.headings.append("")
        elif tag == "tr":
            self.tables.setdefault(self.headings[-1], []).append([])
        elif tag in ("th", "td"):
            self.tables[self.headings[-1]][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.headings[-1] += data
        elif {"th", "td"}.intersection(self.open):
            self.tables[self.headings[-1]][-1][-1] += data


def row(name: str, tests: float, cooperation: float, *, index: int = 0, split: Split = "test", mode: Mode = "sampled",
        text: str = "def aux(): ...") -> EvalRow:  # fmt: skip
    """A row of one turn with full marks for structure and syntax, which passes if ``tests`` is 1."""
    parts = {"structure": 1.0, "syntax": 0.5, "tests": tests, "cooperation": cooperation}
    texts = {"helper": text, "main": f"main of {name}"}
    answers = {agent: AnswerStats(9, False, 0.0, 0.0, 0.0) for agent in texts}
    total, passed = sum(parts.values()), tests == 1
    return EvalRow(f"{split}/{name}", split, mode, index, (total,), (parts,), (passed,), texts, answers, 18)


def evaluation(config: RunConfig, version: int, worth: Mapping[str, tuple[float, float]], text: str = "") -> EvalReport:
    """Two equal trajectories of each problem in each split; ``worth``: its tests and its cooperation."""
    rows = tuple(
        row(name, *worth[name], index=index, split=split, mode=mode, text=text)
        for split in ("test", "ood")
        for mode, count in (("sampled", 2), ("greedy", 1))
        for name in worth
        for index in range(count)
    )
    return EvalReport(version, rows, summarise_rows(rows, config.reward, 0))


def make_reports(config: RunConfig) -> list[EvalReport]:
    """Problem a gains everything, b only cooperation, c nothing, d loses; all that is written in the end attacks."""
    before = {"a": (0.0, 0.0), "b": (0.5, 0.0), "c": (1.0, 1.5), "d": (0.5, 0.5)}
    after = {"a": (1.0, 1.5), "b": (0.5, 1.5), "c": (1.0, 1.5), "d": (0.0, 0.0)}
    return [evaluation(config, 0, before), evaluation(config, 5, after, ATTACK)]


METRICS = [
    (i, "update", {"update/helper/entropy": 1.0 / i, "update/never_heard_of": 10.0 * i, "time/update_s": 2.0})
    for i in range(1, 6)
]
BUDGETS = [Budget(), *(Budget(i, 100 * i, 10 * i, i, i, 2.0 * i) for i in range(1, 6))]


def make_report(config: RunConfig, reports: Sequence[EvalReport], budgets: list[Budget]) -> RunReport:
    report = RunReport(RunStore(Path(), "first"), config, list(reports))
    report.budgets, report.problems = budgets, PROBLEMS
    report.stage_metrics = METRICS if len(budgets) > 1 else []
    return report
