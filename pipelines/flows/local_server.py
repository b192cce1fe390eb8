"""A Prefect server for one run: started with it, gone with it, whatever ends it.

Prefect can start such a server by itself, but that one survives a killed run and writes its tracebacks between the
run's own lines. This one is killed by the kernel when its parent dies, logs to a file, and starts while the run loads
its libraries. ``python -m pipelines.flows.local_server PORT PARENT_PID [schedules]`` is the process itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from pipelines.environment import LOOPBACK, prefect_target, reach_loopback_directly

_PR_SET_PDEATHSIG = 1
_START_S = 120.0


class ServerError(RuntimeError):
    """A run's own Prefect server did not start. The message names its log."""


class LocalServer:
    """A Prefect server on this machine with its database in ``home``; nothing at all if the user has one already.

    Use as a context manager around the import of Prefect: entering sets ``PREFECT_HOME`` and ``PREFECT_API_URL``,
    which Prefect reads when it is imported; leaving takes them back. From then on no proxy of the environment is used
    for this machine (:func:`pipelines.environment.reach_loopback_directly`). ``schedules``: it also makes the runs that
    schedules ask for, and has Prefect's page.
    """

    def __init__(self, home: Path, *, schedules: bool = False) -> None:
        self._more = ["schedules"] if schedules else []
        self.home = home.absolute()
        self.log = self.home / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._variables: set[str] = set()

    def __enter__(self) -> LocalServer:
        if prefect_target() is not None:
            return self
        reach_loopback_directly()
        before = set(os.environ) - {"PREFECT_API_URL"}
        os.environ.setdefault("PREFECT_HOME", str(self.home))
        self.home.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "pipelines.flows.local_server", str(self._port), str(os.getpid()), *self._more]
        with self.log.open("ab") as log:
            # Its own session: Ctrl-C ends the run, which then still has a server to tell.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{self._port}/api"
        if not self._more:
            os.environ.setdefault("PREFECT_UI_URL", "")  # so that nothing links to a page that is not there
        self._variables = set(os.environ) - before
        return self

    @property
    def starts(self) -> bool:
        """Whether there was no server before: this one is being started."""
        return self._process is not None

    def wait(self) -> None:
        """Return when the server answers.

        Raises:
            ServerError: it ended, or did not answer within two minutes.
        """
        if self._process is None:
            return
        deadline = time.monotonic() + _START_S
        while not healthy(f"http://127.0.0.1:{self._port}/api/health"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"the Prefect server did not start: see {self.log}, or run with --local, without it")
            time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        for name in self._variables:
            os.environ.pop(name, None)  # a user's own is not among them
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def healthy(url: str) -> bool:
    """Whether a server answers at ``url`` that all is well. On this machine it is asked without a proxy."""
    proxies: dict[str, str] | None = (
        {} if urlsplit(url).hostname in LOOPBACK else None
    )  # None: those of the environment
    try:
        with build_opener(ProxyHandler(proxies)).open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, TimeoutError, ConnectionError):
        return False


def serve(port: int, parent: int, *, schedules: bool) -> None:
    """Serve Prefect's API until ``parent`` dies or a signal comes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        return
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=not schedules, final=True)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", lifespan="on")


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), schedules="schedules" in sys.argv[3:])
