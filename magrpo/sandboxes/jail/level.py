"""The isolation levels as one process applies them to itself; the rest of a level is how the jail was started."""

from __future__ import annotations

from . import confine, landlock, seccomp
from .confine import Limits

OWN_PROCESSES = 6
"""Processes of the jail itself that count against its user's limit: bubblewrap, zygote, tester, ready, dying."""


class Level:
    """What the zygote, each candidate and each tester do to themselves.

    Args:
        name: ``namespaces``, ``namespaces-flat``, ``landlock`` or ``none``.
        limits: of every candidate.
        readable: files and folders that Landlock lets a candidate read.

    Raises:
        OSError: the kernel does not offer what the level needs.
    """

    def __init__(self, name: str, limits: Limits, readable: list[str]) -> None:
        self.limits = limits
        self.namespaces = name == "namespaces"
        self.confined = name != "none"
        files = name == "landlock" or (name == "namespaces-flat" and landlock.version() > 0)
        self.candidate_files = landlock.Ruleset(readable) if files else None
        self.tester_files = landlock.Ruleset([*readable, "/proc"]) if files else None
        self.base = seccomp.base()
        self.candidate_calls = seccomp.foreign(alone=not self.namespaces)
        self.tester_calls = seccomp.foreign(alone=True)
        self.processes: int | None = None  # a level that refuses to fork needs no limit
        if self.namespaces:  # twice: those of the candidate before may not be gone yet
            self.processes = 2 * limits.processes + OWN_PROCESSES
        elif not self.confined:
            self.processes = confine.own_tasks() + 2 * limits.processes + OWN_PROCESSES

    def confine_zygote(self) -> None:
        """Once, before the first fork."""
        confine.close_to_others()
        if self.namespaces:
            confine.hide_proc()
            confine.drop_bounding_set()
        if self.confined:
            self.base.install()

    def confine_candidate(self) -> None:
        """After all descriptors but the channel are no longer needed, before any foreign code."""
        if self.namespaces:
            confine.private_scratch(self.limits)
        confine.set_limits(self.limits, self.processes)
        confine.drop_capabilities()
        if self.candidate_files:
            self.candidate_files.restrict()
        if self.confined:
            self.candidate_calls.install()

    def confine_tester(self) -> None:
        """Before the job is read."""
        confine.drop_capabilities()
        if self.tester_files:
            self.tester_files.restrict()
        if self.confined:
            self.tester_calls.install()
