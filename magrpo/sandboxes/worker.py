"""One worker: a jail with a zygote inside, and the conversation with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magrpo.sandboxes.jail import wire
from magrpo.sandboxes.jail.confine import Limits

SANDBOX_UID = 61873
"""The user that jails run as when the parent is root. No account; in nobody's range of ordinary users."""
START_S = 20.0
MAX_REPORT = 64 << 20
HERE = Path(__file__).parent
JAIL = "/jail"
BOOT = f"import sys; sys.path.append({JAIL!r}); from jail.zygote import main; main()"
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC", "PATH": "/usr/bin"}


class WorkerDied(Exception):
    """A worker is gone or does not answer; its job has no result."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How workers are made. ``preload``: modules the zygote imports."""

    limits: Limits
    level: str
    preload: tuple[str, ...] = ()


def interpreter_binds() -> list[tuple[str, str]]:
    """What the jail sees of the file system, read-only: the interpreter, its libraries, the system's libraries."""
    python = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
    wanted = [python, Path(sysconfig.get_paths()["stdlib"]), Path("/etc/ld.so.cache")]
    shared = sysconfig.get_config_var("LDLIBRARY") or ""
    libraries = Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent")
    if ".so" in shared:
        wanted += sorted(libraries.glob(f"{shared}*"))
    system = [Path(name) for name in ("/usr/lib", "/usr/lib64", "/lib", "/lib64")]
    wanted += [path for path in system if path.is_dir() and not path.is_symlink()]
    inside = [path for path in wanted if path.exists() and not any(path.is_relative_to(top) for top in system[:2])]
    return [(str(path), str(path)) for path in [*inside, *(path for path in wanted if path in system[:2])]]


def bubblewrap_command(spec: Spec, info: int) -> list[str]:
    """The command line of one jail."""
    bwrap = shutil.which("bwrap")
    assert bwrap, "probed before"
    binds = [*dict.fromkeys(interpreter_binds()), (str(HERE / "jail"), f"{JAIL}/jail")]
    before = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--info-fd", str(info), "--clearenv"]
    for name, value in ENVIRONMENT.items():
        before += ["--setenv", name, value]
    if spec.level == "namespaces":
        before += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    links = [path for path in (Path("/lib"), Path("/lib64")) if path.is_symlink()]
    after = [part for path in links for part in ("--symlink", str(path.readlink()), str(path))]
    after += ["--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/"]
    config = {"limits": dataclasses.asdict(spec.limits), "namespaces": spec.level == "namespaces"}
    zygote = json.dumps({**config, "preload": spec.preload})
    python = str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
    after += [python, "-s", "-S", "-P", "-B", "-c", BOOT, zygote]
    if os.geteuid() != 0:
        return [*before, *[part for pair in binds for part in ("--ro-bind", *pair)], *after]
    launch = json.dumps({"uid": SANDBOX_UID, "binds": binds, "before": before, "after": after})
    return [python, "-s", "-S", "-P", "-B", str(HERE / "jail" / "launch.py"), launch]


class Worker:
    """A running jail. Not thread-safe: one job at a time.

    Raises:
        WorkerDied: it did not start.
    """

    def __init__(self, spec: Spec) -> None:
        self.control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        info_read, info_write = os.pipe()
        with far, open(os.devnull, "r+b") as null:  # noqa: PTH123
            self.process = subprocess.Popen(
                bubblewrap_command(spec, info_write),
                stdin=far.fileno(),
                stdout=null,
                stderr=subprocess.PIPE,
                pass_fds=(info_write,),
                env=ENVIRONMENT,
                start_new_session=True,
            )
        os.close(info_write)
        self.jobs = 0
        self.child = 0
        try:
            self._ready(info_read)
        except WorkerDied:
            self.close()
            raise

    def _ready(self, info: int) -> None:
        with open(info, "rb") as stream:
            text = stream.read()
        if text:
            self.child = int(json.loads(text)["child-pid"])
        readable, _, _ = select.select([self.control], [], [], START_S)
        if not readable or self.control.recv(16) != b"ready":
            assert self.process.stderr
            self._kill()
            error = self.process.stderr.read().decode(errors="replace").strip()
            raise WorkerDied(f"the jail did not start: {error[-500:] or 'no message'}")

    def run(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The tester's report and the zygote's, merged.

        Raises:
            WorkerDied: the worker died or went past ``timeout_s``; it must be closed.
        """
        self.jobs += 1
        deadline = time.monotonic() + timeout_s
        near, far = socket.socketpair()
        with near:
            try:
                with far:
                    socket.send_fds(self.control, [b"job"], [far.fileno()])
                near.settimeout(timeout_s)
                wire.send(near, job)
                report = wire.Reader(near, MAX_REPORT).message(wire.until(deadline))
            except wire.Closed:
                report = {}
            except (wire.WireError, OSError) as error:
                raise WorkerDied(f"no report: {error}") from error
        readable, _, _ = select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))
        message = self.control.recv(1 << 16) if readable else b""
        if not message:
            raise WorkerDied("the zygote died")
        return {**report, **json.loads(message)}

    def close(self) -> None:
        """Kill the jail and everything in it."""
        self._kill()
        self.control.close()
        if self.process.stderr:
            self.process.stderr.close()

    def _kill(self) -> None:
        if self.process.poll() is None:
            for pid in (self.child, self.process.pid):
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self.process.wait()
