"""Step 1: driver, GPU, memory, compiler and libraries, before anything else is tried."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from magrpo.engines.vllm_arguments import find_obstacle
from magrpo.planning.card import GIB, check_card
from magrpo.planning.sizes import POLICY, estimate_memory
from magrpo.plugins import ConfigError
from pipelines.gpu_check.results import Result, judge
from pipelines.gpu_check.setting import Setting

MIN_GIB = 15
"""Of the card: 16 GB are a little less."""
MIN_DRIVER = 580
"""The first of CUDA 13, which torch is built for."""
MIN_CAPABILITY = (8, 0)
"""Bfloat16 products in hardware."""
_ANSWER_S = 30.0
"""Seconds that nvidia-smi may take, which hangs on a broken driver."""


def check_machine(setting: Setting) -> Iterator[Result]:
    """Check that the other steps can run."""
    yield from _check_gpu(setting) if not setting.is_small else _explain_missing_gpu()
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    remedy = "install one (apt-get install gcc), or name it in CC"
    yield judge("C compiler for Triton", str(compiler or "none"), "one on the PATH", compiler is not None, remedy)
    sizes = estimate_memory(setting.config, setting.model_dtype.itemsize, None)
    weights = sum(sizes.get(purpose, 0.0) for purpose in POLICY)
    memory = psutil.virtual_memory().available
    found, expected = f"{memory / GIB:.1f} GiB free", f"{2 * weights / GIB:.1f} GiB: twice the weights"
    yield judge("memory of the host", found, expected, memory >= 2 * weights, "free some, or use a smaller base model")
    obstacle = find_obstacle("cpu" if setting.is_small else "cuda")
    found = f"{obstacle}; samples with engine.kind=transformers" if obstacle else "installed"
    yield Result("vLLM", found, verdict="note")


def find_driver() -> str:
    """The version of the NVIDIA driver; empty if nobody tells it."""
    if not (tool := shutil.which("nvidia-smi")):
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    version = re.match(r"\d+[\d.]*", done.stdout)
    return version[0] if version else ""


def _check_gpu(setting: Setting) -> Iterator[Result]:
    properties = torch.cuda.get_device_properties(setting.device)
    capability = torch.cuda.get_device_capability(setting.device)
    driver = find_driver()
    remedy = f"install driver {MIN_DRIVER} or newer"
    is_new = not driver or int(driver.partition(".")[0]) >= MIN_DRIVER
    yield judge("driver", driver or "unknown: no nvidia-smi", f"{MIN_DRIVER} or newer", is_new, remedy)
    yield Result("CUDA of torch", str(torch.version.cuda), verdict="note")
    name = f"{properties.name}, sm_{capability[0]}{capability[1]}, {properties.multi_processor_count} multiprocessors"
    yield judge("GPU", name, "sm_80 or newer", capability >= MIN_CAPABILITY, "use an Ampere card or a newer one")
    free, total = (size / GIB for size in torch.cuda.mem_get_info(setting.device))
    found, expected = f"{free:.1f} of {total:.1f} GiB free", f"{MIN_GIB} GiB or more, nearly all of it free"
    remedy = "end the other processes on the card (nvidia-smi lists them), or use a larger card"
    yield judge("memory of the card", found, expected, free >= max(MIN_GIB, 0.9 * total), remedy)
    yield _check_estimate(setting, total * GIB)


def _check_estimate(setting: Setting, card: float) -> Result:
    """Whether the configuration fits the card, as ``--dry-run`` estimates."""
    name, expected = "the configuration on this card", "fits, by the estimate of --dry-run"
    try:
        change = check_card(setting.config, setting.model_dtype.itemsize, setting.engine, card)
    except ConfigError as error:
        found, _, remedy = str(error).rpartition("; ")
        return Result(name, found, expected, "failed", remedy)
    found = f"fits; micro-batches are halved unless {change}" if change else "fits"
    return Result(name, found, expected, "missed" if change else "ok")


def _explain_missing_gpu() -> Iterator[Result]:
    if Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists():
        remedy = f"make setup GPU=1 in a clone; if that does not help, install driver {MIN_DRIVER} or newer"
        found = f"there, but torch {torch.__version__} cannot use it (driver {find_driver() or 'unknown'})"
    else:
        found, remedy = "none", "run it on a machine with an NVIDIA GPU; here the steps run at a small size on the CPU"
    yield Result("GPU", found, "one that PyTorch can use", "failed", remedy)
