"""Confinement of a freshly forked process by itself: namespaces, resource limits, no capabilities."""

from __future__ import annotations

import ctypes
import os
import resource
from dataclasses import dataclass

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MNT_DETACH = 2, 4, 8, 2
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 4, 38, 24, 47, 4
CAPABILITY_VERSION_3 = 0x20080522
LAST_CAPABILITY = 40

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one candidate, in seconds, bytes and counts."""

    test_s: float
    total_s: float
    memory_bytes: int
    processes: int
    file_bytes: int
    descriptors: int
    scratch_bytes: int
    scratch_files: int
    output_bytes: int


def check_call(result: int, what: str) -> None:
    """Raise OSError if a libc call returned -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare_namespaces(flags: int) -> None:
    check_call(libc.unshare(flags), "unshare")


def enter_pid_namespace(descriptor: int) -> None:
    """Start the next children in the pid namespace behind ``descriptor``."""
    check_call(libc.setns(descriptor, CLONE_NEWPID), "setns")


def mount_scratch(limits: Limits) -> None:
    """Enter new mount and ipc namespaces with a small ``/tmp``."""
    unshare_namespaces(CLONE_NEWNS | CLONE_NEWIPC)
    options = f"size={limits.scratch_bytes},nr_inodes={limits.scratch_files},mode=0700".encode()
    check_call(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options), "mount /tmp")
    os.chdir("/tmp")


def hide_proc() -> None:
    """Unmount ``/proc`` in this mount namespace and all made from it. Open descriptors keep working."""
    check_call(libc.umount2(b"/proc", MNT_DETACH), "umount /proc")


def drop_bounding_set() -> None:
    """Prevent this process and all it will fork from ever gaining another capability."""
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused without CAP_SETPCAP, where there is none to lose


def forbid_inspection() -> None:
    """Prevent other processes of this user from inspecting this one, and prevent it from gaining privileges."""
    check_call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check_call(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


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


def become_user(uid: int) -> None:
    """Become an ordinary user, permanently."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Drop every capability from every set, permanently."""
    check_call(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    check_call(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def set_limits(limits: Limits, processes: int | None) -> None:
    """Set the resource limits of this process. ``processes`` None: unlimited."""
    cpu = int(limits.total_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    for name, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.descriptors),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(name, (value, value))
    if processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
