"""What a run says while it runs: a live line on a terminal, and one line for each iteration and evaluation anywhere."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from statistics import median
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Column
from rich.text import Text

from magrpo.interfaces import Progress as Advance
from magrpo.reports.figures import quantity_title
from pipelines.progress.state import Standing

_HEARTBEAT_S = 15.0
"""Without a terminal, a stage that takes long reports this often."""
_STAGES = {
    "rollout": "sampling",
    "score": "scoring",
    "credit": "credit",
    "update": "updating",
    "evaluate": "evaluating",
    "baseline": "evaluating",
}
_PARTS = ("tests", "cooperation", "length_ratio", "style")
"""Parts of rewards that the line of an iteration shows: those that training moves most."""
_LOGGERS = [logging.getLogger(name) for name in ("magrpo", "pipelines")]
_WIDE = 76
"""Columns of a terminal from which on there is room for everything."""


class Pace:
    """When a run will end, by the iterations that this process has done whole: reused ones take no time.

    The others are taken to last as long as the median of the newest 20: first ones are slow, and single ones hold an
    evaluation or what else the machine had to do.
    """

    def __init__(self, num_iterations: int) -> None:
        self._num_iterations = num_iterations
        self._seconds: deque[float] = deque(maxlen=20)
        self._since: float | None = None

    def begin(self, stage: str, iteration: int) -> None:
        """A stage is to be done; an iteration that is met in the middle does not count."""
        if self._since is None and stage == "rollout.0" and iteration > 0:
            self._since = monotonic()

    def end(self) -> None:
        """An iteration is done. The evaluation that follows counts for the next one."""
        if self._since is not None:
            now = monotonic()
            self._seconds.append(now - self._since)
            self._since = now

    def left(self, done: int) -> str:
        """Time to the end, ``0:12:30 left``; empty before an iteration is done."""
        if self._since is None or not self._seconds:
            return ""
        whole = median(self._seconds) * (self._num_iterations - done)
        return f"{timedelta(seconds=round(max(whole - (monotonic() - self._since), 0.0)))} left"


class Line(ProgressColumn):
    """The words of the live line, made anew whenever it is shown: time goes on in a stage that says nothing."""

    max_refresh = 0.5

    def __init__(self, standing: Standing, pace: Pace, *, wide: bool) -> None:
        self._standing, self._pace, self._wide = standing, pace, wide
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))

    def render(self, task: Task) -> Text:
        standing = self._standing
        parts = [f"{standing.done}/{standing.num_iterations} {task.description}"]
        if standing.training is not None and self._wide:
            parts.append(f"train {standing.training:.0%}")
        if standing.held_out:
            parts.append(f"held-out {[*standing.held_out.values()][-1]:.0%}")
        parts.append(self._pace.left(standing.done))
        return Text(" · ".join(filter(None, parts)))


class Above(logging.Handler):
    """Prints warnings above the live line, which would otherwise be torn."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), style="yellow", markup=False, soft_wrap=False)


