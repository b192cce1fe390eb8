"""Runs a command and kills it, with everything it started, when the process that asked for it ends.

Usage: ``python keeper.py ASKER FD COMMAND...``. ``FD`` is handed on to the command; -1: there is none. Runs under
``python -I -S``: standard library only, no imports from this project.

There are two keepers. The front one is the asker's child; the back one, its child in a session of its own, is the
parent of the command. Each watches the asker and the other keeper by pidfds, which fire on any death, ``kill -9``
included. Both are subreapers: a descendant whose parent ends becomes a child of the nearest living keeper, whatever
process group or session it has made for itself. So one keeper may be killed, as a Ray worker kills its children when
it ends, and the other still finds the whole family. SIGTERM to either ends the family too. If both are killed at once,
the command itself gets SIGKILL by PR_SET_PDEATHSIG, which is sound because a keeper has one thread; what it started
in sessions of its own stays. Only a cgroup or a PID namespace would find that, and both need rights that few have.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_set_process_option = ctypes.CDLL(None).prctl


def main(asker: int, fd: int, command: list[str]) -> int:
    """Run ``command`` until it, the asker or a keeper ends; returns the command's exit status as a shell would."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _set_process_option(_PR_SET_CHILD_SUBREAPER, 1)
    asker_fd, front_fd = os.pidfd_open(asker), os.pidfd_open(os.getpid())
    if os.getppid() != asker:
        return 1
    back = os.fork()
    if back:
        if fd >= 0:
            os.close(fd)
        return _keep(back, [asker_fd])
    os.setsid()
    _set_process_option(_PR_SET_CHILD_SUBREAPER, 1)  # not inherited
    # preexec_fn is safe in a process with one thread.
    die_with_keeper = partial(_set_process_option, _PR_SET_PDEATHSIG, signal.SIGKILL)
    fds = (fd,) if fd >= 0 else ()
    process = subprocess.Popen(command, pass_fds=fds, process_group=0, preexec_fn=die_with_keeper)
    if fd >= 0:
        os.close(fd)
    return _keep(process.pid, [asker_fd, front_fd])


def _keep(child: int, watched: Sequence[int]) -> int:
    """Wait until ``child`` or a process behind the pidfds ``watched`` ends; kill all descendants, return its status."""
    status = 128 + signal.SIGKILL
    try:
        select.select([*watched, os.pidfd_open(child)], [], [])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Only children are killed, whose ids nobody else can get before they are waited for; their children follow.
        while children := _list_children():
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                ended, code = os.waitpid(pid, 0)
                if ended == child:
                    status = os.waitstatus_to_exitcode(code)
    return status if status >= 0 else 128 - status


def _list_children() -> list[int]:
    """Process ids of this process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_bytes()
            except OSError:  # it has ended
                continue
            if int(stat.rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
