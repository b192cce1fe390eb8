"""Landlock: the kernel allows reading listed files only, and denies the rest of the file system and TCP."""

from __future__ import annotations

import ctypes
import os
import struct

from .confine import check_call, libc

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
VERSION = 1
PATH_BENEATH = 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Rights known to each version of the interface; the newest version not above the kernel's is used."""
NET_SINCE, NET_RIGHTS = 4, 3
SCOPE_SINCE, SCOPES = 6, 3  # no abstract unix sockets of, and no signals to, processes outside


def kernel_version() -> int:
    """Version of the kernel's Landlock interface; 0: none."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION)))


class Ruleset:
    """A rule set that allows reading ``paths``, files and folders, and nothing else. Missing paths are ignored.

    Raises:
        OSError: the kernel has no Landlock.
    """

    def __init__(self, paths: list[str]) -> None:
        kernel = kernel_version()
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
