"""The command line that starts a jail, for each isolation level, as root and as an ordinary user."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magrpo.files.locks import make_draft
from magrpo.sandboxes.jail.confine import DEVICES, Limits
from magrpo.sandboxes.packages import NO_PACKAGES, Packages

SANDBOX_UID = 61873
"""User id of jails when the parent is root; it belongs to no account."""
CAPABILITIES = {"setgid": 6, "setuid": 7, "sys_admin": 21}
HERE = Path(__file__).parent
JAIL, PACKAGES, TMP = "/jail", "/packages", "/tmp"
SCRATCH_PREFIX = "magrpo-imports-"
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": "/tmp"}
ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
FLAGS = ("-s", "-S", "-P", "-B")
INSTALL = "install Debian's package: apt-get install bubblewrap (not the package of that name on PyPI)"


class LevelUnavailable(Exception):
    """An isolation level does not work here; the message says why."""


@dataclass(frozen=True, slots=True)
class JailSpec:
    """Settings of a jail. ``preload``: modules of the standard library that the zygote imports."""

    limits: Limits
    level: str
    preload: tuple[str, ...] = ()
    packages: Packages = NO_PACKAGES

    @property
    def uses_bubblewrap(self) -> bool:
        return self.level.startswith("namespaces")


def find_interpreter() -> str:
    """Return the real path of the interpreter behind the virtual environment."""
    # private: sys.executable may be a copy in the virtual environment, and sys.base_prefix is only a folder
    return str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]


def list_interpreter_paths() -> list[str]:
    """List the paths that a jail may read: the interpreter with its library, and the system's libraries."""
    wanted = [Path(find_interpreter()), Path(sysconfig.get_paths()["stdlib"]), Path("/etc/ld.so.cache")]
    shared = sysconfig.get_config_var("LDLIBRARY") or ""
    if ".so" in shared:
        wanted += sorted(Path(sysconfig.get_config_var("LIBDIR")).glob(f"{shared}*"))
    system = [Path(name) for name in SYSTEM if Path(name).is_dir() and not Path(name).is_symlink()]
    own = [path for path in wanted if path.exists() and not any(path.is_relative_to(top) for top in system)]
    return [str(path) for path in [*own, *system]]


@contextlib.contextmanager
def make_scratch(spec: JailSpec) -> Iterator[Path | None]:
    """Make a folder for files that packages write while a jail imports them; None without packages.

    An example is matplotlib's cache. The folder must be gone before the first program runs: the jail may still see it
    then, but cannot create anything in it.
    """
    if not spec.packages.modules:
        yield None
        return
    with make_draft(Path(tempfile.gettempdir()), SCRATCH_PREFIX, _remove_scratch) as scratch:
        scratch.chmod(0o700)
        if spec.uses_bubblewrap and _launches_as_user():
            os.chown(scratch, SANDBOX_UID, SANDBOX_UID)
        yield scratch


def _remove_scratch(scratch: Path) -> None:
    for path in scratch.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    scratch.chmod(0o500)  # a writable folder admits nameless files even when it is deleted
    scratch.rmdir()


def build_command(spec: JailSpec, info: int, scratch: Path | None) -> list[str]:
    """Build the command line of one jail; bubblewrap writes the id of its child to the descriptor ``info``.

    ``scratch``: see :func:`make_scratch`.

    Raises:
        LevelUnavailable: a program that the level needs is missing.
    """
    bwrap = shutil.which("bwrap") or ""
    if spec.uses_bubblewrap and not bwrap:
        raise LevelUnavailable(f"bubblewrap is not installed; {INSTALL}")
    folders = spec.packages.folders
    interpreter = list_interpreter_paths()
    outside = [*interpreter, str(HERE / "jail"), *folders.values()]
    if spec.uses_bubblewrap:
        inside = [*interpreter, f"{JAIL}/jail", *(f"{PACKAGES}/{name}" for name in folders)]
        root, uid = JAIL, 0
    else:
        inside = outside
        root = str(HERE)
        can_drop = _can_change_user("setuid", "setgid") and (
            spec.level == "none" or all(_is_world_readable(Path(path)) for path in outside)
        )
        uid = SANDBOX_UID if can_drop else 0
    config = {
        "level": spec.level,
        "limits": dataclasses.asdict(spec.limits),
        "preload": spec.preload,
        "folders": {
            name: PACKAGES if spec.uses_bubblewrap else str(Path(path).parent) for name, path in folders.items()
        },
        "modules": list(spec.packages.modules),
        "scratch": TMP if spec.uses_bubblewrap else str(scratch),
        "readable": inside,
        "uid": uid,
    }
    zygote = _build_python_command("zygote", root, config)
    if not spec.uses_bubblewrap:
        return zygote
    before = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--info-fd", str(info), "--clearenv"]
    before += [part for variable in ENVIRONMENT.items() for part in ("--setenv", *variable)]
    links = {path: str(path.readlink()) for path in map(Path, SYSTEM) if path.is_symlink()}
    if spec.level == "namespaces":
        before += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
        links[Path("/dev/shm")] = TMP  # semaphores and shared memory of multiprocessing, in each candidate's own folder
    after = [part for path, target in links.items() for part in ("--symlink", target, str(path))]
    after += ["--proc", "/proc", "--dir", TMP, *(part for path in DEVICES for part in ("--dev-bind", path, path))]
    after += ["--remount-ro", "/", "--chdir", "/", *zygote]
    binds = [("--ro-bind", *pair) for pair in zip(outside, inside, strict=True)]
    if scratch:
        binds.append(("--bind", str(scratch), TMP))
    if not _launches_as_user():
        return [*before, *[part for bind in binds for part in bind], *after]
    launch = {"uid": SANDBOX_UID, "binds": binds, "before": before, "after": after}
    return _build_python_command("launch", str(HERE), launch)


def _build_python_command(module: str, root: str, config: dict[str, Any]) -> list[str]:
    """Return the command that runs ``main()`` of a module of the jail, whose folder is in ``root``."""
    boot = f"import sys; sys.path.append({root!r}); from jail.{module} import main; main()"
    return [find_interpreter(), *FLAGS, "-c", boot, json.dumps(config)]


def _launches_as_user() -> bool:
    """Whether bubblewrap is started as :data:`SANDBOX_UID` by ``launch.py``."""
    return _can_change_user("sys_admin", "setuid", "setgid")


def _can_change_user(*capabilities: str) -> bool:
    """Whether this is root with these capabilities, in a user namespace that maps :data:`SANDBOX_UID`.

    Root in a container may lack them and is then treated as an ordinary user.
    """
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return (
        os.geteuid() == 0
        and all(int(status["CapEff"], 16) >> CAPABILITIES[name] & 1 for name in capabilities)
        and any(first <= SANDBOX_UID < first + count for first, _, count in mapped)
    )


def _is_world_readable(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o5 == 0o5 for folder in path.parents) and bool(path.stat().st_mode & 0o4)
