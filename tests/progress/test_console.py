"""What a run shows: a line that lives on a terminal and fits it, lines without; and when it will end."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading

import pytest
from rich.console import Console

from magrpo.progress.console import RunConsole
from magrpo.progress.state import RunState
from magrpo.rewards.coding import CodingReward
from magrpo.run.steps import Step
from pipelines.cli import CurrentStderr
from tests.fakes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def iterate(progress: RunConsole, iteration: int, clock: Clock, *, reused: bool = False, cut_off: float = 0.0) -> None:
    """One iteration of 10 s; a reused one takes none."""
    credit = {"reward/joint": 2.0, "reward/tests": 1.0, "reward/cooperation": 1.0}
    steps = [Step("rollout", iteration, "0"), Step("score", iteration, "0")]
    steps += [Step("credit", iteration), Step("update", iteration)]
    for step in steps:
        if not reused:
            progress.start_step(step)(1)
            clock.now += 2.5
        metrics = {"rollout": {"rollout/cut_off_frac": cut_off}, "credit": credit}.get(step.stage, {})
        progress.finish_step(step, {**metrics, f"time/{step.stage}_s": 2.5}, reused=reused)


def evaluate(progress: RunConsole, iteration: int, held_out: float) -> None:
    progress.start_step(Step("evaluate", iteration))
    metrics = {"eval/return": held_out, "eval/pass_at_1": 0.1, "eval/ood/sampled/return": 0.2, "time/evaluate_s": 1.0}
    progress.finish_step(Step("evaluate", iteration), metrics, reused=False)


def live_lines(progress: RunConsole, width: int = 100) -> list[str]:
    """What a terminal of this width shows of the run now, without spinners and bars."""
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(progress.live.get_renderable())
    return [re.sub(r"^. |[━╸╺]+", "", line).strip() for line in out.getvalue().splitlines()]


def show(state: RunState | int, console: Console, clock: Clock) -> RunConsole:
    """The console of a run in ``state``, or of one with so many iterations."""
    return RunConsole(RunState(state, CodingReward()) if isinstance(state, int) else state, console, clock.monotonic)


def test_a_run_of_baselines_counts_its_rows(clock: Clock) -> None:
    out = io.StringIO()
    progress = show(RunState(0, CodingReward(), num_rows=3), Console(file=out, width=100), clock)
    for name, done in (("naive", "row 1 of 3"), ("magrpo", "row 2 of 3")):
        step = Step("baseline", 0, name)
        progress.start_step(step)
        assert live_lines(progress) == [done, "evaluating, 0 s"]
        progress.finish_step(step, {f"baseline/{name}/return": 0.5, "time/baseline_s": 1.0}, reused=False)
    assert "row 2 of 3, magrpo: return 50.0% of the maximum" in out.getvalue()


def test_an_iteration_says_how_many_answers_were_cut(clock: Clock) -> None:
    out = io.StringIO()
    progress = show(2, Console(file=out, soft_wrap=True), clock)
    iterate(progress, 1, clock, cut_off=0.875)
    iterate(progress, 2, clock, cut_off=0.05)
    first, second = out.getvalue().splitlines()
    assert first.startswith("1/2  joint return 50.0%  88% cut  tests 100.0%")
    assert second.startswith("2/2  joint return 50.0%  tests 100.0%")


def test_an_iteration_says_the_time_of_all_its_turns(clock: Clock) -> None:
    out = io.StringIO()
    progress = show(1, Console(file=out, soft_wrap=True), clock)
    turns = [(Step(stage, 1, turn), seconds) for turn in "01" for stage, seconds in (("rollout", 30.0), ("score", 5.0))]
    for step, seconds in [*turns, (Step("credit", 1), 1.0), (Step("update", 1), 4.0)]:
        progress.finish_step(step, {f"time/{step.stage}_s": seconds}, reused=False)
    assert out.getvalue() == "1/1  75.0 s  (rollout 60.0, score 10.0, credit 1.0, update 4.0)\n"


def test_reused_iterations_take_no_time_and_do_not_make_the_end_come_near(clock: Clock) -> None:
    progress = show(100, Console(file=io.StringIO()), clock)
    for iteration in range(1, 91):
        iterate(progress, iteration, clock, reused=True)
    progress.start_step(Step("rollout", 91, "0"))
    assert live_lines(progress) == ["90/100 · train 50%", "sampling, 0 s"]
    iterate(progress, 91, clock)
    assert live_lines(progress)[0].startswith("0:01:30 left · ")
    clock.now += 5.0
    assert live_lines(progress)[0].startswith("0:01:25 left · "), "time goes on in a stage that says nothing"
    clock.now += 600.0
    assert live_lines(progress)[0].startswith("0:00:00 left · ")


@pytest.mark.parametrize(
    ("trained", "step", "line"),
    [
        (0, Step("credit", 1), "resuming with credit, iteration 1 of 9"),
        (0, Step("prepare", 0), "resuming with prepare"),
        (3, Step("rollout", 4, "0"), "resuming after iteration 3"),
    ],
)
def test_a_resumed_run_says_once_where_it_continues(trained: int, step: Step, line: str, clock: Clock) -> None:
    out = io.StringIO()
    progress = show(9, Console(file=out, soft_wrap=True), clock)
    progress.finish_step(Step("prepare", 0), {}, reused=True)
    for iteration in range(1, trained + 1):
        iterate(progress, iteration, clock, reused=True)
    progress.start_step(step)
    progress.start_step(step)
    assert out.getvalue().splitlines() == [line]


def test_resumed_baselines_say_how_many_rows_are_done(clock: Clock) -> None:
    out = io.StringIO()
    progress = show(RunState(0, CodingReward(), num_rows=3), Console(file=out, soft_wrap=True), clock)
    progress.finish_step(Step("baseline", 0, "naive"), {}, reused=True)
    progress.start_step(Step("baseline", 0, "magrpo"))
    assert out.getvalue() == "resuming after row 1 of 3\n"


def test_an_iteration_that_is_met_in_the_middle_says_nothing_about_the_end(clock: Clock) -> None:
    progress = show(10, Console(file=io.StringIO()), clock)
    progress.start_step(Step("update", 4))
    clock.now += 0.1
    progress.finish_step(Step("update", 4), {"time/update_s": 0.1}, reused=False)
    assert "left" not in live_lines(progress)[0]
    iterate(progress, 5, clock)
    assert live_lines(progress)[0].startswith("0:00:50 left · ")


def test_slow_iterations_soon_say_nothing_about_the_end(clock: Clock) -> None:
    progress = show(10, Console(file=io.StringIO()), clock)
    for iteration in range(1, 4):
        iterate(progress, iteration, clock)
        clock.now += 300.0 * (iteration == 1)
    assert live_lines(progress)[0].startswith("0:01:10 left · ")


def test_steps_under_way_have_a_line_each(clock: Clock) -> None:
    progress = show(9, Console(file=io.StringIO()), clock)
    progress.start_step(Step("rollout", 1, "0"))(8)
    progress.expect_items(64)
    clock.now += 3.0

    def score() -> None:
        progress.start_step(Step("score", 2, "0"))(5)

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert live_lines(progress) == ["0/9", "sampling 8 of 64 completions, 3 s", "scoring 5 programs, 0 s"]
    with progress.show_loading("engine"):
        clock.now += 2.0
        assert live_lines(progress)[1:] == ["scoring 5 programs, 2 s", "starting the engine, 2 s"]
    progress.show_work("delivering records to MLflow")
    assert live_lines(progress)[1:] == ["delivering records to MLflow, 0 s"]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
def test_lines_fit_the_terminal(width: int, clock: Clock) -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, no_color=True, highlight=False, width=width)
    progress = show(100, terminal, clock)
    evaluate(progress, 0, 0.531)
    iterate(progress, 1, clock)
    progress.start_step(Step("evaluate", 1))(384)
    progress.expect_items(480)
    clock.now += 7.0
    run, step = live_lines(progress, width)
    assert len(run) <= width
    assert len(step) <= width
    assert run.startswith("0:16:23 left · 1/100")
    assert step.startswith("evaluating")
    if width >= 80:
        assert run == "0:16:23 left · 1/100 · train 50% · held-out 53%"
        assert step == "evaluating 384 of 480 completions, 7 s"


def test_messages_are_printed_above_the_live_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, no_color=True, highlight=False, width=100)
    handler = CurrentStderr()
    logger = logging.getLogger("magrpo.tracking.outbox")
    logger.addHandler(handler)
    try:
        with show(100, terminal, clock):
            logger.warning("tracking: no [answer] from %s", "http://127.0.0.1:5000/" + "a" * 20)
    finally:
        logger.removeHandler(handler)
    assert "tracking: no [answer] from http://127.0.0.1:5000/aaaa" in out.getvalue()


def test_without_a_terminal_every_line_is_whole(clock: Clock) -> None:
    out = io.StringIO()
    progress = show(2, Console(file=out, soft_wrap=True), clock)
    with progress:
        evaluate(progress, 0, 0.531)
        iterate(progress, 1, clock)
        advance = progress.start_step(Step("rollout", 2, "0"))
        advance(8)
        clock.now += 16.0
        progress.say_progress()
        with progress.show_loading("engine"):
            clock.now += 31.0
            progress.say_progress()
        advance(8)
        progress.expect_items(64)
        progress.say_progress()
    assert out.getvalue().splitlines() == [
        "held-out problems before training: return 53.1% of the maximum, pass@1 10.0%, ood return 20.0% (1.0 s)",
        "1/2  joint return 50.0%  tests 100.0%  cooperation 66.7%  10.0 s"
        "  (rollout 2.5, score 2.5, credit 2.5, update 2.5)  0:00:10 left",
        "  iteration 2: sampling 8 completions, 16 s",
        "  iteration 2: starting the engine, 31 s",
        "  iteration 2: sampling 16 of 64 completions, 47 s",
    ]
