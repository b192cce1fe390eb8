"""What a command is doing outside the stages of a run: a live line with seconds, or in a file a line every 15 s.

A command begins the clock of its run with :func:`begin_startup`, before it imports anything heavy, and names each part
with :func:`show_activity`. The run takes the clock over with :func:`end_startup`, through which it learns when the
command began and what loading cost.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Column
from rich.text import Text

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
    """Calls ``say`` from a thread whenever nothing was said for :data:`HEARTBEAT_S` seconds."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._over = threading.Event()
        self._said = monotonic()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="magrpo-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def note_output(self) -> None:
        """Something was said just now."""
        self._said = monotonic()

    def _beat(self) -> None:
        while not self._over.wait(max(self._said + HEARTBEAT_S - monotonic(), 0.1)):
            if monotonic() - self._said >= HEARTBEAT_S:
                self.note_output()
                self._say()


class LogAbove(logging.Handler):
    """Prints log messages of the project above a live line instead of through it, if ``shown``."""

    def __init__(self, console: Console, *, shown: bool) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        self._console = console
        self._loggers = [logging.getLogger(name) for name in ("magrpo", "pipelines") if shown]

    def attach(self) -> None:
        """Take messages over from the root logger."""
        for logger in self._loggers:
            logger.addHandler(self)
            logger.propagate = False

    def detach(self) -> None:
        """Give messages back to the root logger."""
        for logger in self._loggers:
            logger.removeHandler(self)
            logger.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        self._console.print(self.format(record), style=style, markup=False, soft_wrap=False)


class ActivityLine:
    """A line that names one activity at a time, with the seconds since it began."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.activity = ""
        self._began = monotonic()
        alive = self._alive = is_live(console)
        columns = SpinnerColumn(), _ActivityColumn(self.describe)
        # A terminal that shows both streams shows messages above the line.
        redirects = alive and sys.stderr.isatty()
        self._live = Progress(*columns, console=console, transient=True, disable=not alive, redirect_stderr=redirects)
        self._live.add_task("")
        self._heartbeat = Heartbeat(lambda: console.print(f"  {self.describe()}", markup=False))
        self._log_above = LogAbove(console, shown=redirects)

    def start(self) -> None:
        self._live.start()
        self._log_above.attach()
        if not self._alive:
            self._heartbeat.start()

    def stop(self) -> None:
        self._heartbeat.stop()
        self._log_above.detach()
        self._live.stop()

    def switch(self, activity: str, seconds: float = 0.0) -> None:
        """Name another activity, which has taken ``seconds`` so far."""
        self.activity, self._began = activity, monotonic() - seconds

    def describe(self) -> str:
        """``loading libraries, 4 s``."""
        return f"{self.activity}, {monotonic() - self._began:.0f} s"


class _ActivityColumn(ProgressColumn):
    """Rendered again whenever it is shown: the seconds go on."""

    max_refresh = 0.2

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))

    def render(self, task: Task) -> Text:
        return Text(self._describe())


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
