"""The console of a run: live lines on a terminal, and one line for each iteration and evaluation anywhere."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from statistics import median
from threading import RLock, get_ident
from time import monotonic
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from magrpo.interfaces import Progress as Advance
from magrpo.progress.activity import LOADING, Heartbeat, is_live, open_console
from magrpo.progress.state import RunState
from magrpo.reports.figures import quantity_title
from magrpo.reports.health import MAX_CUT_OFF
from magrpo.run.steps import TRAINING_STAGES, Step
from magrpo.run.store import merge_metrics
from magrpo.text import format_count
from magrpo.types import Split

log = logging.getLogger(__name__)

_PARTS = ("tests", "cooperation", "length_ratio", "style")
"""Parts of rewards in the line of an iteration: the ones that training changes most."""

_WORDS = 50
"""Columns for the text of a live line on a wide terminal; the bar takes the rest."""

_NO_STEP = 0
"""Stands in for a thread's id where work outside the steps is shown."""


class _WordsColumn(ProgressColumn):
    """The text of a task, rendered anew at every refresh so that its seconds keep counting.

    ``width``: columns of the terminal.
    """

    max_refresh = 0.2

    def __init__(self, describe: Callable[[Task], str], width: int) -> None:
        self._describe = describe
        # A nearly constant width keeps the bars from moving.
        super().__init__(Column(no_wrap=True, overflow="ellipsis", min_width=min(_WORDS, width // 2)))

    def render(self, task: Task) -> Text:
        return Text(self._describe(task))


class RunConsole:
    """Notes the steps of a run in its state and shows them. Use as a context manager.

    On a terminal there is a live line for the run and one for each step under way. Elsewhere a line is printed for each
    iteration, and a heartbeat names the steps under way.
    """

    def __init__(
        self, state: RunState, console: Console | None = None, get_time: Callable[[], float] = monotonic
    ) -> None:
        self.console = console or open_console()
        self._state, self._get_time = state, get_time
        self._times: deque[float] = deque(maxlen=21)
        """When the first iteration computed completely by this process began, and when each later one ended."""
        self._metrics: dict[int, dict[str, float]] = defaultdict(dict)
        """Metrics collected so far for the iterations under way."""
        self._num_reused = 0
        self._lock = RLock()
        self._alive = is_live(self.console)
        self.live = Progress(
            SpinnerColumn(),
            _WordsColumn(self._describe, self.console.width),
            BarColumn(bar_width=None),
            console=self.console,
            transient=True,
            expand=True,
            disable=not self._alive,
            # Messages on the same terminal must appear above the live lines, not in them.
            redirect_stderr=self._alive and sys.stderr.isatty(),
            get_time=get_time,
        )
        self._run = self.live.add_task("", total=None)
        self._tasks: dict[int, TaskID] = {_NO_STEP: self._add_task("starting")}
        """The task shown for each thread that computes a step, by thread id, and for work outside the steps."""
        self._heartbeat = Heartbeat(self.say_progress)

    def __enter__(self) -> RunConsole:
        self.live.start()
        if not self._alive:
            self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeat.stop()
        self.live.stop()

    def say(self, text: str) -> None:
        """Print a permanent line; a terminal wraps it between words."""
        self._heartbeat.note_output()
        self.console.print(text, markup=False, soft_wrap=not self._alive)

    def start_step(self, step: Step) -> Advance:
        """Show that ``step`` is being computed; the returned function takes the number of items just finished."""
        with self._lock:
            self._state.start_step(step)
            if self._num_reused:
                self.say(self._state.describe_resumption(step))
                self._num_reused = 0
            if not self._times and step.label == "rollout.0":
                self._times.append(self._get_time())
            self._remove_task(_NO_STEP)
            self._remove_task(get_ident())
            task = self._tasks[get_ident()] = self._add_task(step.spec.activity, step)
            state = self._state
            total = state.num_iterations + state.num_rows + 1  # plus the report
            self.live.update(self._run, total=total, completed=state.trained_iterations + state.finished_rows)

        def advance(finished: int) -> None:
            self.live.advance(task, finished)

        return advance

    def show_work(self, title: str) -> None:
        """Show that work outside the steps is under way from now on."""
        with self._lock:
            for thread in list(self._tasks):
                self._remove_task(thread)
            self._tasks[_NO_STEP] = self._add_task(title)

    def expect_items(self, total: int) -> None:
        """Announce that the step computed by the calling thread will finish ``total`` items."""
        self.live.update(self._tasks[get_ident()], total=total)

    @contextmanager
    def show_loading(self, name: str) -> Iterator[None]:
        """Show that the block loads ``name``, a key of :data:`LOADING`."""
        interrupted = self._tasks.get(get_ident(), self._tasks.get(_NO_STEP))
        step: Step | None = None
        if interrupted is not None:
            step = self._find_task(interrupted).fields["step"]
            self.live.update(interrupted, visible=False)
        task = self._add_task(LOADING[name], step)
        try:
            yield
        finally:
            self.live.remove_task(task)
            if interrupted is not None and interrupted in self.live.task_ids:
                self.live.update(interrupted, visible=True)

    def say_progress(self) -> None:
        """Print the current work of each thread."""
        for task in self.live.tasks:
            if task.id != self._run and task.visible:
                step: Step | None = task.fields["step"]
                where = "" if step is None or step.happens_once else f"iteration {step.iteration}: "
                self.say(f"  {where}{self._describe(task)}")

    def _add_task(self, activity: str, step: Step | None = None) -> TaskID:
        return self.live.add_task(activity, total=None, step=step)

    def _remove_task(self, thread: int) -> None:
        if thread in self._tasks:
            self.live.remove_task(self._tasks.pop(thread))

    def _find_task(self, wanted: TaskID) -> Task:
        return next(task for task in self.live.tasks if task.id == wanted)

    def _describe(self, task: Task) -> str:
        """``0:12:30 left · 7/160 · train 53%`` for the run, ``sampling 24 of 64 completions, 5 s`` for a step."""
        state = self._state
        if task.id == self._run:
            training = "" if state.training_return is None else f"train {state.training_return:.0%}"
            held_out = [f"held-out {value:.0%}" for value in state.held_out_returns.values()][-1:]
            return " · ".join(filter(None, [self._time_left(), state.describe_done(), training, *held_out]))
        step: Step | None = task.fields["step"]
        counted = ""
        if task.completed and step is not None:
            expected = f" of {task.total:.0f}" if task.total else ""
            counted = f" {task.completed:.0f}{expected} {step.spec.items}"
        return f"{task.description}{counted}, {task.elapsed or 0.0:.0f} s"

    def finish_step(self, step: Step, metrics: Mapping[str, float], *, reused: bool) -> None:
        """Show that ``step`` is committed; its iteration, evaluation or baseline gets a line once it is complete."""
        with self._lock:
            self._finish_step(step, metrics, reused=reused)

    def _finish_step(self, step: Step, metrics: Mapping[str, float], *, reused: bool) -> None:
        self._state.finish_step(step, metrics, reused=reused)
        self._remove_task(get_ident())
        if reused:
            self._num_reused += 1
        else:
            log.info(self._state.finished_lines[step])
        if step.stage in TRAINING_STAGES:
            merge_metrics(self._metrics[step.iteration], metrics)
        if not reused:
            self._say_result(step, metrics)
        if step.stage == "update":
            self._metrics.pop(step.iteration, None)

    def _say_result(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Print the line of a stage that ends an iteration, an evaluation or a baseline, or counts the problems."""
        match step.stage:
            case "prepare":
                sizes = {split: metrics.get(f"problems/{split}") for split in get_args(Split)}
                shown = (f"{size:.0f} {split}" for split, size in sizes.items() if size is not None)
                self.say(f"problems: {', '.join(shown)}")
            case "update":
                if self._times:  # an evaluation after an iteration counts towards the next one
                    self._times.append(self._get_time())
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

    def _time_left(self) -> str:
        """``0:12:30 left``: the remaining time; empty before the first complete iteration and after the last.

        Assumes that each remaining iteration takes the median of the newest 20: the first are slow, and some include
        an evaluation or a busy moment of the machine.
        """
        if len(self._times) < 2:
            return ""
        remaining = self._state.num_iterations - self._state.trained_iterations
        if not remaining:
            return ""
        whole = median(end - begin for begin, end in pairwise(self._times)) * remaining
        return f"{timedelta(seconds=round(max(whole - (self._get_time() - self._times[-1]), 0.0)))} left"

    def _format_iteration(self, iteration: int) -> str:
        metrics, last = self._metrics[iteration], self._state.num_iterations
        seconds = {
            key.removeprefix("time/").removesuffix("_s"): value
            for key, value in metrics.items()
            if key.startswith("time/")
        }
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
        left = "" if self._alive else self._time_left()
        line = "  ".join(filter(None, [*parts, took, f"({by_stage})", left]))
        is_too_long = self._alive and len(line) > self.console.width
        return "  ".join([*parts, took]) if is_too_long else line


def _format_returns(prefix: str, metrics: Mapping[str, float]) -> str:
    """Format the return, and pass@1 where problems can be solved."""
    text = f"return {metrics[f'{prefix}/return']:.1%} of the maximum"
    pass_at_1 = metrics.get(f"{prefix}/pass_at_1")
    return text if pass_at_1 is None else f"{text}, pass@1 {pass_at_1:.1%}"
