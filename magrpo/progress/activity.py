"""The current activity of a command outside the stages of a run, shown as a live line or, in a file, every 15 s.

A command begins the clock of its run with :func:`begin_startup`, before it imports anything heavy, and names each part
with :func:`show_activity`. The run takes the clock over with :func:`end_startup`, through which it learns when the
command began.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Column

from magrpo.process.environment import is_quiet

HEARTBEAT_S = 15.0
"""Seconds after which a command without a terminal repeats its current activity."""
LOADING: Mapping[str, str] = {
    "libraries": "loading libraries",
    "Prefect": "starting Prefect",
    "Ray": "starting Ray",
    "base model": "loading the base model",
    "engine": "starting the engine",
    "sandbox": "starting the sandbox",
}
"""The activity shown on the screen for each thing that a run loads."""


def open_console() -> Console:
    """Open the console of a command, silent with ``--quiet``; only a terminal breaks lines between words.

    While a command starts, this is the console of its live line: output of another console would garble that line.
    """
    if _startup is not None:
        return _startup.line.console
    console = Console(highlight=False, quiet=is_quiet())
    console.soft_wrap = not console.is_terminal
    return console


def is_live(console: Console) -> bool:
    """Whether a line on this console can be redrawn in place."""
    return console.is_terminal and not console.is_dumb_terminal and not console.quiet


class Heartbeat:
    """Calls ``say`` from a thread whenever nothing was printed for :data:`HEARTBEAT_S` seconds."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._over = threading.Event()
        self._said = monotonic()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="magrpo-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def note_output(self) -> None:
        """Note that something was printed just now."""
        self._said = monotonic()

    def _beat(self) -> None:
        while not self._over.wait(max(self._said + HEARTBEAT_S - monotonic(), 0.1)):
            if monotonic() - self._said >= HEARTBEAT_S:
                self.note_output()
                self._say()


class ActivityLine:
    """A line that names one activity at a time, with the seconds since it began."""

    def __init__(self, console: Console, get_time: Callable[[], float] = monotonic) -> None:
        self.console = console
        self._get_time = get_time
        alive = self._alive = is_live(console)
        words = TextColumn("{task.description}, {task.elapsed:.0f} s", table_column=Column(no_wrap=True))
        self._live = Progress(
            SpinnerColumn(),
            words,
            console=console,
            transient=True,
            disable=not alive,
            # Messages on the same terminal must appear above the live line, not in it.
            redirect_stderr=alive and sys.stderr.isatty(),
            get_time=get_time,
        )
        self._activity = self._live.add_task("", total=None)
        self._heartbeat = Heartbeat(self.say)

    def start(self) -> None:
        self._live.start()
        if not self._alive:
            self._heartbeat.start()

    def stop(self) -> None:
        self._heartbeat.stop()
        self._live.stop()

    def switch(self, activity: str, seconds: float = 0.0) -> None:
        """Show another activity, which has already taken ``seconds``."""
        self._live.reset(self._activity, description=activity)
        self._live.tasks[0].start_time = self._get_time() - seconds

    def say(self) -> None:
        """Print the activity: ``loading libraries, 4 s``."""
        [task] = self._live.tasks
        self.console.print(f"  {task.description}, {task.elapsed or 0.0:.0f} s", markup=False)


@contextmanager
def show_activity(activity: str, console: Console | None = None) -> Iterator[None]:
    """Show ``activity`` while the block runs: on the startup line if there is one, else on a line of its own."""
    if _startup is not None:
        _startup.line.switch(activity)
        yield
        return
    line = ActivityLine(console or open_console())
    line.switch(activity)
    line.start()
    try:
        yield
    finally:
        line.stop()


# ------------------------------------------------------------------------------------------------------------- startup
@dataclass(frozen=True, slots=True)
class Startup:
    """The phase of a command before the stages of its run."""

    began_s: float
    """Start of the command, in seconds since 1970."""
    line: ActivityLine


_startup: Startup | None = None
"""The startup of the run that this process executes next, if under way. Global: Prefect calls the flow in between."""


def begin_startup(began_s: float | None = None, *, quiet: bool = False) -> None:
    """Start the clock and the live line of a run, whose first activity is loading libraries; no-op if already started.

    ``began_s``: start of the command in seconds since 1970, by default now. ``quiet``: show no line. Until the end of
    the startup no garbage is collected: libraries make none, and looking at them is a fifth of the time to load them.
    """
    global _startup
    if _startup is None:
        gc.disable()
        now_s = time.time()
        line = ActivityLine(Console(quiet=True) if quiet else open_console())
        line.switch(LOADING["libraries"], 0.0 if began_s is None else now_s - began_s)
        line.start()
        _startup = Startup(now_s if began_s is None else began_s, line)


def end_startup() -> float:
    """Stop the line and return when the command began, in seconds since 1970; now if there was no startup."""
    global _startup
    ended, _startup = _startup, None
    if ended is None:
        return time.time()
    if not gc.get_freeze_count():  # once: a process that executes several runs must not keep their garbage
        gc.freeze()
    gc.enable()
    ended.line.stop()
    return ended.began_s
