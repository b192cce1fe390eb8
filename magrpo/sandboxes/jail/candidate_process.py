"""A candidate's process, observed from the tester: CPU time and memory."""

import os
import socket
import time
from collections import defaultdict

PAGE = os.sysconf("SC_PAGE_SIZE")
PARENT, RESIDENT = 1, 21  # fields of /proc/<pid>/stat after the name, see proc(5)


class CandidateProcess:
    """The ``channel`` to a process, its ``pid`` in this namespace, and the descriptor of a ``/proc`` that shows it."""

    def __init__(self, channel: socket.socket, pid: int, proc: int) -> None:
        self.channel, self.pid, self.proc = channel, pid, proc
        self.clock = (~pid << 3) | 2  # CPU clock of another process, as clock_getcpuclockid(3) makes it
        self.schedstat = os.open(f"{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        self.status = os.open(f"{pid}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)

    def read_times(self) -> tuple[float, float]:
        """CPU seconds, and seconds that its main thread waited for a CPU; zeros once it is dead."""
        try:
            waited_ns = os.pread(self.schedstat, 100, 0).split()[1]
            return time.clock_gettime(self.clock), int(waited_ns) / 1e9
        except OSError:
            return 0.0, 0.0

    def read_peak_memory(self) -> int:
        """Peak resident size in bytes; 0 once it is dead."""
        try:
            _, found, rest = os.pread(self.status, 4096, 0).partition(b"VmHWM:")
        except OSError:
            return 0
        return int(rest.split()[0]) * 1024 if found else 0

    def sum_family_memory(self) -> int:
        """Resident bytes of the process and all its descendants; shared memory counts for each of them.

        The process is the first of its pid namespace and so adopts orphans: no descendant escapes.
        """
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc)
        try:
            found = {int(name): _read_stat(folder, name) for name in os.listdir(folder) if name.isdigit()}  # noqa: PTH208
        finally:
            os.close(folder)
        children = defaultdict(list)
        for pid, (parent, _) in found.items():
            children[parent].append(pid)
        family = [self.pid]
        for pid in family:
            family += children[pid]
        return sum(found[pid][1] for pid in family if pid in found)

    def close(self) -> None:
        self.channel.close()
        os.close(self.schedstat)
        os.close(self.status)


def _read_stat(folder: int, name: str) -> tuple[int, int]:
    """Parent and resident bytes; zeros if the process is gone."""
    try:
        with os.fdopen(os.open(f"{name}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    return int(fields[PARENT]), int(fields[RESIDENT]) * PAGE
