"""Processes that compute functions of bytes, so that the CPU of a run's own process does not limit it."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock

from magrpo.fleets import ProcessDied
from magrpo.fleets.process import Child, share_paths

Function = Callable[[bytes], bytes]
"""A pure function, defined at the top level of a module."""
_DEADLINE_S = 600.0
"""Maximum duration of one call."""


class Workers:
    """``count`` processes, started at the first call. Several threads may use them."""

    def __init__(self, count: int, logs: Path | None = None) -> None:
        self.count = count
        folder = logs or Path(tempfile.mkdtemp(prefix="magrpo-workers-"))
        self._workers = [_Worker(folder / f"worker-{number}.log") for number in range(count)]
        self._threads = ThreadPoolExecutor(count, "magrpo-worker")

    def call(self, function: Function, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """The answer of ``function`` to each message, by number; equal numbers always meet the same process.

        Raises what ``function`` raises, and ProcessDied if a process died twice over one message.
        """
        lanes = [self._threads.submit(self._call_one, function, messages, lane) for lane in range(self.count)]
        answers = {number: answer for lane in lanes for number, answer in lane.result().items()}
        return {number: answers[number] for number in messages}

    def close(self) -> None:
        """End the processes. May be called twice."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def _call_one(self, function: Function, messages: Mapping[int, bytes], lane: int) -> dict[int, bytes]:
        worker = self._workers[lane]
        return {n: worker.call(function, message) for n, message in messages.items() if n % self.count == lane}


class _Worker:
    """One process; a second one if the first dies."""

    def __init__(self, log: Path) -> None:
        self._log, self._lock, self._closed = log, Lock(), False
        self._child: Child | None = None

    def call(self, function: Function, message: bytes) -> bytes:
        question = pickle.dumps((function, message))
        with self._lock:
            try:
                answer = self._ask(question)
            except ProcessDied:
                answer = self._ask(question)
        result, error = pickle.loads(answer)
        if error is not None:
            raise error
        assert isinstance(result, bytes)
        return result

    def close(self) -> None:
        self._closed = True
        if (child := self._child) is not None:
            child.kill()

    def _ask(self, question: bytes) -> bytes:
        if self._closed:
            raise ProcessDied("the worker is closed")
        if self._child is None or self._child.died:
            self._child = self._start()
        with self._child.enforce_deadline(_DEADLINE_S):
            self._child.send(question)
            return self._child.receive()

    def _start(self) -> Child:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        child = Child([sys.executable, "-P", "-m", "magrpo.fleets.workers"], self._log, share_paths())
        child.name = "a worker"
        return child


def answer_calls(channel: Connection) -> None:
    """Answer the calls of :class:`Workers` until it hangs up."""
    while True:
        try:
            function, message = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((function(message), None))
        except Exception as error:  # noqa: BLE001  # raised again by the caller
            answer = pickle.dumps((None, error))
        channel.send_bytes(answer)


if __name__ == "__main__":
    answer_calls(Connection(int(sys.argv[1])))
