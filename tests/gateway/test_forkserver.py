"""The fork server alone, as it is left when the process that started it is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from tests.processes import assert_all_end, wait_until

PROGRAM = """
import os, subprocess, time
from pathlib import Path

helper = subprocess.Popen(["sleep", "100000"])  # a service for all episodes


def solve(problem, agents):
    folder = Path(problem.prompt)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (folder / "daemon").write_text(str(os.getpid()))
            time.sleep(1e6)
        os._exit(0)
    if problem.task_id == "hangs":
        (folder / "hangs").write_text(str(os.getpid()))
        time.sleep(1e6)
    (folder / "helper").write_text(str(helper.pid))
"""


@contextmanager
def start_server(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a ready fork server for the function of ``PROGRAM``, and close its input afterwards, which ends it."""
    (folder / "leaving.py").write_text(PROGRAM)
    files = folder / "files"
    files.mkdir()
    command = [sys.executable, "-m", "magrpo.gateway.forkserver", "function", "reused", "leaving:solve", str(files)]
    with subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert json.loads(server.stdout.readline()) == {"ready": True}
        yield server
        if not server.stdin.closed:
            server.stdin.close()


def send_order(server: subprocess.Popen[bytes], folder: Path, episode: int, task_id: str) -> None:
    problem = {"task_id": task_id, "prompt": str(folder)}
    order = {"episode": episode, "problem": problem, "url": "", "token": "", "agents": [], "seed": 1}
    assert server.stdin is not None
    server.stdin.write(json.dumps(order).encode() + b"\n")
    server.stdin.flush()


def read_report(output: IO[bytes] | None) -> dict[str, object]:
    assert output is not None
    report: dict[str, object] = json.loads(output.readline())
    return report


def test_it_ends_with_all_that_it_started_when_its_input_ends(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        send_order(server, tmp_path, 0, "hangs")
        files = [tmp_path / name for name in ("hangs", "daemon")]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        processes = [psutil.Process(int(file.read_text())) for file in files]
        processes += psutil.Process(server.pid).children()
        assert len(processes) == 4, "the worker is a child, and the service is another"
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait() == 0
        assert_all_end(processes)
        assert not (tmp_path / "files").exists()


def test_what_the_program_started_when_it_was_imported_stays(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        for episode in range(3):
            send_order(server, tmp_path, episode, "ends")
            report = read_report(server.stdout)
            assert (report["episode"], report["exit"], report["ends"]) == (episode, 0, True)
        helper = psutil.Process(int((tmp_path / "helper").read_text()))
        wait_until(lambda: psutil.Process(server.pid).children() == [helper])


def test_an_order_to_kill_what_does_not_run_is_no_fault(tmp_path: Path) -> None:
    with start_server(tmp_path) as server:
        send_order(server, tmp_path, 0, "ends")
        assert read_report(server.stdout)["exit"] == 0
        assert server.stdin is not None
        for episode in (0, 5):  # one that has ended, and one that never began
            server.stdin.write(json.dumps({"kill": episode}).encode() + b"\n")
        send_order(server, tmp_path, 1, "ends")
        assert read_report(server.stdout)["episode"] == 1
