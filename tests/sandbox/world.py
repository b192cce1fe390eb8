"""Things on this machine that a hostile program would read, change, contact or kill, and what became of them."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from magrpo.process.children import list_family, wait_for_end
from magrpo.sandboxes.jail_command import SANDBOX_UID, list_interpreter_paths
from magrpo.sandboxes.pool import Pool
from magrpo.sandboxes.worker import Worker
from magrpo.types import ExecutionReport

SECRET = "secret-of-this-machine"
UID = SANDBOX_UID if os.geteuid() == 0 else None
"""The user that jails run as; None: ours."""


TESTER_MEMORY = 64 << 20
"""Bytes that a tester may hold; 13 MiB of them are the interpreter's."""
OWN_MEMORY = 32 << 20
"""Bytes by which hostile programs may make this process grow."""


class World:
    """Targets of attacks, readable and writable by everybody.

    Args:
        pool: where the hostile programs will run, one worker.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.folder = Path(tempfile.mkdtemp(prefix="magrpo-world-"))
        self.folder.chmod(0o777)
        for name, text in (("secret", SECRET), ("target", "untouched")):
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o666)
        if UID is not None:
            for path in (self.folder, self.folder / "secret", self.folder / "target"):
                os.chown(path, UID, UID)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp, self.unix, self.dgram = socket.socket(type=2), socket.socket(1), socket.socket(1, 2)
        self.udp.bind(("127.0.0.1", 0))
        for item, name in ((self.unix, "unix"), (self.dgram, "dgram")):
            item.bind(str(self.folder / name))
            (self.folder / name).chmod(0o777)
        self.unix.listen()
        for item in (self.tcp, self.udp, self.unix, self.dgram):
            item.setblocking(False)
        self.victim = subprocess.Popen(["sleep", "100000"], user=UID, group=UID, extra_groups=[] if UID else None)
        self.before = self.state()
        self.own_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for item in (self.tcp, self.udp, self.unix, self.dgram):
            item.close()
        for path in self.folder.iterdir():
            path.unlink()
        self.folder.rmdir()

    def aim(self, source: str) -> str:
        """Fill a program's placeholders in."""
        things = {
            "SECRET": self.folder / "secret",
            "TARGET": self.folder / "target",
            "FOLDER": self.folder,
            "TCP": self.tcp.getsockname()[1],
            "UDP": self.udp.getsockname()[1],
            "UNIX": self.folder / "unix",
            "DGRAM": self.folder / "dgram",
            "PID": os.getpid(),
            "VICTIM": self.victim.pid,
        }
        for name, thing in things.items():
            source = source.replace(f"@{name}@", str(thing))
        return source

    def state(self) -> dict[str, object]:
        """Everything that must stay as it is."""
        target = self.folder / "target"
        stat = target.stat()
        process = psutil.Process(self.victim.pid)
        jail = Path(__file__).parents[2] / "magrpo" / "sandboxes" / "jail"
        stdlib = Path(next(path for path in list_interpreter_paths() if Path(path).is_dir()))
        return {
            "target": (target.read_text(), stat.st_mode, stat.st_mtime, stat.st_nlink, os.listxattr(target)),
            "files": sorted(path.name for path in self.folder.iterdir()),
            "jail": sorted((path.name, path.stat().st_size) for path in jail.glob("*.[pt]*")),
            "stdlib": (stdlib / "mine.py").exists() or Path("/mine").exists(),
            "victim": (
                self.victim.poll(),
                process.nice(),
                process.cpu_affinity(),
                os.sched_getscheduler(self.victim.pid),
                Path(f"/proc/{self.victim.pid}/limits").read_text(),
                process.status() == psutil.STATUS_STOPPED,
            ),
            "null": Path("/dev/null").stat().st_mtime_ns,
            "own": resource.getrlimit(resource.RLIMIT_NOFILE),
            "objects": [_objects(kind) for kind in ("shm", "msg", "sem")],
        }

    def forged(self, report: ExecutionReport) -> None:
        """Nothing passed."""
        assert report.tests_passed == 0, report
        assert report.status != "pass"

    def secret_kept(self, report: ExecutionReport) -> None:
        """A secret that the program returned would show in the messages."""
        assert not any(SECRET in case.message for case in report.cases)

    def target_untouched(self, _: ExecutionReport) -> None:
        assert self.state() == self.before

    def not_contacted(self, _: ExecutionReport) -> None:
        for item in (self.tcp, self.unix, self.udp, self.dgram):
            try:
                item.recv(10) if item.type == socket.SOCK_DGRAM else item.accept()[0].close()
            except BlockingIOError:
                continue
            raise AssertionError(f"{item} was contacted")

    def victim_alive(self, _: ExecutionReport) -> None:
        assert self.victim.poll() is None

    def nothing_left(self, _: ExecutionReport) -> None:
        """Only the jail's own processes remain: it may take a moment until the dead are reaped."""
        deadline = time.monotonic() + 300
        while len(living := wait_for_end(list_family(self.worker_pid()), 0.0)) > 3:
            assert time.monotonic() < deadline, living  # three: bubblewrap's init, the zygote, the next candidate
            time.sleep(0.001)

    def memory_bounded(self, report: ExecutionReport) -> None:
        """That of the program by its limit, that of the tester and of this process by little."""
        assert report.memory_bytes <= self.pool.spec.limits.memory_bytes
        assert self.worker().tester_memory <= TESTER_MEMORY
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 <= self.own_memory + OWN_MEMORY
        for case in report.cases:
            assert len(case.message) <= 500
            assert all(c.isprintable() or c == "\n" for c in case.message)

    def worker(self) -> Worker:
        worker = self.pool.idle.get()
        self.pool.idle.put(worker)
        assert worker
        return worker

    def worker_pid(self) -> int:
        return self.worker().process.pid


def _objects(kind: str) -> list[str]:
    """System V objects of the user that jails run as; other programs of this machine may come and go."""
    header, *rows = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
    owner = str(os.geteuid() if UID is None else UID)
    return [row[1] for row in rows if row[header.index("cuid")] == owner]
