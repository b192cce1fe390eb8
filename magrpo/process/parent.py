"""Ends this process when its parent ends."""

import os
import select
import threading


def exit_with_parent(parent: int) -> None:
    """Exit as soon as the process ``parent``, which started this one, ends, even by ``kill -9``.

    A thread waits for it. The kernel's own signal (PR_SET_PDEATHSIG) would arrive with the end of the *thread* that
    started this process.
    """
    watched = os.pidfd_open(parent)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)

    def wait_for_parent() -> None:
        select.select([watched], [], [])
        os._exit(1)

    threading.Thread(target=wait_for_parent, name="magrpo-parent", daemon=True).start()
