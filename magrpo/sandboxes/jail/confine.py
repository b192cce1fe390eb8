"""Calls of the kernel by which a process confines itself: namespaces, mounts, user, Landlock; and a candidate's limits.

Landlock lets a process read listed files only, and denies the rest of the file system and TCP.
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
PR_SET_NO_NEW_PRIVS = 38

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
VERSION = 1
PATH_BENEATH = 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Rights known to each version of the interface; the newest version not above the kernel's is used."""
NET_SINCE, NET_RIGHTS = 4, 3
SCOPE_SINCE, SCOPES = 6, 3  # no abstract unix sockets of, and no signals to, processes outside

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


def mount_path(source: str, target: str, kind: str, flags: int, options: str | None = None) -> None:
    data = None if options is None else options.encode()
    check_call(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data), f"mount {source} on {target}")


def become_user(uid: int) -> None:
    """Become an ordinary user, permanently."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def forbid_privileges() -> None:
    """Prevent this process and all it will fork or execute from gaining privileges."""
    check_call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def landlock_version() -> int:
    """Version of the kernel's Landlock interface; 0: none."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION)))


class Ruleset:
    """A Landlock rule set that allows reading ``paths``, files and folders. Missing paths are ignored.

    Raises:
        OSError: the kernel has no Landlock.
    """

    def __init__(self, paths: list[str]) -> None:
        kernel = landlock_version()
        if kernel == 0:
            raise OSError("this kernel has no Landlock")
        rights = FILE_RIGHTS[max(since for since in FILE_RIGHTS if since <= kernel)]
        attributes = struct.pack("QQQ", rights, NET_RIGHTS, SCOPES)
        size = 24 if kernel >= SCOPE_SINCE else 16 if kernel >= NET_SINCE else 8
        self.descriptor = int(libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(size), 0))
        check_call(self.descriptor, "landlock_create_ruleset")
        for path in paths:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            allowed = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE  # noqa: PTH112
            rule = struct.pack("=Qi", allowed, opened)
            check_call(libc.syscall(ADD_RULE, self.descriptor, PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
            os.close(opened)

    def restrict_process(self) -> None:
        """Restrict this process and all it will fork. Requires ``no_new_privs``."""
        check_call(libc.syscall(RESTRICT_SELF, self.descriptor, 0), "landlock_restrict_self")
