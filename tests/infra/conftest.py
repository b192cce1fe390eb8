"""A real PostgreSQL, where Debian's package is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def postgres() -> Iterator[Path]:
    """The folder of the socket of a PostgreSQL of its own, which listens on nothing else."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    if os.geteuid() not in {entry.pw_uid for entry in pwd.getpwall()}:
        pytest.skip("PostgreSQL refuses a user without a passwd entry")

    def call(*command: str | Path) -> None:
        # PostgreSQL refuses to run as root.
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        subprocess.run([*as_user, programs[-1] / command[0], *command[1:]], check=True, stdout=subprocess.DEVNULL)

    with tempfile.TemporaryDirectory(prefix="magrpo-pg-", dir="/tmp") as name:  # a path short enough for a socket
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        call("initdb", "-D", folder / "data", "-U", "postgres", "--auth=trust", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        call("pg_ctl", "-D", folder / "data", "-w", "-l", folder / "log", "-o", options, "start")
        try:
            yield folder
        finally:
            call("pg_ctl", "-D", folder / "data", "-w", "-m", "immediate", "stop")
