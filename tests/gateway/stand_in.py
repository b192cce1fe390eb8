"""A stand-in for the gateway, whose agents answer what a test says, and virtual environments for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.servers import serve_handler

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "pipelines" / "examples"
Reply = Callable[[str, str], str]
"""Takes the name of an agent and the last message; returns its answer."""


def make_environment(folder: Path, requirements: str) -> str:
    """Make a virtual environment with the pins of a file under ``requirements/``; returns the path of its Python.

    Skips the test if pip cannot install them.
    """
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install_pins(requirements, python=str(folder / "bin" / "python"))
    return str(folder / "bin" / "python")


def install_pins(requirements: str, *options: str, python: str = sys.executable) -> None:
    """Install the pins of a file under ``requirements/``. Skips the test if pip cannot."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--retries", "1"]
    command = [*pip, *options, "-r", str(ROOT / "requirements" / requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install requirements/{requirements}: {done.stderr.strip().splitlines()[-1]}")


@contextmanager
def serve_replies(reply: Reply) -> Iterator[Mapping[str, str]]:
    """Serve chat completions; yields the environment variables by which a program finds the server."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": reply(request["model"], request["messages"][-1]["content"])}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": request["model"]}
            body = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with serve_handler(Handler) as port:
        yield {"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "key"}