class RunConsole:
    """Implements :class:`pipelines.training.stages.Console`. Use as a context manager."""

    def __init__(self, standing: Standing, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.standing = standing
        self._pace = Pace(standing.num_iterations)
        self._seen: dict[str, float] = {}
        self._reused = 0
        self._alive = self.console.is_terminal and not self.console.is_dumb_terminal
        self._above = Above(self.console) if self._alive and sys.stderr.isatty() else None
        wide = self.console.width >= _WIDE
        self._live = Progress(
            SpinnerColumn(),
            *([BarColumn(bar_width=8)] if wide else []),
            Line(self.standing, self._pace, wide=wide),
            console=self.console,
            transient=True,
            disable=not self._alive,
            redirect_stderr=self._above is not None,
        )
        self._bar = self._live.add_task("starting", total=standing.num_iterations)

    def __enter__(self) -> RunConsole:
        self._live.start()
        if self._above is not None:
            for logger in _LOGGERS:
                logger.addHandler(self._above)
                logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._above is not None:
            for logger in _LOGGERS:
                logger.removeHandler(self._above)
                logger.propagate = True
        self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays; on a terminal it is broken between words."""
        self.console.print(text, markup=False, soft_wrap=not self._alive)

    def begin(self, stage: str, iteration: int, items: int | None = None) -> Advance:
        """A stage starts; call what is returned with the number of items just finished."""
        if self._reused:
            self.say(f"{self._reused} committed stages are reused")
            self._reused = 0
        self.standing.begin(stage, iteration)
        self._pace.begin(stage, iteration)
        name = _STAGES.get(stage.partition(".")[0], stage)
        done, spoke = 0, monotonic()
        self._show(name)

        def advance(finished: int) -> None:
            nonlocal done, spoke
            done += finished
            count = f"{done}/{items}" if items else str(done)
            self._show(f"{name} {count}")
            if not self._alive and monotonic() - spoke > _HEARTBEAT_S:
                spoke = monotonic()
                self.say(f"  iteration {iteration}: {name}, {count} done")

        return advance

    def end(self, stage: str, iteration: int, metrics: Mapping[str, float], *, reused: bool) -> None:
        """A stage is committed; the last one of an iteration prints its line."""
        self._reused += reused
        self.standing.end(stage, iteration, metrics, reused=reused)
        if stage != "evaluate":
            self._seen |= metrics
        if stage == "update":
            if iteration > 0 and not reused:
                self._pace.end()
                self.say(self._iteration_line(iteration))
            self._seen = {}
        elif stage == "evaluate" and not reused:
            self.say(_evaluation_line(iteration, metrics))
        elif stage.startswith("baseline.") and not reused:
            self.say(_baseline_line(stage.removeprefix("baseline."), metrics))
        elif stage == "prepare" and not reused:
            splits = {
                key.partition("/")[2]: int(value) for key, value in metrics.items() if key.startswith("problems/")
            }
            self.say("problems: " + ", ".join(f"{count} {split}" for split, count in splits.items()))

    def _show(self, stage: str) -> None:
        """Renew the live line."""
        self._live.update(self._bar, completed=self.standing.done, description=stage)

    def _iteration_line(self, iteration: int) -> str:
        seen, last = self._seen, self.standing.num_iterations
        seconds = {key[5:-2]: value for key, value in seen.items() if key.startswith("time/")}
        parts = [f"{iteration:>{len(str(last))}}/{last}"]
        if "reward/joint" in seen:
            parts.append(f"joint return {self.standing.fraction(seen['reward/joint']):.1%}")
        for part in _PARTS:
            if f"reward/{part}" in seen:
                parts.append(f"{quantity_title(part)} {seen[f'reward/{part}']:.2f}")
        split = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items() if value >= 0.05)
        parts.append(f"{sum(seconds.values()):.1f} s")
        if not self._alive:
            return "  ".join(filter(None, [*parts, f"({split})", self._pace.left(iteration)]))
        whole = "  ".join([*parts, f"({split})"])
        return whole if len(whole) <= self.console.width else "  ".join(parts)


def _evaluation_line(iteration: int, metrics: Mapping[str, float]) -> str:
    when = "before training" if iteration == 0 else f"after {iteration} iterations"
    parts = [*_quality("eval", metrics)]
    if "eval/ood/sampled/return" in metrics:
        parts.append(f"ood return {metrics['eval/ood/sampled/return']:.1%}")
    return f"held-out problems {when}: {', '.join(parts)} ({metrics['time/evaluate_s']:.1f} s)"


def _baseline_line(row: str, metrics: Mapping[str, float]) -> str:
    return f"{row}: {', '.join(_quality(f'baseline/{row}', metrics))} ({metrics['time/baseline_s']:.1f} s)"


def _quality(prefix: str, metrics: Mapping[str, float]) -> Iterator[str]:
    """The return, and pass@1 where problems can be solved."""
    yield f"return {metrics[f'{prefix}/return']:.1%} of the maximum"
    if f"{prefix}/pass_at_1" in metrics:
        yield f"pass@1 {metrics[f'{prefix}/pass_at_1']:.1%}"
