"""A web server on this machine that keeps the notices that apprise posts to it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.servers import serve_handler


class Receiver:
    """``url`` takes notices; ``status`` is what it answers, ``hold`` keeps it from answering."""

    def __init__(self, port: int) -> None:
        self.url = f"json://127.0.0.1:{port}/hooks/s3cret"
        self.posted: list[dict[str, Any]] = []
        """The notices: ``title``, ``type``, ``run_id``, and the lines of the message by their names."""
        self.status = 204
        self.hold = threading.Event()
        self.hold.set()

    def notices(self, run_id: str) -> list[dict[str, Any]]:
        """The notices of a run, oldest first."""
        return [notice for notice in self.posted if notice["run_id"] == run_id]


def _read_notice(body: dict[str, Any]) -> dict[str, Any]:
    lines = dict(re.split(r": +", line, maxsplit=1) for line in body["message"].splitlines())
    return {"title": body["title"], "type": body["type"], "run_id": body["title"].split()[2], **lines}


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Serve until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            receiver.hold.wait(30)
            if self.path == "/hooks/s3cret":
                receiver.posted.append(_read_notice(body))
            self.send_response(receiver.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with serve_handler(Handler) as port:
        receiver = Receiver(port)
        try:
            yield receiver
        finally:
            receiver.hold.set()
