"""The console of a run: a live line on a terminal, and one line for each iteration and evaluation anywhere."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise
from statistics import median
from time import monotonic
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Column
from rich.text import Text

from magrpo.interfaces import Progress as Advance
from magrpo.layout import TRAINING_STAGES, Step
from magrpo.reports.figures import quantity_title
from magrpo.types import Split
from pipelines.progress.state import RunState

log = logging.getLogger(__name__)

_HEARTBEAT_S = 15.0
"""Without a terminal, a long stage reports this often."""
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
_PARTS = ("tests", "cooperation", "length_ratio", "style")
"""Parts of rewards shown in the line of an iteration: those that training changes most."""
_WIDE = 76
"""From this many columns on, a terminal has room for everything."""


class LiveLine(ProgressColumn):
    """The words of the live line, rendered again whenever it is shown: the time left changes within a stage."""

    max_refresh = 0.5

    def __init__(self, state: RunState, time_left: Callable[[], str], *, wide: bool) -> None:
        self._state, self._time_left, self._wide = state, time_left, wide
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))

    def render(self, task: Task) -> Text:
        state = self._state
        parts = [f"{state.trained_iterations}/{state.num_iterations} {task.description}"]
        if state.training_return is not None and self._wide:
            parts.append(f"train {state.training_return:.0%}")
        if state.held_out_returns:
            parts.append(f"held-out {[*state.held_out_returns.values()][-1]:.0%}")
        parts.append(self._time_left())
        return Text(" · ".join(filter(None, parts)))


class WarningsAbove(logging.Handler):
    """Prints log messages above the live line instead of through it."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        self._console.print(self.format(record), style=style, markup=False, soft_wrap=False)


class RunConsole:
    """Notes the steps of a run in its state and shows them, unless ``quiet``. Use as a context manager."""

    def __init__(self, state: RunState, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._state = state
        self._times: deque[float] = deque(maxlen=21)
        """When the first iteration that this process computes completely began, and when each one since ended."""
        self._metrics: dict[str, float] = {}
        """Metrics of the iteration so far."""
        self._num_reused = 0
        self._alive = self.console.is_terminal and not self.console.is_dumb_terminal
        shares_terminal = self._alive and sys.stderr.isatty() and not self.console.quiet
        self._above = WarningsAbove(self.console)
        self._loggers = [logging.getLogger(name) for name in ("magrpo", "pipelines") if shares_terminal]
        wide = self.console.width >= _WIDE
        self._live = Progress(
            SpinnerColumn(),
            *([BarColumn(bar_width=8)] if wide else []),
            LiveLine(state, self._time_left, wide=wide),
            console=self.console,
            transient=True,
            disable=not self._alive or self.console.quiet,
            redirect_stderr=shares_terminal,
        )
        self._bar = self._live.add_task("starting", total=state.num_iterations)

    def __enter__(self) -> RunConsole:
        self._live.start()
        for logger in self._loggers:
            logger.addHandler(self._above)
            logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self._above)
            logger.propagate = True
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays; a terminal wraps it between words."""
        self.console.print(text, markup=False, soft_wrap=not self._alive)

    def start_step(self, step: Step) -> Advance:
        """``step`` is being computed; call the returned function with the number of items just finished."""
        self._state.step = step
        if self._num_reused:
            self.say(f"{self._num_reused} committed stages are reused")
            self._num_reused = 0
        if not self._times and step.title == "rollout.0":
            self._times.append(monotonic())
        activity = _ACTIVITIES[step.stage]
        done, spoke = 0, monotonic()
        self._live.update(self._bar, completed=self._state.trained_iterations, description=activity)

        def advance(finished: int) -> None:
            nonlocal done, spoke
            done += finished
            self._live.update(self._bar, description=f"{activity} {done}")
            if not self._alive and monotonic() - spoke > _HEARTBEAT_S:
                spoke = monotonic()
                self.say(f"  iteration {step.iteration}: {activity}, {done} done")

        return advance

    def finish_step(self, step: Step, metrics: Mapping[str, float], *, reused: bool) -> None:
        """``step`` is committed: print the line of an iteration after its last step, of an evaluation or a baseline."""
        self._state.finish_step(step, metrics, reused=reused)
        log.info(self._state.last_finished)
        self._num_reused += reused
        if step.stage in TRAINING_STAGES:
            self._metrics |= metrics
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
                when = "before training" if step.iteration == 0 else f"after {step.iteration} iterations"
                returns = _format_returns("eval", metrics)
                if "eval/ood/sampled/return" in metrics:
                    returns += f", ood return {metrics['eval/ood/sampled/return']:.1%}"
                self.say(f"held-out problems {when}: {returns} ({metrics['time/evaluate_s']:.1f} s)")
            case "baseline":
                returns = _format_returns(f"baseline/{step.part}", metrics)
                self.say(f"{step.part}: {returns} ({metrics['time/baseline_s']:.1f} s)")
        if step.stage == "update":
            self._metrics = {}

    def _time_left(self) -> str:
        """Time to the end, ``0:12:30 left``; empty before the first complete iteration.

        The remaining iterations are assumed to take the median of the newest 20: the first are slow, and single ones
        include an evaluation or a busy moment of the machine.
        """
        if len(self._times) < 2:
            return ""
        remaining = self._state.num_iterations - self._state.trained_iterations
        whole = median(end - begin for begin, end in pairwise(self._times)) * remaining
        return f"{timedelta(seconds=round(max(whole - (monotonic() - self._times[-1]), 0.0)))} left"

    def _format_iteration(self, iteration: int) -> str:
        metrics, last = self._metrics, self._state.num_iterations
        seconds = {key[5:-2]: value for key, value in metrics.items() if key.startswith("time/")}
        parts = [f"{iteration:>{len(str(last))}}/{last}"]
        if "reward/joint" in metrics:
            parts.append(f"joint return {self._state.fraction(metrics['reward/joint']):.1%}")
        shown = [part for part in _PARTS if f"reward/{part}" in metrics]
        parts += [f"{quantity_title(part)} {metrics[f'reward/{part}']:.2f}" for part in shown]
        parts.append(f"{sum(seconds.values()):.1f} s")
        by_stage = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items() if value >= 0.05)
        whole = "  ".join([*parts, f"({by_stage})"])
        if not self._alive:
            return "  ".join(filter(None, [whole, self._time_left()]))
        return whole if len(whole) <= self.console.width else "  ".join(parts)


def _format_returns(prefix: str, metrics: Mapping[str, float]) -> str:
    """The return, and pass@1 where problems can be solved."""
    text = f"return {metrics[f'{prefix}/return']:.1%} of the maximum"
    return text + (f", pass@1 {metrics[f'{prefix}/pass_at_1']:.1%}" if f"{prefix}/pass_at_1" in metrics else "")
