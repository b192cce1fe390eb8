"""Runs a command in a process group of its own and kills that group when the process that asked for it ends.

Usage: ``python keeper.py PARENT FD COMMAND...``. ``FD`` is handed on to the command. Runs under ``python -I -S``:
standard library only, no imports from this project.

The keeper waits on a pidfd of its parent, which fires on any death of it, ``kill -9`` included, and whichever thread
started the keeper. Should the keeper itself be killed, the command gets SIGKILL by PR_SET_PDEATHSIG, which is sound
because the keeper has one thread. SIGTERM to the keeper kills the group too.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from functools import partial

_PR_SET_PDEATHSIG = 1


def main(parent: int, fd: int, command: list[str]) -> int:
    """Run ``command`` until it or ``parent`` ends; returns the command's exit status as a shell would."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parent_fd = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 1
    # preexec_fn is safe in a process with one thread.
    die_with_keeper = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    child = subprocess.Popen(command, pass_fds=(fd,), process_group=0, preexec_fn=die_with_keeper)
    try:
        os.close(fd)
        select.select([parent_fd, os.pidfd_open(child.pid)], [], [])
    finally:
        # The command is not waited for yet, so its group id is still its own.
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
