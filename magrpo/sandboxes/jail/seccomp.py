"""Filters of system calls, assembled by hand: classic BPF, no library.

Two filters stack. The zygote installs :func:`build_base_filter` on itself, so that everything it forks has it; a
process that runs foreign code adds :func:`build_foreign_filter`. A denied call fails with EPERM; the program goes on.
"""

from __future__ import annotations

import ctypes
import os
import struct

from .confine import check_call, libc

NUMBERS = {
    "x86_64": (
        "socket=41 connect=42 bind=49 listen=50 accept=43 accept4=288 execve=59 execveat=322 ptrace=101 "
        "process_vm_readv=310 process_vm_writev=311 process_madvise=440 kcmp=312 pivot_root=155 chroot=161 "
        "move_mount=429 open_tree=428 fsopen=430 fsconfig=431 fsmount=432 fspick=433 mount_setattr=442 bpf=321 "
        "perf_event_open=298 keyctl=250 add_key=248 request_key=249 userfaultfd=323 io_uring_setup=425 "
        "io_uring_enter=426 io_uring_register=427 init_module=175 finit_module=313 delete_module=176 kexec_load=246 "
        "kexec_file_load=320 reboot=169 swapon=167 swapoff=168 sethostname=170 setdomainname=171 settimeofday=164 "
        "clock_settime=227 adjtimex=159 clock_adjtime=305 quotactl=179 quotactl_fd=443 acct=163 iopl=172 ioperm=173 "
        "syslog=103 vhangup=153 fanotify_init=300 open_by_handle_at=304 name_to_handle_at=303 pidfd_getfd=438 "
        "pidfd_send_signal=424 process_mrelease=448 setpriority=141 ioprio_set=251 sched_setaffinity=203 "
        "sched_setscheduler=144 sched_setparam=142 sched_setattr=314 migrate_pages=256 move_pages=279 shmget=29 "
        "shmat=30 shmctl=31 msgget=68 msgsnd=69 msgrcv=70 msgctl=71 semget=64 semop=65 semtimedop=220 semctl=66 "
        "mq_open=240 mq_unlink=241 personality=135 memfd_secret=447 modify_ldt=154 lookup_dcookie=212 vmsplice=278 "
        "mount=165 umount2=166 unshare=272 setns=308 pidfd_open=434 socketpair=53 clone=56 clone3=435 prlimit64=302 "
        "fcntl=72 ioctl=16 seccomp=317 fork=57 vfork=58 kill=62 tkill=200 tgkill=234 rt_sigqueueinfo=129 "
        "rt_tgsigqueueinfo=297 truncate=76 chmod=90 fchmod=91 fchmodat=268 fchmodat2=452 chown=92 fchown=93 lchown=94 "
        "fchownat=260 utime=132 utimes=235 utimensat=280 futimesat=261 setxattr=188 lsetxattr=189 fsetxattr=190 "
        "removexattr=197 lremovexattr=198 fremovexattr=199 "
    ),
    "aarch64": (
        "socket=198 connect=203 bind=200 listen=201 accept=202 accept4=242 execve=221 execveat=281 ptrace=117 "
        "process_vm_readv=270 process_vm_writev=271 process_madvise=440 kcmp=272 pivot_root=41 chroot=51 "
        "move_mount=429 open_tree=428 fsopen=430 fsconfig=431 fsmount=432 fspick=433 mount_setattr=442 bpf=280 "
        "perf_event_open=241 keyctl=219 add_key=217 request_key=218 userfaultfd=282 io_uring_setup=425 "
        "io_uring_enter=426 io_uring_register=427 init_module=105 finit_module=273 delete_module=106 kexec_load=104 "
        "kexec_file_load=294 reboot=142 swapon=224 swapoff=225 sethostname=161 setdomainname=162 settimeofday=170 "
        "clock_settime=112 adjtimex=171 clock_adjtime=266 quotactl=60 quotactl_fd=443 acct=89 syslog=116 vhangup=58 "
        "fanotify_init=262 open_by_handle_at=265 name_to_handle_at=264 pidfd_getfd=438 pidfd_send_signal=424 "
        "process_mrelease=448 setpriority=140 ioprio_set=30 sched_setaffinity=122 sched_setscheduler=119 "
        "sched_setparam=118 sched_setattr=274 migrate_pages=238 move_pages=239 shmget=194 shmat=196 shmctl=195 "
        "msgget=186 msgsnd=189 msgrcv=188 msgctl=187 semget=190 semop=193 semtimedop=192 semctl=191 mq_open=180 "
        "mq_unlink=181 personality=92 memfd_secret=447 lookup_dcookie=18 vmsplice=75 mount=40 umount2=39 unshare=97 "
        "setns=268 pidfd_open=434 socketpair=199 clone=220 clone3=435 prlimit64=261 fcntl=25 ioctl=29 seccomp=277 "
        "kill=129 tkill=130 tgkill=131 rt_sigqueueinfo=138 rt_tgsigqueueinfo=240 truncate=45 fchmod=52 fchmodat=53 "
        "fchmodat2=452 fchown=55 fchownat=54 utimensat=88 setxattr=5 lsetxattr=6 fsetxattr=7 removexattr=14 "
        "lremovexattr=15 fremovexattr=16 "
    ),
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LAST_KNOWN = 452
"""Newer system calls, numbered above this, are unknown to the lists below and fail with ENOSYS."""

NEVER = (
    # network, other programs, other processes' memory
    "socket connect bind listen accept accept4 execve execveat ptrace process_vm_readv process_vm_writev "
    "process_madvise kcmp pidfd_getfd pidfd_send_signal process_mrelease "
    # the machine
    "bpf perf_event_open keyctl add_key request_key userfaultfd io_uring_setup io_uring_enter io_uring_register "
    "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff sethostname "
    "setdomainname settimeofday clock_settime adjtimex clock_adjtime quotactl quotactl_fd acct iopl ioperm syslog "
    "vhangup fanotify_init open_by_handle_at name_to_handle_at personality memfd_secret modify_ldt lookup_dcookie "
    "pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr "
    # priorities of others, and objects that outlive a process
    "setpriority ioprio_set sched_setaffinity sched_setscheduler sched_setparam sched_setattr migrate_pages "
    "move_pages shmget shmat shmctl msgget msgsnd msgrcv msgctl semget semop semtimedop semctl mq_open mq_unlink "
    "vmsplice"
)
FOREIGN = "mount umount2 unshare setns pidfd_open seccomp"
ALONE = (
    # without a pid namespace: no children, no signals; without a mount namespace: what Landlock does not cover
    "fork vfork kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo truncate chmod fchmod fchmodat fchmodat2 chown "
    "fchown lchown fchownat utime utimes utimensat futimesat setxattr lsetxattr fsetxattr removexattr lremovexattr "
    "fremovexattr"
)

AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
CLONE_THREAD = 0x00010000
CLONE_NEW_ANY = 0x7E020080  # every CLONE_NEW... flag
FCNTL_REFUSED = (8, 10, 15, 1024, 1026)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: signals to others
IOCTL_REFUSED = (0x8901, 0x8902, 0x5412, 0x541C)  # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX

LOAD, AND, RETURN = 0x20, 0x54, 0x06
EQUAL, ABOVE, ANY_BIT = 0x15, 0x25, 0x45
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]


