"""What a command shows before its stages: one line at a time, with seconds; and the clock that a run takes over."""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from magrpo.progress.activity import LOADING, ActivityLine, begin_startup, end_startup, show_activity
from tests.fakes import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(1000.0)
    monkeypatch.setattr(time, "time", clock.monotonic)
    end_startup()
    yield clock
    end_startup()


def test_a_line_names_one_activity_with_its_seconds(clock: Clock) -> None:
    out = io.StringIO()
    line = ActivityLine(Console(file=out), clock.monotonic)
    line.switch("loading libraries")
    clock.now += 12.0
    line.say()
    line.switch("starting the engine", seconds=3.0)
    clock.now += 2.0
    line.say()
    assert out.getvalue().splitlines() == ["  loading libraries, 12 s", "  starting the engine, 5 s"]


def test_a_terminal_shows_the_line_at_once_and_a_file_does_not(clock: Clock) -> None:
    shown = {}
    for is_terminal in (True, False):
        out = io.StringIO()
        with show_activity("stopping Prefect's server", Console(file=out, force_terminal=is_terminal, width=60)):
            pass
        shown[is_terminal] = out.getvalue()
    assert "stopping Prefect's server, 0 s" in shown[True]
    assert shown[False] == ""


def test_a_startup_knows_when_the_command_began(clock: Clock) -> None:
    clock.now += 3.0  # the interpreter, before anything is imported
    begin_startup(began_s=1000.0, quiet=True)
    clock.now += 9.0
    with show_activity(LOADING["Prefect"]):
        clock.now += 4.0
        begin_startup()  # of the run, within that of its command
        with show_activity("asking for the champion"):
            clock.now += 2.0
    assert end_startup() == 1000.0
    assert end_startup() == clock.now, "the next run has a clock of its own"


def test_no_garbage_is_collected_until_the_startup_ends() -> None:
    assert gc.isenabled()
    begin_startup(quiet=True)
    assert not gc.isenabled()
    end_startup()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0, "what is loaded is not looked at again"
