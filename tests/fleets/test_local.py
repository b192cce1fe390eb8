"""The local fleet: copies, placeholders, GPUs, logs, ends."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from magrpo.fleets import Job, ProcessDied, Running
from magrpo.fleets.local import LocalFleet, find_free_ports

TELL = (
    "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['ADDED'], os.environ['CUDA_VISIBLE_DEVICES']]))"
)


@pytest.fixture
def fleet() -> Iterator[LocalFleet]:
    fleet = LocalFleet()
    yield fleet
    fleet.close()
    fleet.close()


def make_job(folder: Path, code: str, *arguments: str, **changes: object) -> Job:
    return Job("echo", (sys.executable, "-c", code, *arguments), logs=folder / "logs", **changes)  # type: ignore[arg-type]


def wait_for_end(process: Running) -> int:
    deadline = time.monotonic() + 300
    while (status := process.exit_status()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return status


def test_each_copy_is_told_its_number_and_addresses(fleet: LocalFleet, tmp_path: Path) -> None:
    arguments = ("{number}", "{host}:{port}", "{first_host}:{first_port}", '{"kept": {}}')
    copies = fleet.start(make_job(tmp_path, TELL, *arguments, count=2, environment={"ADDED": "no. {number}"}))
    assert [copy.number for copy in copies] == [0, 1]
    assert copies[0].port != copies[1].port
    first = f"{fleet.host}:{copies[0].port}"
    for number, copy in enumerate(copies):
        assert wait_for_end(copy) == 0
        assert copy.log == tmp_path / "logs" / f"echo-{number}.0.log"
        told = [[str(number), f"{copy.host}:{copy.port}", first, '{"kept": {}}'], f"no. {number}", ""]
        assert json.loads(copy.log.read_text()) == told


def test_each_attempt_has_its_log_and_a_failure_its_last_words(fleet: LocalFleet, tmp_path: Path) -> None:
    job = make_job(tmp_path, "raise SystemExit(int(input()))")
    for attempt in range(2):
        [copy] = fleet.start(job)
        assert wait_for_end(copy) == 1
        assert copy.last_words() == "EOFError: EOF when reading a line"
        assert copy.log.name == f"echo-0.{attempt}.log"


def test_a_command_that_is_not_there_ends_with_its_name(fleet: LocalFleet, tmp_path: Path) -> None:
    [copy] = fleet.start(Job("echo", ("/no/such/command",), logs=tmp_path))
    assert wait_for_end(copy) == 1
    assert "/no/such/command" in copy.last_words()


def test_a_closed_fleet_starts_nothing(fleet: LocalFleet, tmp_path: Path) -> None:
    """A thread that replaces a lost process may ask for it late: nobody would stop that one."""
    fleet.close()
    with pytest.raises(ProcessDied, match="echo: the fleet is closed"):
        fleet.start(make_job(tmp_path, ""))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("by", ["stop", "close"])
def test_stopping_ends_what_was_started(fleet: LocalFleet, tmp_path: Path, by: str) -> None:
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    copies = fleet.start(make_job(tmp_path, code, count=2))
    deadline = time.monotonic() + 60
    while not all(copy.log.read_text().endswith("\n") for copy in copies):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    families = [psutil.Process(int(copy.log.read_text())) for copy in copies]
    assert all(copy.exit_status() is None for copy in copies)
    if by == "close":
        fleet.close()
    else:
        copies[0].stop()
        copies[0].stop()
        assert copies[1].exit_status() is None
        copies[1].stop()
    assert all(copy.exit_status() == 143 for copy in copies)
    assert not any(process.is_running() for process in families)


def test_gpus_are_dealt_once_unless_jobs_share_them(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    sleep = "import time; time.sleep(600)"
    servers = fleet.start(make_job(tmp_path, sleep, count=2, gpus=1, shares_gpus=True))
    assert [server.gpus for server in servers] == [["2"], ["3"]]
    with pytest.raises(ProcessDied, match="2 processes with 1 GPUs each need 2 free GPUs; this machine has 1 free"):
        fleet.start(make_job(tmp_path, sleep, count=2, gpus=1))
    [ranks] = fleet.start(make_job(tmp_path, sleep, gpus=3, shares_gpus=True))
    assert sorted(ranks.gpus) == ["2", "3", "5"]
    for process in (*servers, ranks):
        process.stop()
    [alone] = fleet.start(make_job(tmp_path, sleep, gpus=3))
    assert sorted(alone.gpus) == ["2", "3", "5"]
    with pytest.raises(ProcessDied, match="0 free of 3"):
        fleet.start(make_job(tmp_path, sleep, gpus=1, shares_gpus=True))


def test_a_machine_without_gpus_says_so(fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProcessDied, match="0 free of 0"):
        fleet.start(make_job(tmp_path, "", gpus=1))


def test_ports_are_free_and_differ() -> None:
    with socket.create_server(("", 0)) as taken:
        ports = find_free_ports(200)
        assert len({*ports, taken.getsockname()[1]}) == 201
