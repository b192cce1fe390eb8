"""The process that every candidate is forked from. It imports once, never sees data, and runs no foreign code.

One request on the control socket is one candidate: a byte and the descriptor of the connection to the parent. The
zygote forks the candidate first, then the tester, which reads the job from that connection; it replaces the candidate
when the tester asks for it, and reports both exits when the tester is done.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import socket
import sys
from typing import NoReturn

from . import candidate, confine, proxy, tester

CHANNEL_FD = 3
DYING_S = 0.2


class Zygote:
    """Forks candidates and testers on demand.

    Args:
        control: the connection to the parent.
        limits: of every candidate.
        namespaces: give each candidate namespaces of its own.
    """

    def __init__(self, control: socket.socket, limits: confine.Limits, namespaces: bool) -> None:
        self.control, self.limits, self.namespaces = control, limits, namespaces
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if namespaces else -1

    def serve(self) -> None:
        """Serve requests until the parent hangs up."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self.control, 16, 1)
            if not message:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                report = self.run(connection)
            if report is None:
                return
            self.control.send(json.dumps(report).encode())

    def run(self, connection: socket.socket) -> dict[str, object] | None:
        """One job. None: the parent hung up meanwhile."""
        requests, requests_far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lives: list[tuple[int, float, int]] = []
        with requests:
            child, channel = self.fork_candidate()
            with requests_far, channel:
                testing = self.fork_tester(connection, requests_far, channel, child)
            connection.close()
            ended = os.pidfd_open(testing)
            poll = select.poll()
            for source in (requests, ended, self.control):
                poll.register(source, select.POLLIN)
            try:
                while True:
                    ready = {number for number, _ in poll.poll()}
                    if self.control.fileno() in ready:
                        return None
                    if ended in ready:
                        break
                    request = requests.recv(16)
                    if not request:  # the tester is on its way out
                        poll.unregister(requests)
                        continue
                    lives.append(reap(child, DYING_S if request == proxy.GONE else 0))
                    child, channel = self.fork_candidate()
                    with channel:
                        status = lives[-1][0]
                        socket.send_fds(requests, [json.dumps([status, child]).encode()], [channel.fileno()])
            finally:
                os.close(ended)
                lives.append(reap(child))
                _, tester_status, _ = os.wait4(testing, 0)
        return {
            "tester": tester_status,
            "status": lives[-1][0],
            "cpu_s": sum(life[1] for life in lives),
            "memory_bytes": max(life[2] for life in lives),
        }

    def fork_candidate(self) -> tuple[int, socket.socket]:
        """A candidate that waits for its program, and the tester's end of the channel to it."""
        near, far = socket.socketpair()
        if self.namespaces:
            confine.unshare(confine.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            self.become_candidate(far)
        if self.namespaces:
            confine.enter_pid_namespace(self.own_pids)
        far.close()
        return pid, near

    def become_candidate(self, channel: socket.socket) -> NoReturn:
        try:
            os.setsid()
            os.dup2(channel.fileno(), CHANNEL_FD)
            os.closerange(CHANNEL_FD + 1, 1 << 16)
            channel.detach()
            if self.namespaces:
                confine.private_scratch(self.limits)
            confine.set_limits(self.limits, self.limits.processes + 4 if self.namespaces else None)
            confine.drop_capabilities()
            random.seed(0)
            candidate.serve(socket.socket(fileno=CHANNEL_FD))
        finally:
            os._exit(0)

    def fork_tester(
        self, connection: socket.socket, requests: socket.socket, channel: socket.socket, child: int
    ) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                self.control.close()
                confine.drop_capabilities()
                random.seed(0)
                tester.serve(connection, requests, channel, child, self.limits)
            finally:
                os._exit(0)
        return pid


def reap(pid: int, patience_s: float = 0) -> tuple[int, float, int]:
    """Kill a candidate, with its namespace all it left behind, and wait for it: exit status, CPU seconds, memory.

    One that hung up is given ``patience_s`` to die by itself, so that its exit status tells how.
    """
    if patience_s:
        ended = os.pidfd_open(pid)
        select.select([ended], [], [], patience_s)
        os.close(ended)
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
    _, status, usage = os.wait4(pid, 0)
    return status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def preload(modules: list[str]) -> None:
    """Import what programs usually import, so that they need not."""
    for name in modules:
        __import__(name)


def main() -> None:
    """``argv[1]`` is the configuration as JSON; standard input is the control socket, standard output a null device."""
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)
    preload(config["preload"])
    zygote = Zygote(control, confine.Limits(**config["limits"]), config["namespaces"])
    gc.collect()
    gc.freeze()
    os.dup2(1, 2)
    control.send(b"ready")
    zygote.serve()
