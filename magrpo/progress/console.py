"""The console of a run: a live line on a terminal, and one line for each iteration and evaluation anywhere."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from statistics import median
from threading import RLock, get_ident
from time import monotonic
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Column
from rich.text import Text

from magrpo.interfaces import Progress as Advance
from magrpo.progress.activity import LOADING, Heartbeat, LogAbove, is_live, open_console
from magrpo.progress.state import RunState
from magrpo.reports.budget import format_count
from magrpo.reports.figures import quantity_title
from magrpo.reports.health import MAX_CUT_OFF
from magrpo.run.steps import TRAINING_STAGES, Step
from magrpo.types import Split

log = logging.getLogger(__name__)

_ACTIVITIES = {
    "prepare": "preparing",
    "start": "starting",
    "rollout": "sampling",
    "score": "scoring",
    "credit": "credit",
    "update": "updating",
    "evaluate": "evaluating",
    "baseline": "evaluating",
    "report": "reporting",
    "tables": "reporting",
}
_ITEMS = {
    "rollout": "completions",
    "score": "programs",
    "update": "completions",
    "evaluate": "completions",
    "baseline": "completions",
}
"""What a stage counts while it works."""
_PARTS = ("tests", "cooperation", "length_ratio", "style")
"""Parts of rewards shown in the line of an iteration: those that training changes most."""
_WORDS = 62
"""Columns for the words of the live line; the bar has what a terminal has more."""
_BAR = range(8, 30)
"""Columns that a bar can have."""
_NARROWEST = 48
"""Columns of a terminal below which there is no bar."""


@dataclass
class Work:
    """What is being done, since when, and how many items of it."""

    title: str
    step: Step | None = None
    items: str = ""
    num_done: int = 0
    total: int = 0
    """Items expected; 0 if unknown."""
    began: float = field(default_factory=lambda: monotonic())

    def __str__(self) -> str:
        """``sampling 24 of 64 completions, 5 s``."""
        expected = f" of {self.total}" if self.total else ""
        counted = f" {self.num_done}{expected} {self.items}" if self.num_done else ""
        return self._add_seconds(f"{self.title}{counted}")

    def describe_briefly(self) -> str:
        """``sampling, 5 s``."""
        return self._add_seconds(self.title)

    def _add_seconds(self, text: str) -> str:
        return f"{text}, {monotonic() - self.began:.0f} s"


class LiveLine(ProgressColumn):
    """The words of the live line, rendered again whenever it is shown: its seconds go on within a stage.

    ``list_works`` returns what is being done. The time left comes first; words that do not fit into ``width`` are left
    out.
    """

    max_refresh = 0.2

    def __init__(
        self, state: RunState, list_works: Callable[[], Sequence[Work]], time_left: Callable[[], str], width: int
    ) -> None:
        self._state, self._list_works, self._time_left, self._width = state, list_works, time_left, width
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))

    def render(self, task: Task) -> Text:
        state = self._state
        done = state.describe_done()
        training = "" if state.training_return is None else f"train {state.training_return:.0%}"
        held_out = [f"held-out {value:.0%}" for value in state.held_out_returns.values()][-1:]
        works, left = self._list_works(), self._time_left()
        work = " + ".join(map(str, works))
        briefly = " + ".join(each.describe_briefly() for each in works)
        for parts in (
            [left, done, work, training, *held_out],
            [left, done, work, *held_out],
            [left, done, work],
            [left, work],
            [left, briefly],
        ):
            text = " · ".join(filter(None, parts))
            if len(text) <= self._width:
                break
        return Text(text)


class RunConsole:
    """Notes the steps of a run in its state and shows them. Use as a context manager."""

    def __init__(self, state: RunState, console: Console | None = None) -> None:
        self.console = console or open_console()
        self.loading: dict[tuple[str, str], float] = {}
        """Seconds spent loading, by stage and by what was loaded."""
        self._state = state
        self._times: deque[float] = deque(maxlen=21)
        """When the first iteration that this process computes completely began, and when each one since ended."""
        self._metrics: dict[int, dict[str, float]] = defaultdict(dict)
        """Metrics so far of the iterations under way."""
        self._num_reused = 0
        self._idle = Work("starting")
        """Shown while no thread works on a step: the last work."""
        self._works: dict[int, Work] = {}
        """The work of each thread that computes a step, by the thread's id."""
        self._lock = RLock()
        self._alive = is_live(self.console)
        shares_terminal = self._alive and sys.stderr.isatty()
        self._log_above = LogAbove(self.console, shown=shares_terminal)
        spare = self.console.width - 3 - _WORDS  # a spinner, and spaces between the three
        bar_width = min(max(spare, _BAR[0]), _BAR[-1]) if self.console.width >= _NARROWEST else 0
        words_width = self.console.width - (bar_width + 3 if bar_width else 2)
        self._live = Progress(
            SpinnerColumn(),
            *([BarColumn(bar_width=bar_width)] if bar_width else []),
            LiveLine(state, self._list_works, self._time_left, words_width),
            console=self.console,
            transient=True,
            disable=not self._alive,
            redirect_stderr=shares_terminal,
        )
        self._bar = self._live.add_task("", total=state.num_iterations + state.num_rows + 1)  # the report is the last
        self._heartbeat = Heartbeat(self._say_work)

    def __enter__(self) -> RunConsole:
        self._live.start()
        if not self._alive:
            self._heartbeat.start()
        self._log_above.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._log_above.detach()
        self._heartbeat.stop()
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays; a terminal wraps it between words."""
        self._heartbeat.note_output()
        self.console.print(text, markup=False, soft_wrap=not self._alive)

    def start_step(self, step: Step) -> Advance:
        """``step`` is being computed; call the returned function with the number of items just finished."""
        with self._lock:
            self._state.start_step(step)
            if self._num_reused:
                self.say(self._state.describe_resumption(step))
                self._num_reused = 0
            if not self._times and step.title == "rollout.0":
                self._times.append(monotonic())
            work = self._works[get_ident()] = Work(_ACTIVITIES[step.stage], step, _ITEMS.get(step.stage, ""))
            self._live.update(self._bar, completed=self._state.trained_iterations + self._state.finished_rows)

        def advance(finished: int) -> None:
            work.num_done += finished

        return advance

    def show_work(self, title: str) -> None:
        """Show from now on that something outside the steps is done."""
        self._idle = Work(title)
        self._works.clear()

    def expect_items(self, total: int) -> None:
        """The step that the calling thread computes will finish ``total`` items."""
        self._works.get(get_ident(), self._idle).total = total

    @contextmanager
    def show_loading(self, name: str) -> Iterator[None]:
        """Show that the block loads ``name``, a key of :data:`LOADING`, and note the seconds."""
        interrupted = self._works.get(get_ident())
        step = None if interrupted is None else interrupted.step
        stage = "" if step is None else step.title.partition(".")[0]
        self._works[get_ident()] = Work(LOADING[name], step)
        began = monotonic()
        try:
            yield
        finally:
            with self._lock:
                self.loading[stage, name] = self.loading.get((stage, name), 0.0) + monotonic() - began
            if interrupted is None:
                del self._works[get_ident()]
            else:
                self._works[get_ident()] = interrupted

    def _list_works(self) -> list[Work]:
        """What is being done, the earliest iteration first."""
        works = list(self._works.values()) or [self._idle]
        return sorted(works, key=lambda work: work.step.iteration if work.step else 0)

    def _say_work(self) -> None:
        for work in self._list_works():
            where = "" if work.step is None or work.step.happens_once else f"iteration {work.step.iteration}: "
            self.say(f"  {where}{work}")

    def finish_step(self, step: Step, metrics: Mapping[str, float], *, reused: bool) -> None:
        """``step`` is committed: print the line of an iteration after its last step, of an evaluation or a baseline."""
        with self._lock:
            self._finish_step(step, metrics, reused=reused)

    def _finish_step(self, step: Step, metrics: Mapping[str, float], *, reused: bool) -> None:
        self._state.finish_step(step, metrics, reused=reused)
        self._idle = self._works.pop(get_ident(), self._idle)
        if not reused:
            log.info(self._state.finished_lines[step])
        self._num_reused += reused
        if step.stage in TRAINING_STAGES:
            self._metrics[step.iteration] |= metrics
        match step.stage if not reused else "":
            case "prepare":
                sizes = {split: metrics.get(f"problems/{split}") for split in get_args(Split)}
                shown = (f"{size:.0f} {split}" for split, size in sizes.items() if size is not None)
                self.say(f"problems: {', '.join(shown)}")
            case "update":
                if self._times:  # the evaluation after an iteration counts for the next one
                    self._times.append(monotonic())
                self.say(self._format_iteration(step.iteration))
            case "evaluate":
                trained = format_count(step.iteration, "iterations")
                when = "before training" if step.iteration == 0 else f"after {trained}"
                returns = _format_returns("eval", metrics)
                if "eval/ood/sampled/return" in metrics:
                    returns += f", ood return {metrics['eval/ood/sampled/return']:.1%}"
                self.say(f"held-out problems {when}: {returns} ({metrics['time/evaluate_s']:.1f} s)")
            case "baseline":
                returns = _format_returns(f"baseline/{step.part}", metrics)
                row = f"row {self._state.finished_rows} of {self._state.num_rows}, {step.part}"
                self.say(f"{row}: {returns} ({metrics['time/baseline_s']:.1f} s)")
        if step.stage == "update":
            self._metrics.pop(step.iteration, None)

    def _time_left(self) -> str:
        """Time to the end, ``0:12:30 left``; empty before the first complete iteration, and after the last.

        The remaining iterations are assumed to take the median of the newest 20: the first are slow, and single ones
        include an evaluation or a busy moment of the machine.
        """
        if len(self._times) < 2:
            return ""
        remaining = self._state.num_iterations - self._state.trained_iterations
        if not remaining:
            return ""
        whole = median(end - begin for begin, end in pairwise(self._times)) * remaining
        return f"{timedelta(seconds=round(max(whole - (monotonic() - self._times[-1]), 0.0)))} left"

    def _format_iteration(self, iteration: int) -> str:
        metrics, last = self._metrics[iteration], self._state.num_iterations
        seconds = {key[5:-2]: value for key, value in metrics.items() if key.startswith("time/")}
        parts = [f"{iteration:>{len(str(last))}}/{last}"]
        if "reward/joint" in metrics:
            parts.append(f"joint return {self._state.reward.fraction(metrics['reward/joint']):.1%}")
        cut_off = metrics.get("rollout/cut_off_frac", 0.0)
        if cut_off >= MAX_CUT_OFF:
            parts.append(f"{cut_off:.0%} cut")
        for part in _PARTS:
            if f"reward/{part}" in metrics:
                share = metrics[f"reward/{part}"] / self._state.reward.maxima[part]
                parts.append(f"{quantity_title(part)} {share:.1%}")
        took = f"{sum(seconds.values()):.1f} s"
        by_stage = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items() if value >= 0.05)
        whole = "  ".join([*parts, took, f"({by_stage})"])
        if not self._alive:
            return "  ".join(filter(None, [whole, self._time_left()]))
        shorter = ("  ".join([*parts[:length], took]) for length in range(len(parts), 1, -1))
        return next((line for line in (whole, *shorter) if len(line) <= self.console.width), whole)


def _format_returns(prefix: str, metrics: Mapping[str, float]) -> str:
    """The return, and pass@1 where problems can be solved."""
    text = f"return {metrics[f'{prefix}/return']:.1%} of the maximum"
    return text + (f", pass@1 {metrics[f'{prefix}/pass_at_1']:.1%}" if f"{prefix}/pass_at_1" in metrics else "")
