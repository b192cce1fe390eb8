"""What code a run ran."""

from __future__ import annotations

import getpass
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def provenance() -> dict[str, str]:
    """Tags that say who ran what code: versions of Python and the libraries, and the git commit where there is one."""
    tags = {
        "version.python": sys.version.split()[0],
        "mlflow.user": getpass.getuser(),
        "mlflow.source.name": "magrpo",
        "mlflow.source.type": "LOCAL",
    }
    for name in ("magrpo", "torch", "triton", "transformers", "peft", "vllm", "prefect", "mlflow"):
        try:
            tags[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists() and shutil.which("git"):
        tags["mlflow.source.git.commit"] = _git(checkout, "rev-parse", "HEAD")
        tags["git.dirty"] = str(bool(_git(checkout, "status", "--porcelain", "--untracked-files=no"))).lower()
    return tags


def _git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
