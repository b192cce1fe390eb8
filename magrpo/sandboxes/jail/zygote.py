"""The zygote: the process that forks every candidate. Imports packages once, sees no data, runs no foreign code.

Each request on the control socket is a byte with the descriptor of a connection to the parent, and stands for one
candidate. The zygote forks the candidate, then the tester, which reads the jobs from that connection. It replaces the
candidate on the tester's request, decides about new threads where the kernel does not count them, and reports the
tester's exit status.
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import NamedTuple

from . import candidate, confine, proxy, tester
from .candidate_process import CandidateProcess
from .confine import Level
from .imports import READY, import_packages
from .seccomp import answer_thread_request

CHANNEL_FD = 3
DYING_S = 0.2
FORK_S = 10.0


class LiveCandidate(NamedTuple):
    """A candidate process that waits for its program, and the tester's end of its channel.

    ``listener``: descriptor at which its threads ask for more, -1 where they do not ask.
    """

    pid: int
    channel: socket.socket
    listener: int = -1


class Zygote:
    """Forks candidates and testers on demand, and keeps one candidate ready. ``control``: connection to the parent."""

    def __init__(self, control: socket.socket, level: Level) -> None:
        self.control, self.level = control, level
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if level.namespaces else -1
        self.proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        level.confine_zygote()
        self.dying = 0
        self.ready = self.fork_candidate()

    def serve_requests(self) -> None:
        """Serve requests until the parent hangs up."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self.control, 16, 1)
            if not message:
                return
            if self.dying:  # the next candidate needs the memory and the process slots of the last one
                os.waitpid(self.dying, 0)
            with socket.socket(fileno=descriptors[0]) as connection:
                requests, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with far:
                    life = self.take_ready_candidate()
                    testing = self.fork_tester(connection, (far, requests), life)
            with requests:
                life.channel.close()
                self.ready = self.fork_candidate()
                ended = self.attend_tester(testing, requests, life)
            if ended is None:
                return
            self.control.send(json.dumps(ended).encode())

    def attend_tester(self, testing: int, requests: socket.socket, life: LiveCandidate) -> tuple[int, int] | None:
        """Serve the tester and its candidate; return the tester's exit status and peak memory in bytes.

        None if the parent hung up.
        """
        ended = os.pidfd_open(testing)
        sources = {requests.fileno(), ended, self.control.fileno(), life.listener}
        try:
            while True:
                ready = wait_for_any(sources)
                if self.control.fileno() in ready:
                    return None
                if ended in ready:
                    _, status, usage = os.wait4(testing, 0)
                    return status, usage.ru_maxrss * 1024
                if requests.fileno() not in ready:  # the tester comes first, because a candidate may ask all the time
                    if ready[life.listener] & select.POLLIN:
                        answer_thread_request(life.listener, self.count_threads(life.pid) < self.level.max_tasks)
                    else:  # the candidate is dead
                        sources.discard(life.listener)
                    continue
                request = requests.recv(16)
                if not request:  # the tester is exiting
                    sources.discard(requests.fileno())
                    continue
                past = bury_candidate(life.pid, DYING_S if request == proxy.GONE else 0)
                close_listener(life)
                sources.discard(life.listener)
                life = self.take_ready_candidate()
                sources.add(life.listener)
                with life.channel:
                    socket.send_fds(requests, [json.dumps([*past, life.pid]).encode()], [life.channel.fileno()])
                self.ready = self.fork_candidate()
        finally:
            os.close(ended)
            kill_candidate(life.pid)
            close_listener(life)
            self.dying = life.pid

    def take_ready_candidate(self) -> LiveCandidate:
        """Return the ready candidate, replaced if it was killed while waiting."""
        if os.waitpid(self.ready.pid, os.WNOHANG)[0] != 0:
            self.ready.channel.close()
            self.ready = self.fork_candidate()
        if self.level.asks:
            descriptors = socket.recv_fds(self.ready.channel, 1, 1)[1]
            if descriptors:  # without them it could not be confined, as the tester will notice
                return self.ready._replace(listener=descriptors[0])
        return self.ready

    def count_threads(self, pid: int) -> int:
        """Count the threads of a process, at least 1."""
        with open(os.open(f"{pid}/status", os.O_RDONLY, dir_fd=self.proc), "rb") as file:  # noqa: PTH123
            return int(file.read().partition(b"Threads:")[2].split()[0])

    def fork_candidate(self) -> LiveCandidate:
        near, far = socket.socketpair()
        if self.level.namespaces:
            confine.unshare_namespaces(confine.CLONE_NEWPID)
        pid = fork_process()
        if pid == 0:
            try:
                confine.die_with_parent()
                os.setsid()
                listener = self.level.confine_candidate()
                if self.level.asks:
                    socket.send_fds(far, [b"l"], [listener])
                most = self.level.limits.descriptors  # not earlier: descriptors in flight count, too
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
                os.dup2(far.detach(), CHANNEL_FD)
                os.closerange(CHANNEL_FD + 1, 1 << 16)
                candidate.CandidateServer(socket.socket(fileno=CHANNEL_FD)).serve_calls()
            finally:
                os._exit(0)
        if self.level.namespaces:  # later children must start in the zygote's own pid namespace again
            confine.check_call(confine.libc.setns(self.own_pids, confine.CLONE_NEWPID), "setns")
        far.close()
        return LiveCandidate(pid, near)

    def fork_tester(
        self, connection: socket.socket, requests: tuple[socket.socket, socket.socket], life: LiveCandidate
    ) -> int:
        """Fork a tester. ``requests``: its end of the channel to the zygote, and the zygote's."""
        zygote = os.getpid()
        pid = fork_process()
        if pid == 0:
            try:
                confine.die_with_parent()
                if os.getppid() != zygote:  # it was too late for that
                    return 0
                self.control.close()
                own, other = requests
                other.close()  # or it would never notice that the zygote is gone
                self.level.confine_tester()
                tester.limit_process(self.level.package_bytes)
                process = CandidateProcess(life.channel, life.pid, self.proc)
                tester.serve_jobs(connection, own, process, self.level.limits, self.level.namespaces)
            finally:
                os._exit(0)
        return pid


