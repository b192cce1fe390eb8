"""The tags that name the code, the libraries and the user of a run."""

import getpass
import json
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def collect_provenance() -> dict[str, str]:
    """Tags with the versions of Python and the libraries, the user, and the git commit.

    Unknown tags are left out: a user id may have no name, and git may be missing or refuse another user's folder.
    """
    tags = {"version.python": sys.version.split()[0], "mlflow.source.name": "magrpo", "mlflow.source.type": "LOCAL"}
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


def read_recorded_tags(folder: Path) -> dict[str, str]:
    """The tags that a run recorded, from ``tracking.jsonl`` in its folder; the newest value of each."""
    path = folder / "tracking.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a crash may have torn the last line
    tags: dict[str, str] = {}
    for record in map(json.loads, lines):
        if record["kind"] == "tags":
            tags |= record["values"]
    return tags


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, check=True)
    return done.stdout.decode(errors="replace").strip()
