"""Limits of the process that starts the programs of episodes."""

from __future__ import annotations

import subprocess
import sys

RAISING = """
import resource
from magrpo.gateway.launcher import allow_open_files
from magrpo.errors import ConfigError

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 1280))
allow_open_files(256)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    allow_open_files(257)
except ConfigError as error:
    print(error)
"""


def test_many_episodes_at_once_raise_the_limit_of_open_files() -> None:
    # A process of its own, because a hard limit cannot be raised again.
    done = subprocess.run([sys.executable, "-c", RAISING], capture_output=True, text=True, check=True, timeout=300)
    limits, refusal = done.stdout.splitlines()
    assert limits == "(1280, 1280)"
    assert refusal == (
        "env.concurrency = 257 may need 1284 open files, and this process may open 1280: set it to 256 or less, or "
        "raise the limit (ulimit -Hn)"
    )
