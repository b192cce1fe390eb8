"""Servers that tests start, and waiting for them."""

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from magrpo.process.ports import find_free_ports
from tests.processes import stop_process, wait_until


def answers(url: str) -> bool:
    """Whether a server answers ``url`` with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


@contextmanager
def serve_handler(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Yield the port of a server on 127.0.0.1, in threads of this process, whose requests ``handler`` answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # how often it looks for its end
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(code: int, kind: str) -> Iterator[str]:
    """Yield the address of a server that answers everything with a status and ``{}`` of a content type."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", "2")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(b"{}")

        do_POST = do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with serve_handler(Handler) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serve_mlflow(folder: Path) -> Iterator[str]:
    """Yield the address of an MLflow server that answers, keeps everything in ``folder`` and is stopped afterwards."""
    [port] = find_free_ports(1)
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", f"{folder}/kept"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or answers(f"{url}/health"))
        assert process.poll() is None, log.read_text()
        yield url
    finally:
        stop_process(process)
