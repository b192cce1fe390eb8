"""``Child``: a command that answers messages over a socket and is killed when it misses a deadline."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

_HANG_UP_S = 10.0
"""Seconds a child may take to end after it closed its end of the socket."""
_TAIL_BYTES = 65_536
"""Size of the end of a log in which last words are looked for."""


class ProcessDied(RuntimeError):
    """A child process ended unexpectedly. The message has its last words and names its log."""


class Child:
    """A command at the other end of a socket that carries whole messages.

    The number of the socket's file descriptor is appended to the command, which opens it as a
    ``multiprocessing.connection.Connection``. The command runs in a session of its own, so that an interrupt from the
    terminal does not reach it; it should call :func:`magrpo.process.parent.exit_with_parent`.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = "the child"  # in errors
        self.log = log
        """Receives the command's standard output and error."""
        self.died = False
        """Whether it ended otherwise than by :meth:`kill`."""
        self.missed_deadline_s: float | None = None
        """The deadline at which it was killed, in seconds; None if it missed none."""
        self.channel, theirs = Pipe()
        fd = theirs.fileno()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, str(fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(fd,),
                env=dict(environment),
            )
        theirs.close()

    @contextmanager
    def enforce_deadline(self, seconds: float) -> Iterator[None]:
        """Kill the child if the block takes longer: a send or receive that waits for it then raises."""

        def expire() -> None:
            self.missed_deadline_s = seconds
            self._kill_group()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def send(self, message: bytes) -> None:
        """Send one message. Raises ProcessDied if the child can no longer read it."""
        try:
            self.channel.send_bytes(message)
        except OSError:
            raise self._died() from None

    def receive(self) -> bytes:
        """Wait for the next message. Raises ProcessDied if there will be none."""
        try:
            return self.channel.recv_bytes()
        except (EOFError, OSError):
            raise self._died() from None

    def kill(self) -> None:
        """Kill the command and its process group, and wait for its end. May be called twice."""
        self._kill_group()
        self._process.wait()
        self.channel.close()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _died(self) -> ProcessDied:
        """Kill the process group; the error says why the child ended, with the end of its log."""
        self.died = True
        try:
            status = self._process.wait(timeout=_HANG_UP_S)
            why = f"ended with status {status if status >= 0 else 128 - status}"
        except subprocess.TimeoutExpired:
            why = "closed its connection"
        if self.missed_deadline_s is not None:
            why = f"was killed at its deadline of {self.missed_deadline_s:g} s"
        self.kill()
        last = read_last_words(self.log)
        return ProcessDied(f"{self.name} {why}{f' ({last})' if last else ''}; log: {self.log}")


def wait_for_children(children: Sequence[Child]) -> list[Child]:
    """Wait until one of the children has sent a message or died; returns all those whose ``receive`` will not wait."""
    if dead := [child for child in children if child.channel.closed]:
        return dead
    ready = wait([child.channel for child in children])
    return [child for child in children if child.channel in ready]


def read_last_words(log: Path) -> str:
    """The :func:`last_words` of a log file; empty if there is none."""
    return last_words(read_tail(log, _TAIL_BYTES))


def read_tail(path: Path, num_bytes: int) -> str:
    """The last ``num_bytes`` bytes of a text file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def last_words(log: str) -> str:
    """The last error in a log, joined into one line; without an error, its last line.

    vLLM on CUDA begins lines with ``[rank0]: ``, and PyTorch may append warnings after the error: both are left out.
    """
    ranked = (re.sub(r"^\[rank\d+\]:(?: |(?=\[))", "", line.rstrip()) for line in log.split("\n") if line.strip())
    lines = [line for line in ranked if not re.match(r"\[W\d{4} ", line)]
    errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b(.*:|$)", line)]
    start = errors[-1] if errors else -1
    return " ".join(line.strip() for line in lines[start:])[:400]
