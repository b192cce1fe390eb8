"""A hub on this machine: the requests by which ``HfApi`` creates a repository and uploads a folder."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class FakeHub:
    """Repositories in memory: ``files[repository][path]``. ``status``: that of every answer, if it is not 200."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.status = 200
        self.url = ""

    def answer(self, path: str, body: bytes) -> Any:
        """The answer to a POST request."""
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.files.setdefault(name, {})
            self.private.setdefault(name, wanted.get("private", wanted.get("visibility") == "private"))
            return {"url": f"{self.url}/{name}"}
        repository = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            return {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
            }
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[repository][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del self.files[repository][value["path"]]
            return {"commitUrl": f"{self.url}/{repository}/commit/0", "commitOid": "0" * 40, "success": True}
        return {}

    def look_up(self, path: str) -> Any:
        """The answer to a GET request."""
        repository = "/".join(path.split("/")[3:5])
        siblings = [{"rfilename": file} for file in self.files.get(repository, {})]
        if "/tree/" in path:
            return [{"type": "file", "path": s["rfilename"], "size": 1, "oid": "0" * 40} for s in siblings]
        return {"id": repository, "siblings": siblings, "sha": "0" * 40, "private": True, "tags": []}


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let this process ask the hub at ``url``."""
    for name, value in {"ENDPOINT": url, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def reply(self, answer: Any) -> None:
            text = json.dumps(answer if hub.status == 200 else {"error": "no"}).encode()
            self.send_response(hub.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            self.reply(hub.answer(self.path, self.rfile.read(int(self.headers["Content-Length"]))))

        def do_HEAD(self) -> None:
            self.send_response(hub.status)
            self.end_headers()

        def do_GET(self) -> None:
            self.reply(hub.look_up(self.path))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
