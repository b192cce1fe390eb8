"""The process that episodes are forked from: ``python -m magrpo.gateway.forkserver FORM FRESH RUN FOLDER``.

It imports the program once and forks workers, which all begin in the same state. A worker plays one episode at a time,
so a crash or a kill ends that episode alone. It then takes the next one, unless it left a thread or a process behind,
its program raised an exception, or every episode is to have a fresh process: forking costs more than a short episode.

Reads a line of JSON for each order on standard input, and writes one on its original standard output for each episode
that ended. When a worker ends, everything that its programs started ends, too, daemons included. When the input ends,
the process kills all workers and deletes FOLDER. Uses the standard library only, besides what the program imports.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from magrpo.gateway.agents import Agents, preload_request_codec
from magrpo.types import Problem

RAISED = 113
"""Exit status of a worker whose program raised an exception or cannot be started; few programs end with it."""
_LIBC = ctypes.CDLL(None)
_SET_PARENT_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of ``prctl``."""
_SET_CHILD_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of ``prctl``: descendants whose parent ends become children of this process."""
MAX_RESULT = 2**26
"""Longest result of a program as JSON, in bytes."""
_MAX_FILE_BYTES = 2**30
"""Largest file that an episode may write, so that a loop that prints does not fill the disk."""
Function = Callable[..., Any]
Order = Mapping[str, Any]


def load_function(run: str) -> Function:
    """Import the function that ``module:function`` names."""
    module, _, name = run.partition(":")
    function: Function = getattr(importlib.import_module(module), name)
    return function


def name_outputs(worker: int) -> tuple[str, str]:
    """Name the files of a worker, by number, that hold its current episode's standard output and standard error."""
    return f"{worker}.out", f"{worker}.err"


# ----------------------------------------------------------------------------------------------------------- worker
def work(
    orders: int, results: int, output_files: Sequence[Path], function: Function | None, run: str, *, fresh: bool
) -> NoReturn:
    """Play episodes in this process, a worker.

    ``orders`` and ``results`` are ends of pipes to the fork server; ``output_files``: see :func:`name_outputs`.
    """
    os.setsid()
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    _LIBC.prctl(_SET_CHILD_SUBREAPER, 1)  # so that it notices daemons, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    outputs = [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for file in output_files]
    os.dup2(outputs[0], 1)
    os.dup2(outputs[1], 2)
    home, streams = Path.cwd(), (sys.stdout, sys.stderr)
    with os.fdopen(orders) as lines, os.fdopen(results, "w") as given:
        for line in lines:
            for output in outputs:
                os.ftruncate(output, 0)
            os.chdir(home)
            result = _play(function, run, json.loads(line))
            remains = fresh or _has_remains(streams)
            given.write(json.dumps({"result": result, "ends": remains}) + "\n")
            given.flush()
            if remains:
                break
    os._exit(0)


def _play(function: Function | None, run: str, order: Order) -> str:
    """The program's result for one episode as JSON; ends the process if it is a command or raises an exception."""
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
        text = json.dumps(result)  # raises, as part of the program, if it is no JSON
        if len(text) > MAX_RESULT:
            raise ValueError(f"the program returned {len(text)} bytes; at most {MAX_RESULT} are possible")
    except BaseException:  # noqa: BLE001  # whatever ends the program is its result
        traceback.print_exc()
        _flush()
        os._exit(RAISED)
    _flush()
    return text


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the program may have closed or replaced it
            stream.flush()


def _has_remains(streams: Sequence[Any]) -> bool:
    """Whether the program left a thread or a process behind, or closed or replaced ``streams``, its output."""
    if threading.active_count() > 1 or any(getattr(stream, "closed", False) for stream in streams):
        return True
    if sys.stdout is not streams[0] or sys.stderr is not streams[1]:
        return True
    try:
        os.fstat(1)
        os.fstat(2)
    except OSError:
        return True
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass  # one that has ended
    except ChildProcessError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------- fork server
@dataclass
class EpisodeWorker:
    """A worker as the fork server sees it. ``episode``: the number of the one it plays; -1: none."""

    number: int
    pid: int
    orders: int
    results: int
    episode: int = -1
    received: bytearray = field(default_factory=bytearray)


