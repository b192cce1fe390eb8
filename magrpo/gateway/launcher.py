"""Starts the programs of episodes through the fork server, and reports how each ended."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import msgspec
import psutil

from magrpo.envs.program import AgentProgram
from magrpo.errors import ConfigError, PluginFailed
from magrpo.gateway.forkserver import MAX_RESULT, name_outputs
from magrpo.process.child import read_tail
from magrpo.types import Problem

IMPORT_LIMIT_S = 600
"""Time for the import of a program, in seconds; one that waits for what never comes would hang the run."""
_MAX_SHOWN = 2000
"""Largest part of the log, at its end, that a message may quote, in bytes."""
_MAX_REPORT = 4 * MAX_RESULT
"""Longest line that the fork server writes, in bytes: it quotes a result twice."""
_FOLDER_VARIABLE = "MAGRPO_EPISODES"
"""Environment variable that every process of a launcher inherits: the launcher's folder."""
_FILES_PER_EPISODE = 4
"""Open files that an episode may need here or in the fork server: its pipes there, and connections here."""
_FILES_BESIDE = 256
"""Open files of a run that are not those of episodes."""


class Ended(NamedTuple):
    """The end of a program: its exit status, negative for a signal; its worker, by number; and its result as JSON.

    ``ends``: the worker ends, too.
    """

    exit_status: int
    worker: int
    result: str
    ends: bool


class Launcher:
    """The fork server of one program. All methods run on one event loop."""

    def __init__(self, env: AgentProgram) -> None:
        self._env = env
        self.folder = Path(mkdtemp(prefix="magrpo-episodes-"))
        self._log = self.folder / "server.log"
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Ended]] = {}
        self._number = 0
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the fork server, which imports the program, unless it runs. Raises PluginFailed if that fails."""
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._end_server()
                await self._start()

    async def _start(self) -> None:
        allow_open_files(self._env.concurrency)
        form = "function" if self._env.is_function else "command"
        fresh = "fresh" if self._env.fresh_processes else "reused"
        command = (sys.executable, "-m", "magrpo.gateway.forkserver", form, fresh, self._env.run, str(self.folder))
        # Set iteration must not depend on chance, for the same program to ask the same.
        environment = {**os.environ, "PYTHONHASHSEED": "0", _FOLDER_VARIABLE: str(self.folder)}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                limit=_MAX_REPORT,
            )
        assert self._process.stdout is not None
        try:
            is_ready = await asyncio.wait_for(self._process.stdout.readline(), IMPORT_LIMIT_S)
        except (asyncio.CancelledError, TimeoutError) as error:
            self._process.kill()  # an import that does not end would not notice that its input ends
            if isinstance(error, asyncio.CancelledError):
                raise
            raise PluginFailed(
                f"env.run = {self._env.run!r} has not been imported after {IMPORT_LIMIT_S} s; its last output:\n"
                f"{self._quote_log()}"
            ) from None
        if not is_ready:
            await self._process.wait()
            raise PluginFailed(f"env.run = {self._env.run!r} cannot be started:\n{self._quote_log()}")
        self._reading = asyncio.ensure_future(self._read_reports(self._process.stdout))

    def run(self, problem: Problem, order: Mapping[str, Any]) -> tuple[int, asyncio.Future[Ended]]:
        """Order a program to start; returns its number, and its end once it has ended."""
        assert self._reading is not None
        if self._reading.done():
            raise self._lost()
        number, self._number = self._number, self._number + 1
        visible = msgspec.to_builtins(problem)
        del visible["hidden_test"]
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._waiting[number] = ended
        order = {"episode": number, "problem": visible, **order}
        if not self._env.is_function:
            order["problem_file"] = str(self._name_problem(number))
            self._name_problem(number).write_bytes(msgspec.json.encode(visible))
        self._write(order)
        return number, ended

    async def send_orders(self) -> None:
        """Wait until few orders are left that the fork server has not read."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # it has just died, which the ends of its programs will say
            await self._process.stdin.drain()

    def kill(self, number: int) -> None:
        """Kill a program and its process group."""
        if self._process is not None and self._process.returncode is None:
            self._write({"kill": number})

    def read_result(self, ended: Ended) -> Any:
        """What a function returned, or the last line of a command's standard output, as JSON. Raises ValueError."""
        is_function = self._env.is_function
        output, _ = name_outputs(ended.worker)
        text = ended.result if is_function else self._read_last_line(output)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            what = "what it returned cannot be read" if is_function else "the last line that it printed is not JSON"
            raise ValueError(f"{what}: {text[:200]!r}") from None

    def read_failure(self, ended: Ended) -> str:
        """The last line of the standard error of a program that failed; of its standard output if that is empty."""
        output, errors = name_outputs(ended.worker)
        return self._read_last_line(errors) or self._read_last_line(output)

    def _read_last_line(self, name: str) -> str:
        return read_tail(self.folder / name, MAX_RESULT).strip().rpartition("\n")[2]

    def forget(self, number: int, ended: Ended | None) -> None:
        """Delete the files of an episode. ``ended``: None if its end is not known."""
        self._name_problem(number).unlink(missing_ok=True)
        if ended is not None and ended.ends:
            for name in name_outputs(ended.worker):
                (self.folder / name).unlink(missing_ok=True)

    async def close(self) -> None:
        """Kill every program, and delete all files."""
        await self._end_server()
        if self._reading is not None:
            await self._reading
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _end_server(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()  # the fork server kills its children and ends
        if await self._process.wait() != 0:  # it was killed: its workers died with it, their daemons did not
            kill_processes_of(self.folder)

    def _name_problem(self, number: int) -> Path:
        return self.folder / f"problem-{number}.json"

    def _write(self, order: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def _read_reports(self, reports: asyncio.StreamReader) -> None:
        while line := await reports.readline():
            report = json.loads(line)
            ended = self._waiting.pop(report["episode"])
            if not ended.done():
                ended.set_result(Ended(report["exit"], report["worker"], report["result"], report["ends"]))
        waiting, self._waiting = self._waiting, {}
        for ended in waiting.values():
            if not ended.done():
                ended.set_exception(self._lost())

    def _lost(self) -> EpisodesLost:
        return EpisodesLost(f"the process that runs episodes died:\n{self._quote_log()}")

    def _quote_log(self) -> str:
        return read_tail(self._log, _MAX_SHOWN).strip()


def allow_open_files(concurrency: int) -> None:
    """Raise this process's limit of open files, and that of its children, to what ``concurrency`` episodes may need.

    Raises ConfigError if the system does not allow it.
    """
    needed = _FILES_BESIDE + _FILES_PER_EPISODE * concurrency
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"env.concurrency = {concurrency} may need {needed} open files, and this process may open {hard}: set it "
            f"to {max((hard - _FILES_BESIDE) // _FILES_PER_EPISODE, 1)} or less, or raise the limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def kill_processes_of(folder: Path) -> None:
    """Kill every process that the launcher with this folder started, directly or not."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(_FOLDER_VARIABLE) == str(folder):
                process.kill()


class EpisodesLost(ConnectionError):
    """The process that runs episodes died; another attempt at the stage may succeed."""
