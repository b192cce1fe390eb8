"""Filters of system calls, assembled by hand: classic BPF, no library. ``seccomp.toml`` has the numbers of the calls.

Two filters stack. The zygote installs :func:`build_base_filter` on itself, so that everything it forks has it; a
process that runs foreign code adds :func:`build_foreign_filter`. A denied call fails with EPERM; the program goes on.
"""

import os
import struct
import tomllib
from collections.abc import Iterable

with open(__file__.removesuffix("py") + "toml", "rb") as _file:  # noqa: PTH123 - pathlib is slow to import
    CALLS: dict[str, dict[str, list[int]]] = tomllib.load(_file)
"""System calls by group: the number of each on every architecture, in the order of :data:`ARCHITECTURES`."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LAST_KNOWN = 452
"""Newer system calls, numbered above this, are unknown to :data:`CALLS` and fail with ENOSYS."""

AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
CLONE_THREAD = 0x00010000
CLONE_NEW_ANY = 0x7E020080  # every CLONE_NEW... flag
FCNTL_REFUSED = (8, 10, 15, 1024, 1026)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: signals to others
IOCTL_REFUSED = (0x8901, 0x8902, 0x5412, 0x541C)  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX

LOAD, AND, RETURN = 0x20, 0x54, 0x06
EQUAL, ABOVE, ANY_BIT = 0x15, 0x25, 0x45
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
UNKNOWN = -1
"""The number of a system call on an architecture that lacks it."""

Instruction = tuple[int, int, int, int]


class Filter:
    """A filter under construction. Every rule leaves the number of the system call in the accumulator."""

    def __init__(self) -> None:
        machine = os.uname().machine
        if machine not in ARCHITECTURES:
            raise OSError(f"no system call table for {machine}")
        column = list(ARCHITECTURES).index(machine)
        self.numbers = {name: numbers[column] for group in CALLS.values() for name, numbers in group.items()}
        self.code: list[Instruction] = [
            (LOAD, 0, 0, 4),
            (EQUAL, 1, 0, ARCHITECTURES[machine]),
            (RETURN, 0, 0, KILL),
            (LOAD, 0, 0, 0),
            (ABOVE, 0, 1, LAST_KNOWN),  # also all of x32
            (RETURN, 0, 0, ERRNO | ENOSYS),
        ]

    def deny_calls(self, names: Iterable[str], error: int = EPERM) -> None:
        """Deny system calls with any arguments."""
        for name in names:
            if self.numbers[name] != UNKNOWN:
                self.code += [(EQUAL, 0, 1, self.numbers[name]), (RETURN, 0, 0, ERRNO | error)]

    def allow_if(self, name: str, argument: int, *tests: Instruction) -> None:
        """Allow a system call if all tests jump over the denial. The tests begin with ``argument`` in the accumulator.

        Each test is an instruction; a comparison's jumps are given here as 1 (continue) and 0 (deny).
        """
        body: list[Instruction] = [_load_argument(argument)]
        for denial, (code, yes, no, operand) in zip(range(len(tests), 0, -1), tests, strict=True):
            if code in (LOAD, AND):
                body.append((code, 0, 0, operand))
            else:
                body.append((code, 0 if yes else denial, 0 if no else denial, operand))
        body += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | EPERM)]
        self.code += [(EQUAL, 0, len(body), self.numbers[name]), *body]

    def pack_filter(self) -> bytes:
        """The filter as the kernel reads it; calls that no rule matches are allowed."""
        return b"".join(struct.pack("HBBI", *instruction) for instruction in [*self.code, (RETURN, 0, 0, ALLOW)])


def _load_argument(index: int) -> Instruction:
    return LOAD, 0, 0, 16 + 8 * index  # the low half; both architectures are little-endian


def build_base_filter() -> bytes:
    """Deny calls that no process inside the jail needs, the zygote included."""
    built = Filter()
    built.deny_calls(CALLS["never"])
    return built.pack_filter()


def build_foreign_filter(alone: bool) -> bytes:
    """Deny, in addition, calls that a process with foreign code must not make.

    ``alone``: it has no namespaces of its own, so it may not have children or send signals either.
    """
    built = Filter()
    built.deny_calls([*CALLS["foreign"], *(CALLS["alone"] if alone else ())])
    built.deny_calls(["clone3"], ENOSYS)  # its flags are in memory, invisible to filters; libc falls back to clone
    only_threads: list[Instruction] = [(ANY_BIT, 1, 0, CLONE_THREAD)] if alone else []
    built.allow_if("clone", 0, (ANY_BIT, 0, 1, CLONE_NEW_ANY), *only_threads)
    built.allow_if("prlimit64", 0, (EQUAL, 1, 0, 0))
    built.allow_if("fcntl", 1, *[(EQUAL, 0, 1, command) for command in FCNTL_REFUSED])
    built.allow_if("ioctl", 1, *[(EQUAL, 0, 1, command) for command in IOCTL_REFUSED])
    stream = [_load_argument(1), (AND, 0, 0, SOCK_TYPE_MASK), (EQUAL, 1, 0, SOCK_STREAM)]
    built.allow_if("socketpair", 0, (EQUAL, 1, 0, AF_UNIX), *stream)
    return built.pack_filter()
