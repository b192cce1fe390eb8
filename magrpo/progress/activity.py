"""What a command is doing outside the stages of a run: a live line with seconds, or in a file a line every 15 s.

A command begins the clock of its run with :func:`begin_startup`, before it imports anything heavy, and names each part
with :func:`show_activity`. The run takes the clock over with :func:`end_startup`, through which it learns when the
command began and what loading cost.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Column

from magrpo.process.environment import is_quiet

HEARTBEAT_S = 15.0
"""Without a terminal, a command says at least this often what it is doing."""
LOADING: Mapping[str, str] = {
    "libraries": "loading libraries",
    "Prefect": "starting Prefect's server",
    "Ray": "starting Ray",
    "base model": "loading the base model",
    "engine": "starting the engine",
    "sandbox": "starting the sandbox",
}
"""What a run loads, and the activity that it is called on the screen."""


def open_console() -> Console:
    """The console of a command, silent with ``--quiet``; a terminal breaks lines between words, a file does not.

    While a command starts, the console of its line: others would print into the line.
    """
    if _startup.line is not None:
        return _startup.line.console
    console = Console(highlight=False, quiet=is_quiet())
    console.soft_wrap = not console.is_terminal
    return console


def is_live(console: Console) -> bool:
    """Whether a line on the console can be drawn again and again."""
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
        """Something was printed just now."""
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
            # If messages go to the same terminal, they are shown above the line.
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
        """Name another activity, which has taken ``seconds`` so far."""
        self._live.reset(self._activity, description=activity)
        self._live.tasks[0].start_time = self._get_time() - seconds

    def say(self) -> None:
        """Print the activity: ``loading libraries, 4 s``."""
        [task] = self._live.tasks
        self.console.print(f"  {task.description}, {task.elapsed or 0.0:.0f} s", markup=False)


@contextmanager
def show_activity(activity: str, console: Console | None = None) -> Iterator[None]:
    """Show what the block does: on the line of the command's startup, or else on a line of its own."""
    if _startup.line is not None:
        _startup.switch(activity)
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
@dataclass
class Startup:
    """The time of a command before the stages of its run."""

    began_s: float
    """When the command began, in seconds since 1970."""
    loading: dict[str, float] = field(default_factory=dict)
    """Seconds by what was loaded, a key of :data:`LOADING`."""
    line: ActivityLine | None = None
    """Where it is shown; None if there is no startup under way."""
    _loads: str | None = "libraries"

    def __post_init__(self) -> None:
        self._switched_s = self.began_s

    def switch(self, activity: str) -> None:
        """Note that ``activity`` begins now, and the seconds of the one that ends."""
        now_s = time.time()
        if self._loads is not None:
            self.loading[self._loads] = self.loading.get(self._loads, 0.0) + now_s - self._switched_s
        self._loads = next((name for name, title in LOADING.items() if title == activity), None)
        self._switched_s = now_s
        if self.line is not None:
            self.line.switch(activity)


_startup = Startup(0.0)
"""Of the run that this process starts next. Prefect calls the flow between its beginning and its end."""


def begin_startup(began_s: float | None = None, *, quiet: bool = False) -> None:
    """Start the clock and the line of a run, which loads libraries first; no-op if they are started already.

    ``began_s``: when the command began, in seconds since 1970; now by default. ``quiet``: show no line.
    """
    global _startup
    if _startup.line is None:
        now_s = time.time()
        line = ActivityLine(Console(quiet=True) if quiet else open_console())
        line.switch(LOADING["libraries"], 0.0 if began_s is None else now_s - began_s)
        line.start()
        _startup = Startup(now_s if began_s is None else began_s, line=line)


def end_startup() -> Startup:
    """Stop the line; returns the clock. Without a startup, the command begins now."""
    global _startup
    ended, _startup = _startup, Startup(0.0)
    if ended.line is None:
        return Startup(time.time())
    ended.line.stop()
    ended.line = None
    ended.switch("")
    return ended