class ForkServer:
    """Hands orders to workers, and reports the end of each episode. ``orders`` and ``reports`` are its pipes."""

    def __init__(
        self, run: str, function: Function | None, orders: int, reports: int, folder: Path, *, fresh: bool
    ) -> None:
        self._run, self._function, self._fresh = run, function, fresh
        self._orders, self._reports = orders, reports
        self._folder = folder
        self._workers: dict[int, EpisodeWorker] = {}
        """The living workers by process id."""
        self._idle: list[EpisodeWorker] = []
        self._num_workers = 0
        self._imported = _list_children()
        """Processes that the program started when it was imported, which all episodes may use."""

    def serve(self) -> None:
        """Take orders until the input ends."""
        _LIBC.prctl(_SET_CHILD_SUBREAPER, 1)  # so that it can kill what a worker leaves behind
        self._woken = woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the signal writes to the pipe
        waiting = b""
        with selectors.DefaultSelector() as self._selector:
            for end in (self._orders, woken):
                self._selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in self._selector.select():
                    if isinstance(key.data, EpisodeWorker):
                        is_buried = self._workers.get(key.data.pid) is not key.data  # a moment ago, in this loop
                        if not is_buried and not self._take_result(key.data):
                            self._selector.unregister(key.fd)  # its end is reported when it is buried
                    elif key.fd == woken:
                        os.read(woken, 1 << 12)
                        self._bury_workers()
                    else:
                        received = os.read(self._orders, 1 << 16)
                        if not received:
                            self._end_workers()
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
            _write_all(worker.orders, line + b"\n")

    def _fork(self) -> EpisodeWorker:
        orders, give = os.pipe()
        take, results = os.pipe()
        os.set_blocking(take, False)
        number, self._num_workers = self._num_workers, self._num_workers + 1
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            others = [end for worker in self._workers.values() for end in (worker.orders, worker.results)]
            for end in (give, take, self._orders, self._reports, *self._woken, *others):
                os.close(end)
            output_files = [self._folder / name for name in name_outputs(number)]
            work(orders, results, output_files, self._function, self._run, fresh=self._fresh)
        os.close(orders)
        os.close(results)
        worker = self._workers[pid] = EpisodeWorker(number, pid, give, take)
        self._selector.register(take, selectors.EVENT_READ, worker)
        return worker

    def _take_result(self, worker: EpisodeWorker) -> bool:
        """Read a part of a result; returns whether there was one."""
        try:
            received = os.read(worker.results, 1 << 16)
        except BlockingIOError:  # a daemon holds the other end
            return False
        if not received:
            return False
        worker.received += received
        if received.endswith(b"\n"):
            given = json.loads(worker.received)
            worker.received.clear()
            self._report(worker, 0, given["result"], ends=given["ends"])
            if not given["ends"]:
                self._idle.append(worker)
        return True

    def _report(self, worker: EpisodeWorker, status: int, result: str = "null", *, ends: bool = True) -> None:
        report = {"episode": worker.episode, "exit": status, "worker": worker.number, "result": result, "ends": ends}
        worker.episode = -1
        _write_all(self._reports, json.dumps(report).encode() + b"\n")

    def _bury_workers(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid not in self._workers:  # a daemon
                continue
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what the program started and left behind
            worker = self._workers.pop(pid)
            while self._take_result(worker):
                pass  # what it wrote before it ended
            if worker.results in self._selector.get_map():
                self._selector.unregister(worker.results)
            if worker in self._idle:
                self._idle.remove(worker)
            if worker.episode >= 0:
                self._report(worker, os.waitstatus_to_exitcode(status))
            os.close(worker.orders)
            os.close(worker.results)
        self._kill_daemons()

    def _kill_daemons(self) -> list[int]:
        """Kill what workers that have ended left behind outside of their process groups; returns the process ids."""
        daemons = [pid for pid in _list_children() if pid not in self._workers and pid not in self._imported]
        for pid in daemons:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return daemons

    def _end_workers(self) -> None:
        """Kill all workers and all that the program started, and wait for their end."""
        for pid in self._workers:
            _kill_group(pid)
        self._workers.clear()
        self._imported.clear()
        while ended := self._kill_daemons():  # the workers, then their daemons
            for pid in ended:
                os.waitpid(pid, 0)


def _write_all(pipe: int, line: bytes) -> None:
    """Write a line to a pipe. A signal interrupts a write to a full pipe, which may then have taken a part."""
    left = memoryview(line)
    while left:
        left = left[os.write(pipe, left) :]


def _list_children() -> list[int]:
    """The children of this process; none on a kernel that does not list them (``CONFIG_PROC_CHILDREN``)."""
    with suppress(FileNotFoundError):
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text(encoding="ascii").split()]
    return []


def _kill_group(pid: int) -> None:
    """Kill a worker and everything in its process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # the worker leads no group until it has called setsid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Import the program, report that it is ready, and serve."""
    form, fresh, run, folder = sys.argv[1:]
    orders, reports = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the program gets no input, neither while it is imported
    os.dup2(2, 1)  # what it prints while it is imported goes to the log
    function = load_function(run) if form == "function" else None
    preload_request_codec()
    gc.collect()
    gc.freeze()  # workers share the pages of what was imported
    os.write(reports, b'{"ready": true}\n')
    ForkServer(run, function, orders, reports, Path(folder), fresh=fresh == "fresh" or function is None).serve()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
