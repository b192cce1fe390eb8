"""Launcher for root: binds the jail's files where an ordinary user can read them, becomes that user, starts the jail.

Bubblewrap started as real root would not enforce RLIMIT_NPROC, and an ordinary user could not read an interpreter in
``/root``. The binds exist only in a new mount namespace and end with the jail.
"""

import json
import os
import stat
import sys

from . import confine

MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
STAGE = "/tmp"


def main() -> None:
    """Launch a jail. ``argv[1]``: JSON with uid, binds (option, source, destination), and command before and after."""
    config = json.loads(sys.argv[1])
    binds: list[list[str]] = config["binds"]
    confine.unshare_namespaces(confine.CLONE_NEWNS)
    confine.mount_path("none", "/", "", MS_REC | MS_PRIVATE)
    opened = [os.open(source, os.O_PATH) for _, source, _ in binds]  # opened before the stage hides any of them
    confine.mount_path("tmpfs", STAGE, "tmpfs", 0)
    os.chmod(STAGE, 0o755)  # noqa: PTH101 - pathlib is slow to import
    command: list[str] = config["before"]
    for k, (descriptor, (option, _, destination)) in enumerate(zip(opened, binds, strict=True)):
        target = f"{STAGE}/{k}"
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # not by path, which the stage may hide by now
            os.mkdir(target)  # noqa: PTH102
        else:
            os.close(os.open(target, os.O_CREAT))
        confine.mount_path(f"/proc/self/fd/{descriptor}", target, "", MS_BIND | MS_REC)
        os.close(descriptor)
        command += [option, target, destination]
    confine.become_user(config["uid"])
    confine.forbid_privileges()
    os.chdir("/")
    os.execv(command[0], [*command, *config["after"]])