def fork_process() -> int:
    """Fork, waiting for a free process slot if the machine has none."""
    deadline = time.monotonic() + FORK_S
    while True:
        try:
            return os.fork()
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def wait_for_any(descriptors: set[int]) -> dict[int, int]:
    """Return the events of the descriptors that are ready, at least one; negative descriptors are ignored."""
    poll = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
    return dict(poll.poll())


def close_listener(life: LiveCandidate) -> None:
    if life.listener >= 0:
        os.close(life.listener)


def bury_candidate(pid: int, patience_s: float) -> tuple[int, float, int]:
    """Kill a candidate and, with its namespace, its descendants; return exit status, CPU seconds, memory.

    A candidate that hung up gets ``patience_s`` to die by itself, so that its exit status shows the cause.
    """
    if patience_s:
        ended = os.pidfd_open(pid)
        select.select([ended], [], [], patience_s)
        os.close(ended)
    kill_candidate(pid)
    _, status, usage = os.wait4(pid, 0)
    return status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def kill_candidate(pid: int) -> None:
    """Kill a candidate and its process group. The candidate must not be reaped yet, so that its pid is still its own.

    With a pid namespace all descendants die, too; without one, only those that stayed in the process group.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Run the zygote. ``argv[1]``: configuration (JSON); standard input: control socket; standard output: /dev/null."""
    config = json.loads(sys.argv[1])
    sys.argv = [""]  # programs and tests see it
    control = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)
    for name in config["preload"]:  # candidates start faster with the modules that programs usually need
        __import__(name)
    package_bytes = 0
    if config["modules"]:
        os.environ |= {"MPLCONFIGDIR": config["scratch"], "MPLBACKEND": "agg"}  # matplotlib writes a cache
        package_bytes = import_packages(control, config["folders"], config["modules"])
        if config["level"] == "namespaces":  # nothing could be mounted over the scratch folder once it is deleted
            confine.unmount(config["scratch"])
    if config["uid"]:
        confine.become_user(config["uid"])
    limits = confine.Limits(**config["limits"])
    level = Level(config["level"], limits, config["readable"], package_bytes)
    gc.collect()
    gc.freeze()
    zygote = Zygote(control, level)
    os.dup2(1, 2)
    control.send(READY)
    zygote.serve_requests()
