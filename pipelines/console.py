"""What a run says while it runs: a live line on a terminal, and one line for each iteration and evaluation anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from magrpo.interfaces import Progress as Advance

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


class RunConsole:
    """Implements :class:`pipelines.session.Console`. Use as a context manager."""

    def __init__(self, num_iterations: int, max_total: float, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._max_total = max_total
        self._num_iterations = num_iterations
        self._seen: dict[str, float] = {}
        self._reused = 0
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[stage]}"),
            TextColumn("· left"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
            speed_estimate_period=300,
        )
        self._bar = self._live.add_task("training", total=num_iterations, stage="starting")

    def __enter__(self) -> RunConsole:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text)

    def begin(self, stage: str, iteration: int, items: int | None = None) -> Advance:
        """A stage starts; call what is returned with the number of items just finished."""
        if self._reused:
            self.say(f"{self._reused} committed stages are reused")
            self._reused = 0
        name = _STAGES.get(stage.partition(".")[0], stage)
        done, spoke = 0, monotonic()
        self._live.update(self._bar, stage=name)

        def advance(finished: int) -> None:
            nonlocal done, spoke
            done += finished
            count = f"{done}/{items}" if items else str(done)
            self._live.update(self._bar, stage=f"{name} {count}")
            if not self.console.is_terminal and monotonic() - spoke > _HEARTBEAT_S:
                spoke = monotonic()
                self.say(f"  iteration {iteration}: {name}, {count} done")

        return advance

    def end(self, stage: str, iteration: int, metrics: Mapping[str, float], *, reused: bool) -> None:
        """A stage is committed; the last one of an iteration prints its line."""
        self._reused += reused
        if stage != "evaluate":
            self._seen |= metrics
        if stage == "update":
            self._live.update(self._bar, completed=iteration)
            if iteration > 0 and not reused:
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

    def _iteration_line(self, iteration: int) -> str:
        seen, width = self._seen, len(str(self._num_iterations))
        seconds = {key[5:-2]: value for key, value in seen.items() if key.startswith("time/")}
        parts = [f"{iteration:>{width}}/{self._num_iterations}"]
        if "reward/joint" in seen:
            parts.append(f"joint return {seen['reward/joint']:.2f} of {self._max_total:g}")
        for part in ("tests", "cooperation"):
            if f"reward/{part}" in seen:
                parts.append(f"{part} {seen[f'reward/{part}']:.2f}")
        split = ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items() if value >= 0.05)
        parts.append(f"{sum(seconds.values()):.1f} s ({split})")
        return "  ".join(parts)


def _evaluation_line(iteration: int, metrics: Mapping[str, float]) -> str:
    when = "before training" if iteration == 0 else f"after {iteration} iterations"
    parts = [f"return {metrics['eval/return']:.1%} of the maximum", f"pass@1 {metrics['eval/pass_at_1']:.1%}"]
    if "eval/ood/sampled/return" in metrics:
        parts.append(f"ood return {metrics['eval/ood/sampled/return']:.1%}")
    return f"held-out problems {when}: {', '.join(parts)} ({metrics['time/evaluate_s']:.1f} s)"


def _baseline_line(row: str, metrics: Mapping[str, float]) -> str:
    value = {key: metrics[f"baseline/{row}/{key}"] for key in ("return", "pass_at_1")}
    return (
        f"{row}: return {value['return']:.1%} of the maximum, pass@1 {value['pass_at_1']:.1%} "
        f"({metrics['time/baseline_s']:.1f} s)"
    )
