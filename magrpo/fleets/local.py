"""``LocalFleet``: starts and watches the processes of a run on this machine."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
from collections.abc import MutableSequence, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from magrpo.fleets import Job, ProcessDied, Running
from magrpo.fleets.process import Kept, read_last_words, start_kept

RunningT = TypeVar("RunningT", bound=Running)
_PORTS = range(20_000, 32_768)
"""Ports to give: above those of Ray's workers, below those the kernel takes for outgoing connections."""


class LocalFleet:
    """A :class:`magrpo.fleets.Fleet` on this machine."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[LocalProcess] = []
        self._closed = False

    def start(self, job: Job) -> Sequence[LocalProcess]:
        """Start all copies of ``job``. Raises ProcessDied if it has too few GPUs for them, or is closed."""
        with self._lock, ExitStack() as undo:
            if self._closed:
                raise make_refusal(job)
            places = self._choose_gpus(job)
            ports = find_free_ports(len(places))
            first = (self.host, ports[0])
            copies: list[LocalProcess] = []
            for number, (gpus, port) in enumerate(zip(places, ports, strict=True)):
                copies.append(LocalProcess(Assignment(job, number, (self.host, port), first), gpus))
                undo.callback(copies[-1].stop)
            undo.pop_all()
            self._running += copies
        return copies

    def close(self) -> None:
        """Stop everything that was started. May be called twice."""
        with self._lock:
            self._closed = True
            stop_together(self._running)

    def _choose_gpus(self, job: Job) -> list[list[str]]:
        """The GPUs of each copy: free ones, or for a job that shares the least used among those of jobs that share."""
        if not job.gpus:
            return [[] for _ in range(job.count)]
        self._running = [process for process in self._running if process.exit_status() is None]
        uses = dict.fromkeys(list_gpus(), 0)
        for process in self._running:
            for gpu in process.gpus:
                uses[gpu] += 1 if job.shares_gpus and process.assignment.job.shares_gpus else 1_000_000
        usable = [gpu for gpu in uses if uses[gpu] < 1_000_000]
        if len(usable) < job.gpus * job.count:
            raise ProcessDied(
                f"{job.name}: {job.count} processes with {job.gpus} GPUs each need {job.gpus * job.count} free GPUs; "
                f"this machine has {len(usable)} free of {len(uses)}"
            )
        usable.sort(key=lambda gpu: uses[gpu])
        return [usable[i * job.gpus : (i + 1) * job.gpus] for i in range(job.count)]


def make_refusal(job: Job) -> ProcessDied:
    """The error of a job that a closed fleet is asked to start."""
    return ProcessDied(f"{job.name}: the fleet is closed")


class Assignment:
    """One copy of a job and its addresses.

    Args:
        own: Address of the node of this copy, and the free port it gets.
        first: The same of copy 0.
    """

    def __init__(self, job: Job, number: int, own: tuple[str, int], first: tuple[str, int]) -> None:
        self.job, self.number, self.own, self.first = job, number, own, first

    def fill_in(self, text: str) -> str:
        """``text`` with the placeholders of :class:`magrpo.fleets.Job` replaced."""
        (host, port), (first_host, first_port) = self.own, self.first
        values = {"number": self.number, "host": host, "port": port, "first_host": first_host, "first_port": first_port}
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    def make_command(self) -> list[str]:
        return [self.fill_in(word) for word in self.job.command]

    def fill_in_environment(self) -> dict[str, str]:
        """What the job adds to the environment."""
        return {name: self.fill_in(value) for name, value in self.job.environment.items()}

    def make_log(self) -> Path:
        """Create the log of the next attempt at this copy."""
        self.job.logs.mkdir(parents=True, exist_ok=True)
        attempt = 0
        while True:
            log = self.job.logs / f"{self.job.name}-{self.number}.{attempt}.log"
            try:
                log.touch(exist_ok=False)
            except FileExistsError:
                attempt += 1
            else:
                return log


class LocalProcess:
    """A :class:`magrpo.fleets.Running` on this machine, with its keeper."""

    def __init__(self, assignment: Assignment, gpus: Sequence[str]) -> None:
        self.assignment, self.gpus = assignment, gpus
        self.number, (self.host, self.port) = assignment.number, assignment.own
        self.log = assignment.make_log()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), **assignment.fill_in_environment()}
        self._keeper: Kept = start_kept(assignment.make_command(), self.log, environment)

    def exit_status(self) -> int | None:
        return self._keeper.poll()

    def last_words(self) -> str:
        return read_last_words(self.log)

    def stop(self) -> None:
        self._keeper.terminate()
        self._keeper.wait()


def stop_together(running: MutableSequence[RunningT]) -> None:
    """Stop all processes at the same time and forget them; returns when they are gone."""
    threads = [threading.Thread(target=process.stop) for process in running]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    running.clear()


def find_free_ports(count: int) -> list[int]:
    """TCP ports that nothing on this machine listens at, drawn at random so that two askers rarely get the same."""
    ports: list[int] = []
    with ExitStack() as probes:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            probe = probes.enter_context(socket.socket())
            with suppress(OSError):  # in use
                probe.bind(("", port))
                ports.append(port)
    if len(ports) < count:
        raise ProcessDied(f"fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop - 1}")
    return ports


def list_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them, without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):  # no driver
        return []
    return listing.split()
