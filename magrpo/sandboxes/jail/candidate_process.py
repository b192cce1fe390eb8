"""A candidate's process as seen from the tester: its CPU time and memory."""

import json
import os
import socket
import time
from collections.abc import Iterator

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PARENT, CPU_TIMES, OWN_CPU_TIMES, THREADS, RESIDENT = 1, slice(11, 15), slice(11, 13), 17, 21
"""Fields of /proc/<pid>/stat after the name, see proc(5). The CPU times include those of reaped children."""


class CandidateProcess:
    """The ``channel`` to a process, its ``pid`` in this namespace, and a descriptor ``proc`` of a ``/proc`` with it."""

    def __init__(self, channel: socket.socket, pid: int, proc: int) -> None:
        self.channel, self.pid, self.proc = channel, pid, proc
        self.has_greeted = False  # whether it has reported that it is confined
        self.family_cpu_s = 0.0
        self.clock = (~pid << 3) | 2  # CPU clock of another process, computed as in clock_getcpuclockid(3)
        self.schedstat = os.open(f"{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        self.own_schedstat = os.open("thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        self.status = os.open(f"{pid}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)

    def read_times(self) -> tuple[float, float]:
        """Return CPU seconds, and seconds that its main thread or this process waited for a CPU; zeros once it is dead.

        Includes the CPU time that :meth:`measure_family` found last.
        """
        try:
            waited_ns = _read_waiting(self.schedstat) + _read_waiting(self.own_schedstat)
            return time.clock_gettime(self.clock) + self.family_cpu_s, waited_ns / 1e9
        except OSError:
            return 0.0, 0.0

    def read_peak_memory(self) -> int:
        """Return the peak resident size in bytes; 0 once it is dead."""
        try:
            _, found, rest = os.pread(self.status, 4096, 0).partition(b"VmHWM:")
        except OSError:
            return 0
        return int(rest.split()[0]) * 1024 if found else 0

    def measure_family(self) -> int:
        """Return the resident bytes of the process and all its descendants, counting shared memory once for each.

        Also updates ``family_cpu_s``, the CPU seconds of descendants, dead or alive. The process is the first in its
        pid namespace and so adopts orphans: no descendant ever has a parent outside.
        """
        resident = cpu_ticks = 0
        for name, fields in self._read_family():
            own = int(name) == self.pid
            cpu_ticks += sum(map(int, fields[CPU_TIMES])) - own * sum(map(int, fields[OWN_CPU_TIMES]))
            resident += int(fields[RESIDENT]) or _read_thread_memory(self.proc, name, int(fields[THREADS]))
        self.family_cpu_s = max(self.family_cpu_s, cpu_ticks * TICK_S)  # a process may die while its parent was read
        return resident * PAGE

    def is_alone(self, children: bool) -> bool:
        """Whether it lives, has a single thread and, where it may have ``children``, no descendant."""
        family = self._read_family() if children else [(str(self.pid), _read_stat(self.proc, str(self.pid)))]
        return [(int(name), fields and int(fields[THREADS])) for name, fields in family] == [(self.pid, 1)]

    def _read_family(self) -> Iterator[tuple[str, list[bytes]]]:
        """Yield the number and ``stat`` fields of the process and all its descendants."""
        outside = {0, 1, os.getppid()}
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc)
        try:
            for name in filter(str.isdigit, os.listdir(folder)):  # noqa: PTH208
                fields = _read_stat(folder, name)
                if fields and (int(name) == self.pid or int(fields[PARENT]) not in outside):
                    yield name, fields
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the channel; from here on the process counts as dead, because its descriptors may be reused."""
        self.channel.close()
        os.close(self.schedstat)
        os.close(self.own_schedstat)
        os.close(self.status)
        self.schedstat = self.own_schedstat = self.status = -1


def replace_process(
    process: CandidateProcess, requests: socket.socket, how: bytes
) -> tuple[CandidateProcess, tuple[int, float, int]]:
    """Have the zygote kill ``process`` and start another; return that one, and how the old one ended.

    The end is the old process's exit status, CPU seconds and memory. ``requests``: channel to the zygote; ``how``:
    ``GONE`` if the process died, so that its exit status shows the cause.
    """
    process.close()
    requests.send(how)
    reply, descriptors, _, _ = socket.recv_fds(requests, 200, 1)
    *past, pid = json.loads(reply)
    return CandidateProcess(socket.socket(fileno=descriptors[0]), pid, process.proc), tuple(past)


def _read_waiting(schedstat: int) -> int:
    """Return the nanoseconds that a thread has waited for a CPU."""
    return int(os.pread(schedstat, 100, 0).split()[1])


def _read_stat(folder: int, name: str) -> list[bytes] | None:
    """Return the fields of a ``stat`` file after the name; None if the process is gone."""
    try:
        with os.fdopen(os.open(f"{name}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _read_thread_memory(folder: int, name: str, threads: int) -> int:
    """Return the resident pages of a process whose main thread has ended: only the other threads still show them."""
    if threads < 2:
        return 0
    try:
        tasks = os.open(f"{name}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    try:
        found = [_read_stat(tasks, task) for task in os.listdir(tasks)]  # noqa: PTH208
    finally:
        os.close(tasks)
    return max((int(fields[RESIDENT]) for fields in found if fields), default=0)
