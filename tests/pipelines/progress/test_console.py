"""What a run shows: a line that lives on a terminal and fits it, lines without; and when it will end."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from rich.console import Console

from magrpo.rewards.coding import CodingReward
from pipelines.progress import console as module
from pipelines.progress.console import Line, RunConsole
from pipelines.progress.state import Standing


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def iterate(console: RunConsole, iteration: int, clock: Clock, *, reused: bool = False) -> None:
    """One iteration of 10 s; a reused one takes none."""
    score = {"reward/joint": 2.0, "reward/tests": 1.0, "reward/cooperation": 1.0}
    for stage, metrics in (("rollout.0", {}), ("score.0", score), ("credit", {}), ("update", {})):
        if not reused:
            console.begin(stage, iteration)(1)
            clock.now += 2.5
        console.end(stage, iteration, {**metrics, f"time/{stage.partition('.')[0]}_s": 2.5}, reused=reused)


def evaluate(console: RunConsole, iteration: int, held_out: float) -> None:
    console.begin("evaluate", iteration)
    metrics = {"eval/return": held_out, "eval/pass_at_1": 0.1, "eval/ood/sampled/return": 0.2, "time/evaluate_s": 1.0}
    console.end("evaluate", iteration, metrics, reused=False)


def live_line(console: RunConsole) -> str:
    """What the terminal shows of the run now."""
    [line] = [column for column in console._live.columns if isinstance(column, Line)]
    return line.render(console._live.tasks[0]).plain


def test_reused_iterations_take_no_time_and_do_not_make_the_end_come_near(clock: Clock) -> None:
    console = RunConsole(Standing(100, CodingReward().fraction), Console(file=io.StringIO()))
    for iteration in range(1, 91):
        iterate(console, iteration, clock, reused=True)
    console.begin("rollout.0", 91)
    assert live_line(console) == "90/100 sampling · train 50%"
    iterate(console, 91, clock)
    assert live_line(console).endswith("· 0:01:30 left")
    clock.now += 5.0
    assert live_line(console).endswith("· 0:01:25 left"), "time goes on in a stage that says nothing"
    clock.now += 600.0
    assert live_line(console).endswith("· 0:00:00 left")


def test_an_iteration_that_is_met_in_the_middle_says_nothing_about_the_end(clock: Clock) -> None:
    console = RunConsole(Standing(10, CodingReward().fraction), Console(file=io.StringIO()))
    console.begin("update", 4)
    clock.now += 0.1
    console.end("update", 4, {}, reused=False)
    assert "left" not in live_line(console)
    iterate(console, 5, clock)
    assert live_line(console).endswith("· 0:00:50 left")


def test_slow_iterations_soon_say_nothing_about_the_end(clock: Clock) -> None:
    console = RunConsole(Standing(10, CodingReward().fraction), Console(file=io.StringIO()))
    for iteration in range(1, 4):
        iterate(console, iteration, clock)
        clock.now += 300.0 * (iteration == 1)
    assert live_line(console).endswith("· 0:01:10 left")


@pytest.mark.parametrize(("width", "fits_all"), [(60, False), (80, True), (120, True)])
def test_lines_fit_the_terminal(width: int, fits_all: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, no_color=True, highlight=False, width=width)
    with RunConsole(Standing(100, CodingReward().fraction), terminal) as console:
        evaluate(console, 0, 0.531)
        iterate(console, 1, clock)
        logging.getLogger("magrpo.tracking.spool").warning(
            "tracking: no [answer] from %s", "http://127.0.0.1:5000/" + "a" * 20
        )
        console.begin("evaluate", 1, 384)(384)
        shown = live_line(console)
        bar = 11 if fits_all else 2
        assert bar + len(shown) <= width
        assert ("train 50%" in shown) == fits_all
        assert "held-out 53%" in shown
        assert shown.endswith("0:16:30 left")
    said = out.getvalue()
    assert "WARNING: tracking: no [answer]" in said
    assert "\x1b[3" not in said, "no colours"
    assert ("(rollout 2.5, score 2.5" in said) == (width == 120)
    assert logging.getLogger("magrpo").propagate


def test_without_a_terminal_every_line_is_whole(clock: Clock) -> None:
    out = io.StringIO()
    with RunConsole(Standing(2, CodingReward().fraction), Console(file=out, soft_wrap=True)) as console:
        evaluate(console, 0, 0.531)
        iterate(console, 1, clock)
        advance = console.begin("rollout.0", 2, 64)
        clock.now += 16.0
        advance(8)
    assert out.getvalue().splitlines() == [
        "held-out problems before training: return 53.1% of the maximum, pass@1 10.0%, ood return 20.0% (1.0 s)",
        "1/2  joint return 50.0%  tests 1.00  cooperation 1.00  10.0 s"
        "  (rollout 2.5, score 2.5, credit 2.5, update 2.5)  0:00:10 left",
        "  iteration 2: sampling, 8/64 done",
    ]
