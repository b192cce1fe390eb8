"""System calls and limits of a candidate, tried one by one at every level."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from magrpo.sandboxes.jail.candidate_process import CandidateProcess
from magrpo.sandboxes.pool import Pool
from magrpo.types import Execution, ExecutionReport

from .conftest import open_pool, the_worker

ATTEMPTS = """
import ctypes, fcntl, json, mmap, os, resource, signal, socket, threading

libc = ctypes.CDLL(None, use_errno=True)
library = os.open(json.__file__, os.O_RDONLY)
left, right = socket.socketpair()
buffer = ctypes.create_string_buffer(4096)
libc.mmap.restype = ctypes.c_void_p
mapping = ctypes.c_void_p(libc.mmap(None, 4096, 3, 0x22, -1, 0))

def f(name):
    try:
        result = {
            "file flags": lambda: libc.ioctl(library, 0x40086602, ctypes.byref(ctypes.c_long(0x80))),
            "interface addresses": lambda: libc.ioctl(left.fileno(), 0x8912, buffer),
            "bytes to read": lambda: libc.ioctl(left.fileno(), 0x541B, buffer),
            "inotify": lambda: libc.inotify_init1(0),
            "asynchronous I/O": lambda: libc.syscall(206, 1, ctypes.byref(ctypes.c_long())),
            "flock": lambda: fcntl.flock(library, fcntl.LOCK_EX),
            "lock of bytes": lambda: fcntl.lockf(library, fcntl.LOCK_SH),
            "lock of a description": lambda: fcntl.fcntl(library, 37, bytes(32)),
            "timer": lambda: libc.syscall(222, 1, 0, ctypes.byref(ctypes.c_int())),
            "urgent byte": lambda: left.send(b"x", socket.MSG_OOB),
            "message with an urgent byte": lambda: left.sendmsg([b"x"], [], socket.MSG_OOB),
            "nameless file": lambda: os.memfd_create("x"),
            "huge pages": lambda: libc.syscall(9, 0, 4096, 3, 0x40022, -1, 0),
            "core dumps": lambda: libc.prctl(4, 1, 0, 0, 0),
            "pages moved out": lambda: libc.syscall(28, mapping, 4096, 21),
            "larger buffers": lambda: left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20) or 0,
            "rule sets": lambda: libc.syscall(444, (ctypes.c_uint64 * 1)(4), 8, 0),
            "shared memory": lambda: mmap.mmap(-1, 4096) and 0,
            "ignored children": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN) and 0,
            "sync of a file system": lambda: libc.syncfs(-1),
            "sync of a file": lambda: libc.fsync(-1),
        }[name]()
    except OSError as error:
        return error.errno
    return ctypes.get_errno() if result == -1 else 0
"""
REFUSED = {
    "file flags": errno.ENOTTY,
    "interface addresses": errno.ENOTTY,
    "bytes to read": 0,
    "core dumps": errno.EPERM,
    "inotify": errno.EPERM,
    "larger buffers": errno.EPERM,
    "rule sets": errno.EPERM,
    "asynchronous I/O": errno.EPERM,
    "flock": errno.EPERM,
    "lock of bytes": errno.EPERM,
    "lock of a description": errno.EPERM,
    "timer": errno.EAGAIN,
    "urgent byte": errno.EPERM,
    "message with an urgent byte": errno.EPERM,
    "nameless file": errno.EPERM,
    "sync of a file system": 0,
    "sync of a file": 0,
}


UNMEASURED = ["huge pages", "pages moved out", "shared memory", "ignored children"]
"""Memory and CPU time that measurements would miss."""


def run(pool: Pool, source: str, test: str) -> ExecutionReport:
    [report] = pool.run([Execution(source, "f", test)])
    return report


def test_calls_that_reach_others_or_escape_measurements_are_refused(pool_of_level: Pool) -> None:
    # Where a program has one process, its address space is limited; machines without huge pages lack the memory.
    unmeasured = (errno.EPERM,) if pool_of_level.level == "namespaces" else (0, errno.ENOMEM)
    accepted = {name: (number,) for name, number in REFUSED.items()} | dict.fromkeys(UNMEASURED, unmeasured)
    test = "\n".join(f"assert f({name!r}) in {numbers}" for name, numbers in accepted.items())
    cases = run(pool_of_level, ATTEMPTS, test).cases
    assert not [case for case in cases if case.status != "pass"]
    assert len(cases) == len(accepted)


def test_threads_are_limited(pool_of_level: Pool) -> None:
    """A program may have as many as guaranteed, and not many more; the next one has them all."""
    source = """
import threading
stop = threading.Event()
threading.stack_size(1 << 16)
def f(wanted):
    threads = []
    try:
        for _ in range(wanted):
            threads.append(threading.Thread(target=stop.wait, daemon=True))
            threads[-1].start()
    except RuntimeError:
        return len(threads)
    return wanted
"""
    limit = pool_of_level.spec.limits.processes
    for _ in range(3):
        assert run(pool_of_level, source, f"assert f(3000) <= {2 * limit}").status == "pass"
        assert run(pool_of_level, source, f"assert f({limit - 1}) == {limit - 1}").status == "pass"


def test_threads_that_ask_for_threads_at_once_are_limited(pool_of_level: Pool) -> None:
    """Each may be told yes before another's thread shows: at most twice the limit, never more."""
    source = """
import ctypes, threading
libc = ctypes.CDLL(None)
attributes = ctypes.create_string_buffer(64)
libc.pthread_attr_init(attributes)
libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 16))
made = []
gate = threading.Barrier(7)
def breed():
    gate.wait()
    for _ in range(100):
        made.append(libc.pthread_create(ctypes.byref(ctypes.c_long()), attributes, libc.pause, None) == 0)
def f(n):
    breeders = [threading.Thread(target=breed) for _ in range(7)]
    for breeder in breeders:
        breeder.start()
    for breeder in breeders:
        breeder.join()
    return sum(made)
"""
    limit = pool_of_level.spec.limits.processes
    report = run(pool_of_level, source, f"made = f(1)\nassert 0 < made <= {4 * limit}, made")
    assert report.status == "pass", report


