"""Isolation levels: finds the strongest one that works here, by running a probe that tries to break out."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from magrpo.files.locks import make_draft
from magrpo.sandboxes import STRENGTH, SandboxError
from magrpo.sandboxes.jail_command import INSTALL, JailSpec, LevelUnavailable
from magrpo.sandboxes.packages import Packages
from magrpo.sandboxes.worker import Worker, WorkerDied, make_job, wait_readable
from magrpo.types import Execution, IsolationLevel

ALLOW_NONE = "MAGRPO_SANDBOX_ALLOW_NONE"
PROBE_S = 30.0
PROBE_BYTES = 512 << 20  # with little memory an attempt would fail for lack of it, which is not a refusal
PREFIX = "magrpo-probe-"
log = logging.getLogger(__name__)

PROBE = """
import os, signal, socket, time

def attempt(action, argument):
    try:
        match action:
            case "read":
                open(argument).read()
            case "write":
                open(argument, "w").write("probe")
            case "connect":
                socket.create_connection(("127.0.0.1", argument), 1)
            case "connect_unix":
                socket.socket(socket.AF_UNIX).connect(argument)
            case "send_udp":
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"probe", ("127.0.0.1", argument))
            case "kill":
                os.kill(argument, signal.SIGCONT)
            case "fork":
                for _ in range(argument):
                    if os.fork() == 0:
                        try:
                            time.sleep(2)
                        finally:
                            os._exit(0)
    except OSError:
        return "refused"
    return "done"
"""

_LONGEST_SOCKET_PATH = 107
"""Longest path of a socket in bytes, by ``sun_path`` of the kernel's ``sockaddr_un``."""
_STOPPED = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: stopped, it would outlive a kill -9 of this process
if os.getppid() == {parent}:
    os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()
"""


def choose_level(spec: JailSpec, wanted: str) -> IsolationLevel:
    """Find the strongest level that works here. ``wanted`` is a level or ``auto``, which never chooses ``none``.

    The probe sees the packages but does not import them: one that fails to import would look like a level that fails.

    Raises:
        SandboxError: no accepted level works; the message gives reasons and remedies.
    """
    candidates = [level for level in STRENGTH if level != "none"] if wanted == "auto" else [wanted]
    if wanted == "none":
        if os.environ.get(ALLOW_NONE) != "1":
            raise SandboxError(f"sandbox.level = 'none' runs programs unprotected; set {ALLOW_NONE}=1 to accept that")
        return IsolationLevel("none", {})
    spec = replace(spec, packages=Packages(spec.packages.folders))
    refused: dict[str, str] = {}
    for level in candidates:
        try:
            examine_level(replace(spec, level=level))
        except (LevelUnavailable, WorkerDied) as error:
            refused[level] = str(error)
            log.warning("sandbox level %s is not available: %s", level, error)
        else:
            log.info("sandbox level: %s", level)
            return IsolationLevel(level, refused)
    reasons = "; ".join(f"{level}: {reason}" for level, reason in refused.items())
    weaker = "" if "landlock" in refused else ", or accept sandbox.level = 'landlock'"
    raise SandboxError(
        f"no isolation level of {', '.join(candidates)} works here ({reasons}). "
        f"Remedy: {INSTALL}; allow unprivileged user namespaces{weaker}; or use a kernel with Landlock (5.13)"
    )


def examine_level(spec: JailSpec) -> None:
    """Run the probe at one level and look for its traces.

    Raises:
        LevelUnavailable, WorkerDied: an attempt succeeded, or the jail did not start or survive.
    """
    with make_targets() as (folder, tcp, unix, udp), start_stopped_process() as stopped:
        attempts = {
            "read": str(folder / "secret"),
            "write": str(folder / "target"),
            "connect": tcp.getsockname()[1],
            "connect_unix": str(folder / "socket"),
            "send_udp": udp.getsockname()[1],
            "fork": 3 * spec.limits.processes + 40,
        }
        test = "\n".join(f"assert attempt({name!r}, {argument!r}) == 'refused'" for name, argument in attempts.items())
        test += f"\nattempt('kill', {stopped})"  # a process inside may have this number
        limits = replace(
            spec.limits,
            test_s=PROBE_S / 3,
            total_s=PROBE_S,
            memory_bytes=max(spec.limits.memory_bytes, PROBE_BYTES),
        )
        with contextlib.closing(Worker(replace(spec, limits=limits))) as worker:
            failed = _run_probe(worker, PROBE, "attempt", test)
            failed += _run_probe(worker, "def one(): return 1", "one", "assert one() == 1")
        continued = os.waitid(os.P_PID, stopped, os.WCONTINUED | os.WNOHANG)
        if continued or wait_readable(0, tcp, unix, udp) or (folder / "target").read_text() != "untouched":
            failed.append("the probe left a trace outside")
    if failed:
        raise LevelUnavailable("; ".join(failed))


def _run_probe(worker: Worker, source: str, entry_point: str, test: str) -> list[str]:
    reports = worker.run_jobs([make_job(Execution(source, entry_point, test))], PROBE_S) or [{}]
    cases = reports[0].get("cases", [["timeout", "the probe did not answer"]])
    return [message for status, message in cases if status != "pass"]


@contextlib.contextmanager
def make_targets() -> Iterator[tuple[Path, socket.socket, socket.socket, socket.socket]]:
    """Make files and sockets that everybody on this machine may read, write and connect to.

    Raises SandboxError if the folder for temporary files has too long a path for a socket.
    """
    with (
        make_draft(Path(tempfile.gettempdir()), PREFIX) as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        folder.chmod(0o755)
        (folder / "secret").write_text("secret")
        (folder / "target").write_text("untouched")
        if len(os.fsencode(folder / "socket")) > _LONGEST_SOCKET_PATH:
            raise SandboxError(
                f"TMPDIR = {tempfile.gettempdir()!r} is too long for the path of a socket; set TMPDIR=/tmp"
            )
        unix.bind(str(folder / "socket"))
        for name, mode in (("secret", 0o644), ("target", 0o666), ("socket", 0o777)):
            (folder / name).chmod(mode)
        unix.listen()
        udp.bind(("127.0.0.1", 0))
        yield folder, tcp, unix, udp


@contextlib.contextmanager
def start_stopped_process() -> Iterator[int]:
    """Start a stopped process, which a signal from the jail would continue; yield its number."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", _STOPPED.format(parent=os.getpid())]) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            yield process.pid
        finally:
            process.kill()
