"""Shows the answers of ``magrpo ask``: agents side by side, tests and parts of the reward; or everything as JSON."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from magrpo.asking.answers import Answer
from magrpo.asking.problems import writes_programs
from magrpo.interfaces import Reward
from magrpo.reports.figures import quantity_title
from magrpo.text import format_count, make_printable
from magrpo.types import PENALTY, PENDING, Action, ExecutionReport, Problem, TrajectoryStep

_COLUMN = 36
"""Narrowest column, in characters, for an agent's text beside another."""
_NUM_FAILURES = 3
_HOW_TO_RAISE = "an answer was cut off: allow more tokens with --set rollout.max_new_tokens=N, here and in training"
_CANDIDATE = re.compile(r"\bcandidate\b")
_THEME = "ansi_dark"


class AnswerView:
    """Shows the answers of teams to one problem on a console.

    ``reward`` scores the answers; ``author`` is the agent that writes the function a problem asks for.
    """

    def __init__(self, console: Console, reward: Reward, author: str) -> None:
        self._console, self._reward, self._author = console, reward, author

    def show_problem(self, problem: Problem) -> None:
        """Print the problem's id and prompt."""
        self._console.print(Text(problem.task_id, style="bold"))
        self._console.print(self._highlight(problem.prompt))

    def show_heading(self, title: str) -> None:
        """Print the title of the answer that follows."""
        self._console.print(Text(f"\n{title}", style="bold"))

    def show_remark(self, text: str) -> None:
        """Print a remark that helps to read the answers."""
        self._console.print(Text(f"\n{text}", style="dim"), soft_wrap=not self._console.is_terminal)

    def show_prompts(self, prompts: Mapping[str, str]) -> None:
        """Print the prompt that each agent read, as its model saw it."""
        for agent, prompt in prompts.items():
            self._console.print(Text(f"\nprompt of {agent}", style="bold"))
            self._console.print(Text(make_printable(prompt)))

    def show_turn(self, answer: Answer, num_turns: int) -> None:
        """Print the texts of the answer's last turn and, if programs ran, the tests they passed."""
        step = answer.steps[-1]
        turn = len(answer.steps)
        name = f", turn {turn} of {num_turns}" if num_turns > 1 else ""
        titled = {f"{title}{name}": action for title, action in title_actions(step).items()}
        cut_at = {title: len(one.token_ids) for title, one in titled.items() if one.finish_reason == "length"}
        texts = {title: action.text for title, action in titled.items()}
        self._console.print(self._arrange(texts, cut_at))
        if cut_at:
            self._console.print(Text(_HOW_TO_RAISE, style="yellow"), soft_wrap=not self._console.is_terminal)
        summary, *failures = self._describe_outcome(answer)
        if summary:
            self._console.print(Text(summary), soft_wrap=not self._console.is_terminal)
        for line in failures:
            self._console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))

    def show_comparison(self, answers: Mapping[str, Answer]) -> None:
        """Print the joined program of the first answer, and the parts of the reward of all answers, by title."""
        first = next(iter(answers.values()))
        if first.program:
            self._console.print(Text("\njoined program", style="bold"))
            self._console.print(self._highlight(first.program))
        if not any(answer.reward.parts for answer in answers.values()):
            return
        table = Table("reward", box=None, padding=(0, 2, 0, 0), header_style="bold")
        for title in ("at most", *answers):
            table.add_column(title, justify="right")
        maxima = dict(self._reward.maxima)
        if any(PENALTY in answer.reward.parts for answer in answers.values()):
            maxima.setdefault(PENALTY, 0.0)
        for part, top in maxima.items():
            table.add_row(quantity_title(part), f"{top:.2f}", *(_show_part(one, part) for one in answers.values()))
        totals = [_show_return(answer, self._reward) for answer in answers.values()]
        table.add_row("return", "100 %", *totals, style="bold")
        self._console.print()
        self._console.print(table)

    def _describe_outcome(self, answer: Answer) -> list[str]:
        """Describe the tests in one line, then each of the first failures in another."""
        if answer.unmeasured:
            return [answer.unmeasured]
        report = answer.report
        if report is None:
            return [answer.explain_missing_program(self._author)] if writes_programs(self._reward) else [""]
        name = answer.problem.entry_point or "candidate"
        failures = [case for case in report.cases if case.status != "pass"]
        lines = [f"{case.status}: {_CANDIDATE.sub(name, case.message)}" for case in failures[:_NUM_FAILURES]]
        more = [f"and {len(failures) - _NUM_FAILURES} more"] if len(failures) > _NUM_FAILURES else []
        passed = f"{report.tests_passed} of {format_count(report.tests_total, 'tests')} passed"
        return [passed, *map(make_printable, lines), *more]

    def _highlight(self, text: str) -> RenderableType:
        """Render a program with its syntax coloured on a terminal, any other text wrapped between words."""
        text = make_printable(text.strip("\n"))
        if writes_programs(self._reward) and self._console.is_terminal:
            return Syntax(text, "python", theme=_THEME, background_color="default", word_wrap=True)
        return Text(text)

    def _arrange(self, texts: Mapping[str, str], cut_at: Mapping[str, int]) -> RenderableType:
        """Arrange texts by title: side by side where the terminal is wide enough, else one below the other.

        ``cut_at``: for texts that were cut, their number of tokens, by title.
        """
        marks = {title: [Text(f"[cut at {tokens} tokens]", "yellow")] for title, tokens in cut_at.items()}
        if not self._console.is_terminal:
            lines: list[Text] = []
            for title, text in texts.items():
                lines += [Text(f"[{title}]\n{make_printable(text)}"), *marks.get(title, [])]
            return Group(*lines)
        panels = [
            Panel(Group(self._highlight(text), *marks.get(title, [])), title=title, title_align="left")
            for title, text in texts.items()
        ]
        per_row = max(1, min(len(panels), self._console.width // _COLUMN))
        rows = Table.grid(expand=True)
        for _ in range(per_row):
            rows.add_column(ratio=1)
        for start in range(0, len(panels), per_row):
            rows.add_row(*panels[start : start + per_row])
        return rows


def title_actions(step: TrajectoryStep) -> dict[str, Action]:
    """The completions of a turn by agent; numbered if a program asked an agent several times: ``coder, call 2``."""
    asked = Counter(agent for agent, _ in step.all_actions)
    numbers: Counter[str] = Counter()
    titled = {}
    for agent, action in step.all_actions:
        numbers[agent] += 1
        suffix = f", call {numbers[agent]}" if asked[agent] > 1 else ""
        titled[f"{agent}{suffix}"] = action
    return titled


def answer_as_json(answer: Answer, reward: Reward) -> dict[str, Any]:
    """Return an answer as plain JSON values; ``return`` is a fraction of the maximum."""
    is_measured = not answer.unmeasured
    report = answer.report
    return {
        "texts": answer.texts,
        "turns": [{title: one.text for title, one in title_actions(step).items()} for step in answer.steps],
        "cut_at": answer.cut_at,
        "program": answer.program or None,
        "tests": None if report is None else _report_as_json(report),
        "parts": answer.reward.parts if is_measured else None,
        "return": reward.fraction(answer.reward.total) if is_measured else None,
        "passed": reward.passed(answer.reports) if is_measured else None,
        "unmeasured": answer.unmeasured or None,
    }


def _report_as_json(report: ExecutionReport) -> dict[str, Any]:
    cases = [{"status": case.status, "message": case.message} for case in report.cases]
    return {"passed": report.tests_passed, "total": report.tests_total, "cases": cases}


def _show_part(answer: Answer, part: str) -> str:
    return f"{answer.reward.parts[part]:.2f}" if part in answer.reward.parts else "-"


def _show_return(answer: Answer, reward: Reward) -> str:
    measured = not answer.unmeasured and answer.reward != PENDING
    return f"{100 * reward.fraction(answer.reward.total):.0f} %" if measured else "-"
