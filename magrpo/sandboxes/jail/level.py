"""The isolation levels, as each process applies them to itself; the jail's command line does the rest."""

from __future__ import annotations

import ctypes
import os
import resource

from . import confine
from .confine import Limits, Ruleset, check_call, libc
from .seccomp import build_base_filter, build_foreign_filter, install_filter

OWN_PROCESSES = 6
"""Number of the jail's own processes counted by the user's limit: bubblewrap, zygote, tester, ready, dying."""
MS_NOSUID, MS_NODEV, MS_NOEXEC, MNT_DETACH = 2, 4, 8, 2
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 4, 24, 47, 4
CAPABILITY_VERSION_3 = 0x20080522
LAST_CAPABILITY = 40


class Level:
    """The restrictions that the zygote, each candidate and each tester put on themselves.

    ``limits``: of every candidate; ``readable``: files and folders that Landlock lets a candidate read.

    Raises:
        OSError: the kernel does not offer what the level needs.
    """

    def __init__(self, name: str, limits: Limits, readable: list[str]) -> None:
        self.limits = limits
        self.namespaces = name == "namespaces"
        self.confined = name != "none"
        uses_landlock = name == "landlock" or (name == "namespaces-flat" and confine.landlock_version() > 0)
        self.candidate_files = Ruleset(readable) if uses_landlock else None
        self.tester_files = Ruleset([*readable, "/proc"]) if uses_landlock else None
        self.base_filter = build_base_filter()
        self.candidate_filter = build_foreign_filter(alone=not self.namespaces)
        self.tester_filter = build_foreign_filter(alone=True)
        self.processes: int | None = None  # a level that refuses to fork needs no limit
        if self.namespaces:  # twice: processes of the previous candidate may still be dying
            self.processes = 2 * limits.processes + OWN_PROCESSES
        elif not self.confined:
            self.processes = count_own_tasks() + 2 * limits.processes + OWN_PROCESSES

    def confine_zygote(self) -> None:
        """Called once, before the first fork."""
        confine.forbid_privileges()
        check_call(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")  # not inspected by processes of this user
        if self.namespaces:  # open descriptors of /proc keep working
            check_call(libc.umount2(b"/proc", MNT_DETACH), "umount /proc")
            for capability in range(LAST_CAPABILITY + 1):  # refused without CAP_SETPCAP, where there is none to lose
                libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        if self.confined:
            install_filter(self.base_filter)

    def confine_candidate(self) -> None:
        """Called when only the channel's descriptor is still needed, before any foreign code."""
        limits = self.limits
        if self.namespaces:
            confine.unshare_namespaces(confine.CLONE_NEWNS | confine.CLONE_NEWIPC)
            options = f"size={limits.scratch_bytes},nr_inodes={limits.scratch_files},mode=0700"
            confine.mount_path("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
            os.chdir("/tmp")
        cpu_s = int(limits.total_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        for name, value in (
            (resource.RLIMIT_AS, limits.memory_bytes),
            (resource.RLIMIT_FSIZE, limits.file_bytes),
            (resource.RLIMIT_NOFILE, limits.descriptors),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_NPROC, self.processes),
        ):
            if value is not None:
                resource.setrlimit(name, (value, value))
        self._drop_rights(self.candidate_files, self.candidate_filter)

    def confine_tester(self) -> None:
        """Called before the job is read."""
        self._drop_rights(self.tester_files, self.tester_filter)

    def _drop_rights(self, files: Ruleset | None, calls: bytes) -> None:
        """Drop every capability from every set, all files but ``files``, and the system calls that ``calls`` denies."""
        check_call(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        check_call(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        if files:
            files.restrict_process()
        if self.confined:
            install_filter(calls)


def count_own_tasks() -> int:
    """Number of processes and threads of this user on this machine."""
    task_count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                task_count += len(os.listdir(f"/proc/{entry.name}/task"))  # noqa: PTH208 - pathlib is slow to import
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return task_count
