"""The isolation levels, as each process applies them to itself; the jail's command line does the rest."""

from __future__ import annotations

from . import confine, landlock, seccomp
from .confine import Limits

OWN_PROCESSES = 6
"""Number of the jail's own processes counted by the user's limit: bubblewrap, zygote, tester, ready, dying."""


class Level:
    """The restrictions that the zygote, each candidate and each tester put on themselves.

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
        files = name == "landlock" or (name == "namespaces-flat" and landlock.kernel_version() > 0)
        self.candidate_files = landlock.Ruleset(readable) if files else None
        self.tester_files = landlock.Ruleset([*readable, "/proc"]) if files else None
        self.base = seccomp.build_base_filter()
        self.candidate_calls = seccomp.build_foreign_filter(alone=not self.namespaces)
        self.tester_calls = seccomp.build_foreign_filter(alone=True)
        self.processes: int | None = None  # a level that refuses to fork needs no limit
        if self.namespaces:  # twice: processes of the previous candidate may still be dying
            self.processes = 2 * limits.processes + OWN_PROCESSES
        elif not self.confined:
            self.processes = confine.count_own_tasks() + 2 * limits.processes + OWN_PROCESSES

    def confine_zygote(self) -> None:
        """Called once, before the first fork."""
        confine.forbid_inspection()
        if self.namespaces:
            confine.hide_proc()
            confine.drop_bounding_set()
        if self.confined:
            self.base.install_filter()

    def confine_candidate(self) -> None:
        """Called when only the channel's descriptor is still needed, before any foreign code."""
        if self.namespaces:
            confine.mount_scratch(self.limits)
        confine.set_limits(self.limits, self.processes)
        confine.drop_capabilities()
        if self.candidate_files:
            self.candidate_files.restrict_process()
        if self.confined:
            self.candidate_calls.install_filter()

    def confine_tester(self) -> None:
        """Called before the job is read."""
        confine.drop_capabilities()
        if self.tester_files:
            self.tester_files.restrict_process()
        if self.confined:
            self.tester_calls.install_filter()
