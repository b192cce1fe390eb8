"""Fleets: what starts the heavy processes of a run, on this machine or on a cluster, and watches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class ProcessDied(RuntimeError):
    """A process of the fleet ended, or did not become ready. The message has its last words and names its log."""


@dataclass(frozen=True, slots=True)
class Job:
    """Copies of one command, which a fleet starts and watches as one.

    In the command and the environment ``{number}`` stands for the number of the copy, from 0, ``{port}`` for a free TCP
    port of its node and ``{host}`` for its node's address; ``{first_host}`` and ``{first_port}`` are those of copy 0.
    """

    name: str
    """In messages and names of logs."""
    command: tuple[str, ...]
    count: int = 1
    gpus: int = 0
    """GPUs of each copy; the fleet sets CUDA_VISIBLE_DEVICES, to nothing with 0."""
    shares_gpus: bool = False
    """Whether its GPUs may also be those of other jobs that share: processes that use them by turns. Only a local
    fleet shares."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""
    logs: Path = Path("logs")
    """Folder for the output of each copy, ``<name>-<number>.<attempt>.log``; readable from the driver."""


class Running(Protocol):
    """One started copy of a job."""

    number: int
    host: str
    """Address under which the driver reaches its node."""
    port: int
    """The free port it was given."""
    log: Path

    def exit_status(self) -> int | None:
        """The status it ended with, as a shell counts it; None while it runs."""

    def last_words(self) -> str:
        """The last error in its log, on one line."""

    def stop(self) -> None:
        """Kill it and everything it started; returns when all of it is gone. May be called twice."""


class Fleet(Protocol):
    """Starts commands and watches them. Whatever it started ends with this process, ``kill -9`` included."""

    host: str
    """Address under which its processes reach this one."""

    def start(self, job: Job) -> Sequence[Running]:
        """Start all copies of ``job``; returns at once. Raises ProcessDied if a copy cannot be placed."""

    def close(self) -> None:
        """Stop everything that was started. May be called twice."""