def _argument(index: int) -> int:
    return 16 + 8 * index  # the low half; both architectures are little-endian


class Filter:
    """A filter under construction. Every rule leaves the number of the system call in the accumulator."""

    def __init__(self) -> None:
        machine = os.uname().machine
        if machine not in NUMBERS:
            raise OSError(f"no system call table for {machine}")
        self.numbers = {name: int(number) for name, _, number in (e.partition("=") for e in NUMBERS[machine].split())}
        self.code: list[Instruction] = [
            (LOAD, 0, 0, 4),
            (EQUAL, 1, 0, ARCHITECTURES[machine]),
            (RETURN, 0, 0, KILL),
            (LOAD, 0, 0, 0),
            (ABOVE, 0, 1, LAST_KNOWN),  # also all of x32
            (RETURN, 0, 0, ERRNO | ENOSYS),
        ]

    def deny_calls(self, names: str, error: int = EPERM) -> None:
        """Deny system calls with any arguments."""
        for name in names.split():
            if name in self.numbers:
                self.code += [(EQUAL, 0, 1, self.numbers[name]), (RETURN, 0, 0, ERRNO | error)]

    def allow_if(self, name: str, tests: list[Instruction]) -> None:
        """Allow a system call if all tests jump over the denial.

        Each test is an instruction; a comparison's jumps are given here as 1 (continue) and 0 (deny).
        """
        body: list[Instruction] = []
        for k, (code, yes, no, operand) in enumerate(tests):
            denial = len(tests) - k
            if code in (LOAD, AND):
                body.append((code, 0, 0, operand))
            else:
                body.append((code, 0 if yes else denial, 0 if no else denial, operand))
        body += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | EPERM)]
        self.code += [(EQUAL, 0, len(body), self.numbers[name]), *body]

    def compile_filter(self) -> CompiledFilter:
        """Compile the filter; calls that no rule matches are allowed."""
        return CompiledFilter([*self.code, (RETURN, 0, 0, ALLOW)])


class CompiledFilter:
    """A filter that the kernel accepts."""

    def __init__(self, code: list[Instruction]) -> None:
        instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
        self.code = ctypes.create_string_buffer(instructions)
        self.head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(self.code)))

    def install_filter(self) -> None:
        """Install the filter on this process and all it will fork. Requires ``no_new_privs``."""
        check_call(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self.head, 0, 0), "seccomp")


def build_base_filter() -> CompiledFilter:
    """Deny what no process inside the jail needs, the zygote included."""
    built = Filter()
    built.deny_calls(NEVER)
    return built.compile_filter()


def build_foreign_filter(alone: bool) -> CompiledFilter:
    """Deny, in addition, what a process with foreign code must not do.

    Args:
        alone: the process has no namespaces of its own, so it may not have children or send signals either.
    """
    built = Filter()
    built.deny_calls(FOREIGN + (" " + ALONE if alone else ""))
    built.deny_calls("clone3", ENOSYS)  # its flags are in memory, invisible to filters; libc falls back to clone
    flags = [(LOAD, 0, 0, _argument(0)), (ANY_BIT, 0, 1, CLONE_NEW_ANY)]
    built.allow_if("clone", [*flags, (ANY_BIT, 1, 0, CLONE_THREAD)] if alone else flags)
    built.allow_if("prlimit64", [(LOAD, 0, 0, _argument(0)), (EQUAL, 1, 0, 0)])
    built.allow_if("fcntl", [(LOAD, 0, 0, _argument(1)), *[(EQUAL, 0, 1, command) for command in FCNTL_REFUSED]])
    built.allow_if("ioctl", [(LOAD, 0, 0, _argument(1)), *[(EQUAL, 0, 1, command) for command in IOCTL_REFUSED]])
    kind = [(LOAD, 0, 0, _argument(1)), (AND, 0, 0, SOCK_TYPE_MASK), (EQUAL, 1, 0, SOCK_STREAM)]
    built.allow_if("socketpair", [(LOAD, 0, 0, _argument(0)), (EQUAL, 1, 0, AF_UNIX), *kind])
    return built.compile_filter()
