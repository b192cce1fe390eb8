"""A Prefect server for one run, which starts and ends with the run.

Prefect's own ephemeral server survives a killed run and writes tracebacks between the run's lines. This server ends
with its parent, logs to a file, and starts while the run loads its libraries. The server process is
``python -m pipelines.flows.local_server PORT PARENT_PID [schedules]``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import httpx

from magrpo.config.services import hide_password
from magrpo.errors import ConfigError
from magrpo.files.locks import lock_folder
from magrpo.process.child import read_last_words
from magrpo.process.environment import prefect_target, reach_loopback_directly
from magrpo.process.parent import exit_with_parent
from magrpo.process.ports import find_free_ports
from magrpo.progress.activity import show_activity

_START_S = 120.0
_TIMEOUT_S = 5.0
_JSON = "application/json"
_NO_ADDRESS = "it is not an address such as http://127.0.0.1:4200/api"
_CHOSEN_S = 30.0
"""Seconds within which a server chosen by the user must answer."""


class ServerError(RuntimeError):
    """The Prefect server of a run did not start, or the server chosen by the user does not answer."""


class LocalServer:
    """A Prefect server on this machine with its database in ``home``. A no-op if the user has chosen a server.

    Use it as a context manager around the import of Prefect: entering sets ``PREFECT_HOME`` and ``PREFECT_API_URL``,
    which Prefect reads when it is imported, and exempts this machine from proxies; leaving restores the variables. With
    ``schedules`` the server also creates scheduled runs and serves Prefect's page.
    """

    def __init__(self, home: Path, *, schedules: bool = False) -> None:
        self._flags = ["schedules"] if schedules else []
        others = ", or unset the variable" if schedules else ", unset the variable, or run with --local"
        self._remedy = f"; start that server{others}"
        self._home = home.absolute()
        self._log = self._home / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        """Process of the server; None if the user has chosen a server."""
        self._variables: set[str] = set()
        self._is_ready = False

    def __enter__(self) -> LocalServer:
        if (chosen := prefect_target()) is not None:
            if not is_address(chosen):
                raise ConfigError(f"PREFECT_API_URL = {hide_password(chosen)!r}: {_NO_ADDRESS}{self._remedy}")
            return self
        reach_loopback_directly()
        before = set(os.environ) - {"PREFECT_API_URL"}
        os.environ.setdefault("PREFECT_HOME", str(self._home))
        self._home.mkdir(parents=True, exist_ok=True)
        [port] = find_free_ports(1)
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C must end the run but not the server, to which the run still reports its end.
            module = [sys.executable, "-m", "pipelines.flows.local_server"]
            command = [*module, str(port), str(os.getpid()), *self._flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        if not self._flags:
            os.environ.setdefault("PREFECT_UI_URL", "")  # no links to a page that is not served
        self._variables = set(os.environ) - before
        return self

    def wait_until_ready(self) -> None:
        """Return when the server answers.

        Raises ServerError if it ended or did not answer within two minutes, or half a minute for a server of the user.
        """
        url = prefect_target() or ""
        patience_s = _CHOSEN_S if self.process is None else _START_S
        deadline = time.monotonic() + patience_s
        while fault := find_fault(url):
            has_ended = self.process is not None and self.process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                raise ServerError(self._describe_failure(url, fault))
            time.sleep(0.1)
        self._is_ready = True

    def _describe_failure(self, url: str, fault: str) -> str:
        if self.process is None:
            return f"PREFECT_API_URL = {hide_password(url)!r}: {fault}{self._remedy}"
        words = read_last_words(self._log)
        last = f" ({words})" if words else ""
        other = "" if self._flags else ", or run with --local"
        return f"the Prefect server did not start{last}: see {self._log}{other}"

    def __exit__(self, *_: object) -> None:
        for name in self._variables:
            os.environ.pop(name, None)
        if self.process is not None:
            if self._is_ready:
                self.process.send_signal(signal.SIGINT)
            else:  # it reacts late to signals
                self.process.kill()
            with show_activity("stopping Prefect's server"):
                try:
                    self.process.wait(10)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()


def is_address(url: str) -> bool:
    """Whether ``url`` can be the address of Prefect's API."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


def find_fault(url: str) -> str:
    """Return why the Prefect API at ``url`` is unusable; empty if it answers."""
    if not is_address(url):
        return _NO_ADDRESS
    try:
        answer = httpx.get(f"{url.rstrip('/')}/health", timeout=_TIMEOUT_S)
    except httpx.TimeoutException:
        return "it does not answer"
    except httpx.HTTPError as error:
        return f"it does not answer ({error})"
    kind = answer.headers.get("content-type", "nothing").partition(";")[0]
    if answer.is_server_error or (answer.is_error and kind != _JSON):
        return f"it answers {answer.status_code}"
    return "" if kind == _JSON else f"it answers {kind}, so it is not Prefect's API; the address must end in /api"


def serve_api(port: int, parent: int, *, schedules: bool) -> None:
    """Serve Prefect's API until ``parent`` dies or SIGINT arrives.

    SIGTERM is ignored: systemd and Slurm send it to all processes of a run, which must still report its end.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job (&) starts with SIGINT ignored
    exit_with_parent(parent)
    import uvicorn  # a run that starts this process needs neither uvicorn nor prefect
    from prefect.server.api.server import create_app

    class ApiServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Start one server of a home at a time: if two create the tables at once, both fail."""
            home = Path(os.environ["PREFECT_HOME"])
            home.mkdir(parents=True, exist_ok=True)
            with lock_folder(home):
                await super().startup(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if sig == signal.SIGINT:
                super().handle_exit(sig, frame)

    app = create_app(ephemeral=not schedules, final=True)
    with suppress(KeyboardInterrupt):
        ApiServer(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="on")).run()


if __name__ == "__main__":
    serve_api(int(sys.argv[1]), int(sys.argv[2]), schedules="schedules" in sys.argv[3:])
