"""A schedule that ``magrpo schedule`` serves, and runs started from its deployment."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.pipelines.micro import command, prefect, start
from tests.processes import wait_until


class Schedule:
    """``magrpo schedule`` of a run that is never due, in a process of its own."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str]) -> None:
        self.log = folder / f"{name}.log"
        self.log.touch()
        flags = ["--cron", "0 0 29 2 *", "--name", name]
        self.process: multiprocessing.Process = start(["schedule", *arguments, *flags], self.log)
        self.url = ""

    def begin(self, parameters: Sequence[str]) -> UUID:
        """Start a run from the deployment by Prefect's command, with the given parameters; returns its id."""
        wait_until(lambda: "Ctrl-C" in self.log.read_text() or not self.process.is_alive())
        found = re.search("PREFECT_API_URL=(\\S+) prefect deployment run '(\\S+)'", self.log.read_text())
        assert found, self.log.read_text()
        self.url, deployment = found.groups()
        words = [word for text in parameters for word in ("--param", text)]
        environment, log = {"PREFECT_API_URL": self.url}, self.log.with_suffix(".begin.log")
        assert command(["deployment", "run", deployment, *words], log, None, prefect, environment) == 0, log.read_text()
        return UUID(re.findall(r"UUID: (\S+)", log.read_text())[-1])

    @contextmanager
    def open_client(self) -> Iterator[Any]:
        with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as client:
            yield client

    def wait_for_end(self, run: UUID) -> str:
        """The name of the flow run's last state."""

        def read_state() -> Any:
            with self.open_client() as client:
                return client.read_flow_run(run).state

        wait_until(lambda: read_state().is_final())
        return str(read_state().name)

    def stop(self) -> None:
        """End it by Ctrl-C."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)
        self.process.join(600)
        assert self.process.exitcode == 0, self.log.read_text()


@contextmanager
def serve_schedule(folder: Path, name: str, arguments: Sequence[str]) -> Iterator[Schedule]:
    """Serve a schedule; nothing of it is left after the block."""
    schedule = Schedule(folder, name, arguments)
    try:
        yield schedule
        schedule.stop()
    finally:
        schedule.process.kill()
