"""The process that episodes are forked from: ``python -m magrpo.gateway.forkserver FORM FRESH RUN FOLDER``.

It imports the program once and forks workers, which all begin in the same state. A worker plays one episode at a time,
so a crash or a kill ends that episode alone. It then takes the next one, unless it left a thread or a process behind,
its program raised an exception, or every episode is to have a fresh process: forking costs more than a short episode.

Reads a line of JSON for each order on standard input, and writes one on its original standard output for each episode
that ended. When its input ends, it kills all workers with their process groups, and deletes FOLDER. Uses the standard
library only, besides what the program imports.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import inspect
import json
import os
import random
import resource
import selectors
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from magrpo.gateway.agents import Agents, warm_up
from magrpo.types import Problem

RAISED = 3
"""Exit status of a worker whose program raised an exception."""
_LIBC = ctypes.CDLL(None)
_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of ``prctl``."""
_MAX_FILE_BYTES = 2**30
"""Largest file that an episode may write, so that a loop that prints does not fill the disk."""
Function = Callable[..., Any]
Order = Mapping[str, Any]


def load_function(run: str) -> Function:
    """Import the function that ``module:function`` names."""
    module, _, name = run.partition(":")
    function: Function = getattr(importlib.import_module(module), name)
    return function


def name_output(worker: int) -> str:
    """Name the file that holds what the current episode of a worker, by process id, has printed."""
    return f"{worker}.txt"


# ----------------------------------------------------------------------------------------------------------- worker
def work(orders: int, results: int, output_file: Path, function: Function | None, run: str, *, fresh: bool) -> NoReturn:
    """Play episodes in this process, a worker. ``orders`` and ``results`` are ends of pipes to the fork server."""
    os.setsid()
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    home = Path.cwd()
    with os.fdopen(orders) as lines, os.fdopen(results, "w") as given:
        for line in lines:
            os.ftruncate(output, 0)
            os.chdir(home)
            result = _play(function, run, json.loads(line))
            remains = fresh or _has_remains()
            given.write(json.dumps({"result": result, "ends": remains}) + "\n")
            given.flush()
            if remains:
                break
    os._exit(0)


def _play(function: Function | None, run: str, order: Order) -> Any:
    """The result of the program for one episode; ends the process if it is a command or raises an exception."""
    agents = Agents(order["url"], order["token"], order["agents"], order["seed"])
    agents.export()
    try:
        if function is None:
            command = shlex.split(run.replace("{problem_file}", shlex.quote(order["problem_file"])))
            os.execvp(command[0], command)
        random.seed(agents.seed)
        result = function(Problem(**order["problem"]), agents)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait_for(result))
        json.dumps(result)  # raises, as part of the program, if it is no JSON
    except BaseException:  # noqa: BLE001  # whatever ends the program is its result
        traceback.print_exc()
        _flush()
        os._exit(RAISED)
    _flush()
    return result


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _flush() -> None:
    with suppress(OSError, ValueError):  # the program may have closed them
        sys.stdout.flush()
        sys.stderr.flush()


def _has_remains() -> bool:
    """Whether the program left a thread or a process behind."""
    if threading.active_count() > 1:
        return True
    try:
        return os.waitpid(-1, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


# ------------------------------------------------------------------------------------------------------- fork server
@dataclass
class Worker:
    """A worker as the fork server sees it. ``episode``: the number of the one it plays; -1: none."""

    pid: int
    orders: int
    results: int
    episode: int = -1
    received: bytes = b""


class ForkServer:
    """Hands orders to workers, and reports the end of each episode."""

    def __init__(self, run: str, function: Function | None, reports: int, folder: Path, *, fresh: bool) -> None:
        self._run, self._function, self._reports, self._fresh = run, function, reports, fresh
        self._folder = folder
        self._workers: dict[int, Worker] = {}
        """The living workers by process id."""
        self._idle: list[Worker] = []

    def serve(self) -> None:
        """Take orders until the input ends."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the signal writes to the pipe
        waiting = b""
        with selectors.DefaultSelector() as self._selector:
            for end in (0, woken):
                self._selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in self._selector.select():
                    if isinstance(key.data, Worker):
                        self._take_result(key.data)
                    elif key.fd == woken:
                        os.read(woken, 1 << 12)
                        self._bury_workers()
                    else:
                        received = os.read(0, 1 << 16)
                        if not received:
                            for pid in self._workers:
                                _kill_group(pid)
                            return
                        *lines, waiting = (waiting + received).split(b"\n")
                        for line in lines:
                            self._obey(line)

    def _obey(self, line: bytes) -> None:
        order = json.loads(line)
        if "kill" in order:
            for worker in self._workers.values():
                if worker.episode == order["kill"]:
                    _kill_group(worker.pid)
            return
        worker = self._idle.pop() if self._idle else self._fork()
        worker.episode = order["episode"]
        with suppress(BrokenPipeError):  # the worker has just died, which will be reported as the end of this episode
            os.write(worker.orders, line + b"\n")

    def _fork(self) -> Worker:
        orders, give = os.pipe()
        take, results = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (give, take, *(worker.orders for worker in self._workers.values())):
                os.close(other)
            output = self._folder / name_output(os.getpid())
            work(orders, results, output, self._function, self._run, fresh=self._fresh)
        os.close(orders)
        os.close(results)
        worker = self._workers[pid] = Worker(pid, give, take)
        self._selector.register(take, selectors.EVENT_READ, worker)
        return worker

    def _take_result(self, worker: Worker) -> None:
        received = os.read(worker.results, 1 << 16)
        if not received:  # its end is reported when it is buried
            self._selector.unregister(worker.results)
            return
        worker.received += received
        if worker.received.endswith(b"\n"):
            given = json.loads(worker.received)
            worker.received = b""
            self._report(worker, 0, given["result"])
            if not given["ends"]:
                self._idle.append(worker)

    def _report(self, worker: Worker, status: int, result: Any = None) -> None:
        report = {"episode": worker.episode, "exit": status, "worker": worker.pid, "result": result}
        worker.episode = -1
        line = memoryview(json.dumps(report).encode() + b"\n")
        while line:
            line = line[os.write(self._reports, line) :]

    def _bury_workers(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what the program started and left behind
            worker = self._workers.pop(pid)
            while worker.results in self._selector.get_map():
                self._take_result(worker)  # what it wrote before it ended
            if worker in self._idle:
                self._idle.remove(worker)
            if worker.episode >= 0:
                self._report(worker, os.waitstatus_to_exitcode(status))
            os.close(worker.orders)
            os.close(worker.results)


def _kill_group(pid: int) -> None:
    """Kill a worker and everything in its process group, of which it may not be the leader yet."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
            return


def main() -> None:
    """Import the program, report that it is ready, and serve."""
    form, fresh, run, folder = sys.argv[1:]
    reports = os.dup(1)
    os.dup2(2, 1)  # what the program prints while it is imported goes to the log
    function = load_function(run) if form == "function" else None
    warm_up()
    gc.collect()
    gc.freeze()  # workers share the pages of what was imported
    os.write(reports, b'{"ready": true}\n')
    ForkServer(run, function, reports, Path(folder), fresh=fresh == "fresh" or function is None).serve()
    shutil.rmtree(folder, ignore_errors=True)  # here, because the run may have been killed


if __name__ == "__main__":
    main()
