"""The restrictions that each process of the jail puts on itself; the jail's command line does the rest.

Landlock lets a process read listed files only, and denies the rest of the file system and TCP.
"""

import ctypes
import os
import resource
import signal
import struct
from dataclasses import dataclass

from .seccomp import build_base_filter, build_foreign_filter, find_call

OWN_PROCESSES = 4
"""Number of the jail's own processes that count towards the user's limit: bubblewrap, zygote, tester, ready."""
DEVICES = ("/dev/null", "/dev/urandom")
"""Devices that exist in a jail; some packages open the second."""
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MNT_DETACH = 1, 2, 4, 8, 2
MS_REMOUNT, MS_BIND = 32, 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SET_MODE_FILTER, NEW_LISTENER = 4, 1, 8
CAPABILITY_VERSION_3, LAST_CAPABILITY = 0x20080522, 40

# Landlock: its system calls have the same numbers on every architecture.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION, RULE_PATH_BENEATH = 1, 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Rights known to each version of the interface; the newest version not above the kernel's is used."""
NET_SINCE, NET_RIGHTS = 4, 3
ASKING_SINCE = (5, 5)  # kernel version that introduced SECCOMP_USER_NOTIF_FLAG_CONTINUE
SCOPE_SINCE, SCOPES = 6, 3  # abstract unix sockets of, and signals to, processes outside are denied

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one candidate, in seconds, bytes and counts."""

    test_s: float
    total_s: float
    memory_bytes: int
    processes: int
    file_bytes: int
    descriptors: int
    scratch_bytes: int
    scratch_files: int
    output_bytes: int


def check_call(result: int, what: str) -> None:
    """Raise OSError if a libc call returned -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies: without a pid namespace nothing else would."""
    check_call(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "death signal")


def unshare_namespaces(flags: int) -> None:
    check_call(libc.unshare(flags), "unshare")


def mount_path(source: str, target: str, kind: str, flags: int, options: str | None = None) -> None:
    data = None if options is None else options.encode()
    check_call(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data), f"mount {source} on {target}")


def unmount(path: str) -> None:
    check_call(libc.umount2(path.encode(), MNT_DETACH), f"umount {path}")


def become_user(uid: int) -> None:
    """Become an ordinary user, permanently."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def forbid_privileges() -> None:
    """Prevent this process and all it will fork or execute from gaining privileges."""
    check_call(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if there is none."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION)))


def create_ruleset(paths: list[str]) -> int:
    """Create a Landlock rule set that allows reading the files and folders ``paths``; return its descriptor.

    Missing paths are ignored.

    Raises:
        OSError: the kernel has no Landlock.
    """
    kernel = landlock_version()
    if kernel == 0:
        raise OSError("this kernel has no Landlock")
    rights = FILE_RIGHTS[max(since for since in FILE_RIGHTS if since <= kernel)]
    attributes = struct.pack("QQQ", rights, NET_RIGHTS, SCOPES)
    # An older kernel rejects attributes that it does not know.
    size = 8
    if kernel >= SCOPE_SINCE:
        size = 24
    elif kernel >= NET_SINCE:
        size = 16
    ruleset = int(libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(size), 0))
    check_call(ruleset, "landlock_create_ruleset")
    for path in paths:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE  # noqa: PTH112
        rule = struct.pack("=Qi", allowed, opened)
        check_call(libc.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
        os.close(opened)
    return ruleset


def install_filter(code: bytes, ask: bool = False) -> int:
    """Install a filter on this process and all it will fork. Requires ``no_new_privs``.

    Returns the descriptor of a listener if the filter asks one about some calls, else 0.

    Raises:
        OSError: the kernel, or a container's runtime that listens itself, refuses.
    """
    instructions = ctypes.create_string_buffer(code)
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    listener = libc.syscall(find_call("seccomp"), SET_MODE_FILTER, NEW_LISTENER if ask else 0, head)
    check_call(listener, "seccomp")
    return int(listener)


class Level:
    """The restrictions that the zygote, each candidate and each tester put on themselves.

    ``limits``: limits of every candidate; ``readable``: files and folders that Landlock lets a candidate read;
    ``package_bytes``: address space taken by imported packages, which counts towards no process's limit.

    Raises:
        OSError: the kernel does not offer what the level needs.
    """

    def __init__(self, name: str, limits: Limits, readable: list[str], package_bytes: int = 0) -> None:
        self.limits, self.package_bytes = limits, package_bytes
        self.namespaces = name == "namespaces"
        self.confined = name != "none"
        self.asks = self.confined and not self.namespaces
        if self.asks and tuple(map(int, os.uname().release.split(".")[:2])) < ASKING_SINCE:
            raise OSError("limiting threads without namespaces takes Linux 5.5")
        uses_landlock = name == "landlock" or (name == "namespaces-flat" and landlock_version() > 0)
        self.candidate_files = create_ruleset(readable) if uses_landlock else None
        self.tester_files = create_ruleset([*readable, "/proc"]) if uses_landlock else None
        self.base_filter = build_base_filter(alone=not self.namespaces)
        self.candidate_filter = build_foreign_filter(alone=not self.namespaces, ask=self.asks)
        self.tester_filter = build_foreign_filter(alone=True, ask=False)
        self.max_tasks = 2 * limits.processes
        self.processes: int | None = None  # the kernel counts per user and user namespace
        if self.namespaces:
            self.processes = self.max_tasks + OWN_PROCESSES
        elif not self.confined:
            self.processes = count_own_tasks() + self.max_tasks + OWN_PROCESSES

    def confine_zygote(self) -> None:
        """Confine the zygote; called once, before the first fork."""
        forbid_privileges()
        check_call(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")  # processes of the same user may not inspect it
        if self.namespaces:  # open descriptors of /proc keep working
            unmount("/proc")
            for device in DEVICES:  # the devices have the host's dates
                kept = os.statvfs(device).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
                mount_path("none", device, "", MS_REMOUNT | MS_BIND | MS_RDONLY | kept)
            for capability in range(LAST_CAPABILITY + 1):  # fails without CAP_SETPCAP, but then there is none to drop
                libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
        if self.confined:
            install_filter(self.base_filter)

    def confine_candidate(self) -> int:
        """Confine a candidate; called before any foreign code, when only the channel's descriptor is still needed.

        Returns the descriptor at which the candidate's threads ask for more threads, 0 at levels where none ask.
        """
        limits = self.limits
        null = os.open("/dev/null", os.O_RDWR)  # flags and locks of a shared one would outlive this candidate
        for standard in range(3):
            os.dup2(null, standard)
        if self.namespaces:
            unshare_namespaces(CLONE_NEWNS | CLONE_NEWIPC)
            options = f"size={limits.scratch_bytes},nr_inodes={limits.scratch_files},mode=0700"
            mount_path("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
            os.chdir("/tmp")
        cpu_s = int(limits.total_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        for name, value in (
            (resource.RLIMIT_AS, limits.memory_bytes + self.package_bytes),
            (resource.RLIMIT_FSIZE, limits.file_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_SIGPENDING, 0),  # no kernel timers
            (resource.RLIMIT_NPROC, self.processes),
        ):
            if value is not None:
                resource.setrlimit(name, (value, value))
        return self._drop_rights(self.candidate_files, self.candidate_filter, self.asks)

    def confine_tester(self) -> None:
        """Confine a tester; called before it reads the job."""
        self._drop_rights(self.tester_files, self.tester_filter)

    def _drop_rights(self, ruleset: int | None, system_calls: bytes, ask: bool = False) -> int:
        """Drop every capability, access to files outside ``ruleset``, and the calls that a filter denies.

        Returns the filter's listener as :func:`install_filter` does.
        """
        check_call(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        check_call(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
        if ruleset is not None:
            check_call(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
        return install_filter(system_calls, ask) if self.confined else 0


def count_own_tasks() -> int:
    """Count the processes and threads of this user on this machine."""
    task_count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                task_count += len(os.listdir(f"/proc/{entry.name}/task"))  # noqa: PTH208 - pathlib is slow to import
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return task_count
