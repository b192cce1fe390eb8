"""Signals that end a command, and output that survives the loss of its reader.

SIGTERM and SIGHUP end a command as Ctrl-C does: by an exception in the main thread, so that whatever is open is closed.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO

_CTRL_C = 130


class EndedBySignal(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived; ``number`` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def describe_interrupt(error: KeyboardInterrupt) -> str:
    """``interrupted`` for Ctrl-C, or the signal by name: ``ended by SIGTERM``."""
    return f"ended by {error}" if isinstance(error, EndedBySignal) else "interrupted"


def find_exit_code(error: KeyboardInterrupt) -> int:
    """The exit code of a command that ``error`` ended, by the convention of shells: 128 plus the signal's number."""
    return 128 + error.number if isinstance(error, EndedBySignal) else _CTRL_C


def find_interrupt(error: BaseException | None) -> BaseException | None:
    """Find the interrupt that ``error`` is or during whose handling it was raised, for example by a second signal.

    Timeouts of asyncio and closed generators are no interrupts.
    """
    from asyncio import CancelledError  # asyncio takes a twentieth of a second, which --help need not spend

    while isinstance(error, Exception):
        error = error.__context__
        while isinstance(error, (CancelledError, GeneratorExit)):
            error = error.__context__
    return error


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is an interrupt, or was raised while one was handled."""
    return find_interrupt(error) is not None


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise EndedBySignal in the block on SIGTERM and SIGHUP, once. Does nothing outside the main thread.

    Signals that are ignored stay ignored, as SIGHUP under ``nohup``. An interrupt is sent again if it was lost, because
    it was raised in a callback of the garbage collector, from which exceptions cannot propagate.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = False

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal ending
        if not ending:  # a lost terminal sends SIGHUP twice, and the second must not interrupt the clean-up
            ending = True
            raise EndedBySignal(number)

    def send_again(lost: "sys.UnraisableHookArgs") -> None:
        nonlocal ending
        if issubclass(lost.exc_type, (Exception, SystemExit, GeneratorExit)):
            hook_before(lost)
            return
        ending = False
        if isinstance(lost.exc_value, KeyboardInterrupt):
            number = find_exit_code(lost.exc_value) - 128
        else:
            number = signal.SIGTERM  # Prefect raises an exception of its own
        again = threading.Timer(0.1, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    hook_before, sys.unraisablehook = sys.unraisablehook, send_again
    for number in numbers:
        if handlers[number] is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        sys.unraisablehook = hook_before
        for number in numbers:
            signal.signal(number, handlers[number])


class _SteadyFile(io.FileIO):
    """Drops output that cannot be written because its reader or terminal is gone, or its disk is full."""

    def write(self, data: object, /) -> int:
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        try:
            written = super().write(data)  # type: ignore[arg-type]
        except OSError:
            return size
        return size if written is None else written


@contextmanager
def keep_printing() -> Iterator[None]:
    """Let the block print even if standard output or error break meanwhile. Leaves replaced streams as they are."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        _make_steady(stream) if original is not None and stream is original else stream
        for stream, original in zip(before, (sys.__stdout__, sys.__stderr__), strict=True)
    )
    try:
        yield
    finally:
        for stream, steady in zip(before, (sys.stdout, sys.stderr), strict=True):
            if steady is not stream:
                steady.flush()
        sys.stdout, sys.stderr = before


def _make_steady(stream: TextIO) -> TextIO:
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_SteadyFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=bool(stream.line_buffering),
    )
