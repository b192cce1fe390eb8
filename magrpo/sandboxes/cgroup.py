"""A memory cgroup for each jail, where this process may make one: the kernel then enforces the memory limit between
two measurements of the tester.

Under cgroup v1 it is made below this process's own cgroup. Version 2 admits no processes in a cgroup that limits
others, so there it is made beside this process's own, in a cgroup that systemd delegates (``Delegate=yes`` and
``DelegateSubgroup=``), or below the root.
"""

import errno
import functools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from magrpo.files.locks import make_draft

_PREFIX = "magrpo-jail-"
_DYING_S = 1.0
_ENTER = 'echo $$ > "$0" && exec "$@"'


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A cgroup, and the names of its files. Under version 1 ``swap_limit`` counts memory as well."""

    folder: Path
    limit: str
    swap_limit: str
    usage: str
    events: str

    def build_command(self, command: Sequence[str]) -> list[str]:
        """Return the command, preceded by a step that enters the cgroup."""
        return ["/bin/sh", "-c", _ENTER, str(self.folder / "cgroup.procs"), *command]

    def limit_growth(self, growth: int) -> None:
        """Let the processes hold ``growth`` bytes more than now. OSError if the cgroup is gone."""
        limit = int((self.folder / self.usage).read_text()) + growth
        (self.folder / self.limit).write_text(str(limit))
        if (self.folder / self.swap_limit).exists():  # the file is missing where the kernel has no swap
            (self.folder / self.swap_limit).write_text("0" if self.swap_limit == "memory.swap.max" else str(limit))

    def count_kills(self) -> int:
        """Count the processes that the kernel has killed here for holding too much. OSError if the cgroup is gone."""
        counts = dict(line.split() for line in (self.folder / self.events).read_text().splitlines())
        return int(counts.get("oom_kill", 0))


_V1 = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"
_V2 = "memory.max", "memory.swap.max", "memory.current", "memory.events"


@contextmanager
def make_cgroup() -> Iterator[MemoryCgroup | None]:
    """Make a cgroup, removed at the end; None where that is impossible. First removes cgroups of killed processes."""
    parent = _find_parent()
    if parent is None:
        yield None
        return
    with make_draft(parent, _PREFIX, _remove) as folder:
        yield _describe(folder)


@functools.cache
def _find_parent() -> Path | None:
    """Find the cgroup below which this process can make others that limit memory."""
    memberships = Path("/proc/self/cgroup")  # missing where the kernel has no cgroups
    listed = memberships.read_text() if memberships.exists() else ""
    for parent in list_parents(listed, Path("/proc/self/mountinfo").read_text()):
        try:
            with make_draft(parent, _PREFIX, _remove) as folder:
                subprocess.run(_describe(folder).build_command(["true"]), check=True, stderr=subprocess.DEVNULL)
                _describe(folder).limit_growth(1 << 30)
        except (OSError, subprocess.CalledProcessError):  # read-only, owned by another user, or without the controller
            continue
        return parent
    return None


def _describe(folder: Path) -> MemoryCgroup:
    return MemoryCgroup(folder, *(_V2 if (folder / "cgroup.controllers").exists() else _V1))


def _is_delegated(folder: Path) -> bool:
    """Whether systemd lets this process make cgroups here; if so, enable memory limits for them."""
    try:
        delegated = os.getxattr(folder, "user.delegate") == b"1"
        if delegated:
            (folder / "cgroup.subtree_control").write_text("+memory")
    except OSError:
        return False
    return delegated


def list_parents(memberships: str, mounts: str, is_delegated: Callable[[Path], bool] = _is_delegated) -> Iterator[Path]:
    """List the cgroups below which this process may be able to make others that limit memory.

    ``memberships`` and ``mounts`` are the texts of its files ``cgroup`` and ``mountinfo`` in ``/proc``;
    ``is_delegated`` tells whether systemd lets it make cgroups in a folder.
    """
    own = dict(line.split(":", 2)[1:] for line in memberships.splitlines())
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        root, mounted = left.split()[3:5]
        kind, *_, options = right.split()  # the source between them may be empty
        name: str | None = None
        if kind == "cgroup2":
            name = ""
        elif kind == "cgroup" and "memory" in options.split(","):
            name = "memory"
        if name not in own or not Path(own[name]).is_relative_to(root) or ".." in Path(own[name]).parts:
            continue  # not a cgroup of this process, or mounted elsewhere
        folder = Path(mounted) / Path(own[name]).relative_to(root)
        yield folder
        if kind == "cgroup2" and is_delegated(folder.parent):
            yield folder.parent


def _remove(folder: Path) -> None:
    """Remove a cgroup; its last processes may still be dying."""
    deadline = time.monotonic() + _DYING_S
    while True:
        try:
            return folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.005)
