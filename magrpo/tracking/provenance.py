"""The tags that name the code, the libraries, the machine and the user of a run."""

import getpass
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def collect_provenance() -> dict[str, str]:
    """Tags with the versions of Python and the libraries, the machine, the user, and the git commit.

    Tags that cannot be found out are left out: a user id may have no name, and git may be missing, or refuse the folder
    of another user.
    """
    tags = {"version.python": sys.version.split()[0], "mlflow.source.name": "magrpo", "mlflow.source.type": "LOCAL"}
    tags["machine"] = _describe_machine()
    with suppress(KeyError, OSError):  # no environment variable and no passwd entry; OSError from Python 3.13 on
        tags["mlflow.user"] = getpass.getuser()
    for name in ("magrpo", "torch", "triton", "transformers", "peft", "vllm", "prefect", "mlflow"):
        with suppress(metadata.PackageNotFoundError):
            tags[f"version.{name}"] = metadata.version(name)
    # OSError: no git, or a folder that may not be read. CalledProcessError: git refuses the folder, or has no commit.
    with suppress(OSError, subprocess.CalledProcessError):
        checkout = Path(__file__).parents[2]
        if (checkout / ".git").exists():
            tags["mlflow.source.git.commit"] = _git(checkout, "rev-parse", "HEAD")
            tags["git.dirty"] = str(bool(_git(checkout, "status", "--porcelain", "--untracked-files=no"))).lower()
    return tags


def _describe_machine() -> str:
    """Host name, cores, architecture and NVIDIA GPUs: ``node7, 16 cores, x86_64, NVIDIA H100 80GB HBM3``."""
    parts = [platform.node(), f"{os.cpu_count()} cores", platform.machine()]
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        parts += re.findall(r"Model:\s*(.+)", path.read_text())
    return ", ".join(part for part in parts if part)


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, check=True)
    return done.stdout.decode(errors="replace").strip()
