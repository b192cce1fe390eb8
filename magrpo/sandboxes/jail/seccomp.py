"""Filters of system calls, assembled by hand: classic BPF, no library. ``seccomp.toml`` has the numbers of the calls.

Two filters stack. The zygote installs :func:`build_base_filter` on itself, so that everything it forks has it; a
process that runs foreign code adds :func:`build_foreign_filter`. A denied call fails with EPERM; the program goes on.
:func:`answer_thread_request` serves the calls that a filter leaves to the zygote.
"""

import contextlib
import fcntl
import os
import struct
import tomllib
from collections.abc import Iterable

with open(__file__.removesuffix("py") + "toml", "rb") as _file:  # noqa: PTH123 - pathlib is slow to import
    CALLS: dict[str, dict[str, list[int]]] = tomllib.load(_file)
"""System calls by group: the number of each on every architecture, in the order of :data:`ARCHITECTURES`."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LAST_KNOWN = 452
"""Highest system call number in :data:`CALLS`; newer calls are numbered above it and fail with ENOSYS."""

AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
CLONE_THREAD = 0x00010000
CLONE_NEW_ANY = 0x7E020080  # every CLONE_NEW... flag
FCNTL_ALLOWED = (0, 1, 2, 3, 4, 1030, 1032)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, ..., F_GETPIPE_SZ: no locks
IOCTL_ALLOWED = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
SIGCHLD, SHARED_ANONYMOUS, HUGE_PAGES, MSG_OOB = 17, 0x21, 0x40000, 1
PR_SET_DUMPABLE, MADV_PAGEOUT, SO_SNDBUF = 4, 21, 7
MESSAGE_FLAGS = {"sendto": 3, "sendmsg": 2, "sendmmsg": 3, "recvfrom": 3, "recvmsg": 2, "recvmmsg": 3}
"""Index of the argument that holds the flags."""

LOAD, AND, RETURN = 0x20, 0x54, 0x06
EQUAL, ABOVE, ANY_BIT = 0x15, 0x25, 0x45
ALLOW, ASK, KILL, ERRNO = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
EPERM, EAGAIN, ENOTTY, ENOSYS = 1, 11, 25, 38
RECEIVE_REQUEST, SEND_ANSWER, CONTINUE = 0xC0502100, 0xC0182101, 1  # seccomp_unotify(2)
UNKNOWN = -1
"""Number of a system call on an architecture that lacks it."""

Instruction = tuple[int, int, int, int]


def find_architecture() -> str:
    """Return this machine's key of :data:`ARCHITECTURES`; OSError if it is not among them."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(f"no system call table for {machine}")
    return machine


def find_call(name: str) -> int:
    """Return the number of a system call on this machine, or UNKNOWN."""
    numbers = next(group[name] for group in CALLS.values() if name in group)
    return numbers[list(ARCHITECTURES).index(find_architecture())]


class Filter:
    """A filter under construction. Every rule leaves the number of the system call in the accumulator."""

    def __init__(self) -> None:
        self.code: list[Instruction] = [
            (LOAD, 0, 0, 4),
            (EQUAL, 1, 0, ARCHITECTURES[find_architecture()]),
            (RETURN, 0, 0, KILL),
            (LOAD, 0, 0, 0),
            (ABOVE, 0, 1, LAST_KNOWN),  # also denies all calls of x32
            (RETURN, 0, 0, ERRNO | ENOSYS),
        ]

    def deny_calls(self, names: Iterable[str], error: int = EPERM) -> None:
        """Deny system calls whatever their arguments."""
        for name in names:
            number = find_call(name)
            if number != UNKNOWN:
                self.code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | error)]

    def allow_values(self, name: str, argument: int, values: Iterable[int], error: int = EPERM) -> None:
        """Allow a system call only with these values of ``argument``."""
        tests = [(EQUAL, jump, 0, value) for jump, value in enumerate(reversed([*values]), start=1)][::-1]
        body = [_load_argument(argument), *tests, (RETURN, 0, 0, ERRNO | error), (RETURN, 0, 0, ALLOW)]
        self.code += [(EQUAL, 0, len(body), find_call(name)), *body]

    def allow_if(self, name: str, argument: int, *tests: Instruction, verdict: int = ALLOW) -> None:
        """Allow a system call if all tests jump over the denial. The tests begin with ``argument`` in the accumulator.

        Each test is an instruction; a comparison's jumps are given here as 1 (continue) and 0 (deny).
        """
        body: list[Instruction] = [_load_argument(argument)]
        for denial, (code, yes, no, operand) in zip(range(len(tests), 0, -1), tests, strict=True):
            if code in (LOAD, AND):
                body.append((code, 0, 0, operand))
            else:
                body.append((code, 0 if yes else denial, 0 if no else denial, operand))
        body += [(RETURN, 0, 0, verdict), (RETURN, 0, 0, ERRNO | EPERM)]
        self.code += [(EQUAL, 0, len(body), find_call(name)), *body]

    def pack_filter(self) -> bytes:
        """Return the filter as the kernel reads it; calls that no rule matches are allowed."""
        return b"".join(struct.pack("HBBI", *instruction) for instruction in [*self.code, (RETURN, 0, 0, ALLOW)])