def test_a_program_that_asks_for_threads_all_the_time_is_ended(pool_of_level: Pool) -> None:
    """Requests of the tester come before those of the candidate."""
    source = """
import ctypes, threading
libc = ctypes.CDLL(None)
full = threading.Event()
def flood():
    full.wait()
    while True:
        libc.syscall(56, 0x10F00, 0, 0, 0, 0)
def f(n):
    for _ in range(n):
        threading.Thread(target=flood).start()
    attributes = ctypes.create_string_buffer(64)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(1 << 16))
    while libc.pthread_create(ctypes.byref(ctypes.c_long()), attributes, libc.pause, None) == 0:
        pass
    full.set()
    while True:
        pass
"""
    worker = the_worker(pool_of_level)
    assert run(pool_of_level, source, "assert f(2) == 1").status == "timeout"
    assert the_worker(pool_of_level) is worker


def test_standard_streams_belong_to_the_program() -> None:
    """The first program of a worker may log more than a pipe holds, and leaves no flags for the second."""
    pool = open_pool(workers=1)
    log = "import os, fcntl\ndef f(n):\n    os.write(2, bytes(1 << 20))\n"
    log += "    fcntl.fcntl(n, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)\n    return n\n"
    for stream in range(3):
        assert run(pool, log, f"assert f({stream}) == {stream}").status == "pass"
        flags = "import fcntl\ndef f(n):\n    return fcntl.fcntl(n, fcntl.F_GETFL) & 0o6000\n"
        assert run(pool, flags, f"assert f({stream}) == 0").status == "pass"
    pool.close()


FAMILY = """
import ctypes, os, threading, time
def hold():
    time.sleep(0.3)
    held = bytearray(b"x") * (200 << 20)
    time.sleep(60)
def f(n):
    for _ in range(4):
        if os.fork() == 0:
            threading.Thread(target=hold).start()
            ctypes.CDLL(None).syscall(60, 0)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def strongest() -> Iterator[Pool]:
    pool = open_pool(workers=1, test_s=8, total_s=8)
    assert pool.level == "namespaces"
    yield pool
    pool.close()


def test_memory_of_threads_without_a_main_thread_counts(strongest: Pool) -> None:
    assert run(strongest, FAMILY, "assert f(1) == 1").status == "memory"
    assert run(strongest, "def f(n):\n    return n\n", "assert f(1) == 1").status == "pass"


BURN = """
import os, time
def burn(seconds):
    while time.process_time() < seconds:
        pass
def f(children, seconds):
    for _ in range(children):
        if os.fork() == 0:
            burn(seconds)
            os._exit(0)
    for _ in range(children):
        os.wait()
    time.sleep(0.1)  # longer than from one measurement to the next
    return 1
"""


def test_cpu_time_of_children_counts(strongest: Pool) -> None:
    report = run(strongest, BURN, "assert f(3, 0.3) == 1")
    assert report.status == "pass"
    assert report.cpu_s >= 0.8  # the kernel rounds each time down to hundredths


def test_cpu_time_of_orphans_counts(strongest: Pool) -> None:
    source = """
import os, time
r, w = os.pipe()
def f(seconds):
    if os.fork() == 0:
        if os.fork() == 0:
            while time.process_time() < seconds:
                pass
            os.write(w, b"x")
        os._exit(0)
    os.read(r, 1)
    time.sleep(0.1)
    return 1
"""
    report = run(strongest, source, "assert f(0.3) == 1")
    assert report.status == "pass"
    assert report.cpu_s >= 0.25


def test_children_share_the_limit_of_cpu_time() -> None:
    pool = open_pool(workers=1, test_s=1, total_s=1)
    assert run(pool, BURN, "assert f(4, 0.8) == 1").status == "timeout"
    pool.close()


def test_a_program_that_hogs_processes_leaves_them_to_the_next(strongest: Pool) -> None:
    hog = """
import os, time
def f(n):
    try:
        while True:
            if os.fork() == 0:
                time.sleep(60)
    except OSError:
        return 1
"""
    honest = """
import time
from concurrent.futures import ThreadPoolExecutor
def f(n):
    with ThreadPoolExecutor(7) as pool:
        return sum(pool.map(lambda k: time.sleep(0.01) or k, range(n)))
"""
    executions = [Execution(f"{hog if k % 2 else honest}# {k}", "f", "assert f(7) == 21") for k in range(40)]
    assert [report.status for report in strongest.run(executions)[::2]] == ["pass"] * 20


def test_a_signal_without_a_name_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGRPO_SANDBOX_ALLOW_NONE", "1")
    pool = open_pool(level="none", workers=1)
    report = run(pool, "import os\ndef f(n):\n    os.kill(os.getpid(), 40)\n", "assert f(1) == 1")
    assert [(case.status, case.message) for case in report.cases] == [
        ("crash", "assert f(1) == 1: the process died of signal 40")
    ]
    pool.close()


def test_a_closed_process_is_dead_whoever_gets_its_descriptors() -> None:
    proc = os.open("/proc", os.O_PATH)
    near, far = socket.socketpair()
    process = CandidateProcess(near, os.getpid(), proc)
    assert process.read_times()[0] > 0
    process.close()
    successor = CandidateProcess(far, os.getpid(), proc)  # gets the same numbers
    assert process.read_times() == (0.0, 0.0)
    assert process.read_peak_memory() == 0
    successor.close()
    os.close(proc)
