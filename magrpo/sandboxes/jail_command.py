"""The command line that starts a jail, for each isolation level, as root and as an ordinary user."""

import dataclasses
import json
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from magrpo.plugins import ConfigError
from magrpo.sandboxes.jail.confine import Limits

SANDBOX_UID = 61873
"""User id of jails when the parent is root; belongs to no account."""
CAPABILITIES = {"setgid": 6, "setuid": 7, "sys_admin": 21}
HERE = Path(__file__).parent
JAIL, PACKAGES = "/jail", "/packages"
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": "/tmp"}
ENVIRONMENT |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
FLAGS = ("-s", "-S", "-P", "-B")
INSTALL = "install Debian's package: apt-get install bubblewrap (not the package of that name on PyPI)"


class LevelUnavailable(Exception):
    """An isolation level does not work here; the message says why."""


@dataclass(frozen=True, slots=True)
class JailSpec:
    """Settings of a jail. ``preload``: modules the zygote imports; ``packages``: distributions visible inside."""

    limits: Limits
    level: str
    preload: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def uses_bubblewrap(self) -> bool:
        return self.level.startswith("namespaces")


def find_interpreter() -> str:
    """The real path of the interpreter behind the virtual environment."""
    return str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]


def list_interpreter_paths() -> list[str]:
    """Paths that a jail may read: the interpreter with its library, and the system's libraries."""
    wanted = [Path(find_interpreter()), Path(sysconfig.get_paths()["stdlib"]), Path("/etc/ld.so.cache")]
    shared = sysconfig.get_config_var("LDLIBRARY") or ""
    if ".so" in shared:
        wanted += sorted(Path(sysconfig.get_config_var("LIBDIR")).glob(f"{shared}*"))
    system = [Path(name) for name in SYSTEM if Path(name).is_dir() and not Path(name).is_symlink()]
    own = [path for path in wanted if path.exists() and not any(path.is_relative_to(top) for top in system)]
    return [str(path) for path in [*own, *system]]


def find_package_folders(names: tuple[str, ...]) -> dict[str, str]:
    """Top-level files and folders of distributions, from name to path; ConfigError if one is not installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            entries = files(name) or []
        except (PackageNotFoundError, ValueError):  # ValueError: an empty name
            raise ConfigError(f"sandbox.packages: {name!r} is not installed; pip install it or leave it out") from None
        for entry in entries:
            top = entry.parts[0]
            if not top.startswith("..") and not top.endswith((".dist-info", "__pycache__")):
                found[top] = str(Path(str(entry.locate())).parents[len(entry.parts) - 1] / top)
    return found


def build_command(spec: JailSpec, info: int) -> list[str]:
    """Build the command line of one jail; bubblewrap writes the id of its child to the descriptor ``info``.

    Raises:
        LevelUnavailable: a program that the level needs is missing.
    """
    bwrap = shutil.which("bwrap") or ""
    if spec.uses_bubblewrap and not bwrap:
        raise LevelUnavailable(f"bubblewrap is not installed; {INSTALL}")
    folders = find_package_folders(spec.packages)
    interpreter = list_interpreter_paths()
    outside = [*interpreter, str(HERE / "jail"), *folders.values()]
    if spec.uses_bubblewrap:
        inside = [*interpreter, f"{JAIL}/jail", *(f"{PACKAGES}/{name}" for name in folders)]
        roots, uid = [JAIL, PACKAGES], 0
    else:
        inside = outside
        roots = [str(HERE), *sorted({str(Path(path).parent) for path in folders.values()})]
        can_drop = _can_change_user("setuid", "setgid") and (
            spec.level == "none" or all(_is_world_readable(Path(path)) for path in outside)
        )
        uid = SANDBOX_UID if can_drop else 0
    limits, preload = dataclasses.asdict(spec.limits), [*spec.preload, *spec.packages]
    config = {"level": spec.level, "limits": limits, "preload": preload, "readable": inside, "uid": uid}
    zygote = _build_python_command("zygote", roots, config)
    if not spec.uses_bubblewrap:
        return zygote
    before = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--info-fd", str(info), "--clearenv"]
    before += [part for variable in ENVIRONMENT.items() for part in ("--setenv", *variable)]
    if spec.level == "namespaces":
        before += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"]
    links = [Path(name) for name in SYSTEM if Path(name).is_symlink()]
    after = [part for path in links for part in ("--symlink", str(path.readlink()), str(path))]
    after += ["--proc", "/proc", "--dir", "/tmp", "--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/"]
    after += ["--chdir", "/", *zygote]
    binds = list(zip(outside, inside, strict=True))
    if not _can_change_user("sys_admin", "setuid", "setgid"):
        return [*before, *[part for pair in binds for part in ("--ro-bind", *pair)], *after]
    launch = {"uid": SANDBOX_UID, "binds": binds, "before": before, "after": after}
    return _build_python_command("launch", [str(HERE)], launch)


def _build_python_command(module: str, roots: list[str], config: dict[str, Any]) -> list[str]:
    """The command that runs ``main()`` of a module of the jail, with the folders ``roots`` on its path."""
    boot = f"import sys; sys.path += {roots!r}; from jail.{module} import main; main()"
    return [find_interpreter(), *FLAGS, "-c", boot, json.dumps(config)]


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
