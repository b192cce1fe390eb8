"""Asserting that processes end."""

from collections.abc import Collection

import psutil

from magrpo.process.children import wait_for_end


def assert_all_end(processes: Collection[psutil.Process]) -> None:
    """Wait until none of them runs; one that only waits for its parent's attention does not."""
    alive = wait_for_end(processes, 300.0)
    assert not alive, f"still running: {alive}"