def _load_argument(index: int) -> Instruction:
    return LOAD, 0, 0, 16 + 8 * index  # the low half; both architectures are little-endian


def build_base_filter(alone: bool) -> bytes:
    """Deny calls that no process inside the jail needs, the zygote included.

    ``alone``: candidates have no namespaces of their own, and so no children.
    """
    built = Filter()
    built.deny_calls(CALLS["never"])
    built.deny_calls(CALLS["pretended"], 0)
    built.deny_calls(["clone3"], ENOSYS)  # its flags are in memory, invisible to filters; libc falls back to clone
    built.allow_if("prlimit64", 0, (EQUAL, 1, 0, 0))
    built.allow_values("fcntl", 1, FCNTL_ALLOWED)
    built.allow_if("prctl", 0, (EQUAL, 0, 1, PR_SET_DUMPABLE))  # the machine's handler of core dumps has no limits
    built.allow_if("setsockopt", 2, (EQUAL, 0, 1, SO_SNDBUF))
    for name, flags in MESSAGE_FLAGS.items():
        built.allow_if(name, flags, (ANY_BIT, 0, 1, MSG_OOB))
    if not alone:  # memory and CPU time that measurements of a process family would miss
        no_shared = [(AND, 0, 0, SHARED_ANONYMOUS), (EQUAL, 0, 1, SHARED_ANONYMOUS)]
        built.allow_if("mmap", 3, (ANY_BIT, 0, 1, HUGE_PAGES), *no_shared)
        built.allow_if("madvise", 2, (EQUAL, 0, 1, MADV_PAGEOUT))
        built.allow_if("rt_sigaction", 0, (EQUAL, 0, 1, SIGCHLD))  # ignored children would not be added to their parent
    return built.pack_filter()


def build_foreign_filter(alone: bool, ask: bool) -> bytes:
    """Deny further calls, in a process with foreign code; kept short, because every candidate installs the filter.

    ``alone``: it has no namespaces of its own, so it may not have children or send signals either; ``ask``: whether the
    listener of the filter decides about each new thread.
    """
    built = Filter()
    built.deny_calls([*CALLS["foreign"], *(CALLS["alone"] if alone else ())])
    only_threads: list[Instruction] = [(ANY_BIT, 1, 0, CLONE_THREAD)] if alone else []
    built.allow_if("clone", 0, (ANY_BIT, 0, 1, CLONE_NEW_ANY), *only_threads, verdict=ASK if ask else ALLOW)
    built.allow_values("ioctl", 1, IOCTL_ALLOWED, ENOTTY)
    stream = [_load_argument(1), (AND, 0, 0, SOCK_TYPE_MASK), (EQUAL, 1, 0, SOCK_STREAM)]
    built.allow_if("socketpair", 0, (EQUAL, 1, 0, AF_UNIX), *stream)
    return built.pack_filter()


def answer_thread_request(listener: int, allowed: bool) -> None:
    """Let the thread that waits at ``listener`` create another, or fail with EAGAIN. It may have died meanwhile."""
    request = bytearray(80)
    with contextlib.suppress(FileNotFoundError):
        fcntl.ioctl(listener, RECEIVE_REQUEST, request)
        answer = struct.pack(
            "QqiI", *struct.unpack_from("Q", request), 0, 0 if allowed else -EAGAIN, CONTINUE * allowed
        )
        fcntl.ioctl(listener, SEND_ANSWER, answer)
