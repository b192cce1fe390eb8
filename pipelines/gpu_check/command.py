"""``magrpo doctor --gpu``: run the steps, show their results, write the report."""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from magrpo.config.run import load_config
from magrpo.plugins import ConfigError, list_choices
from magrpo.tracking.provenance import collect_provenance
from pipelines.gpu_check.machine import find_driver
from pipelines.gpu_check.results import JSON_FILE, MARKDOWN_FILE, Result, StepReport, find_failure, write_report
from pipelines.gpu_check.steps import STEPS, has_gpu, run_step

STYLES = {"ok": "green", "note": "dim", "missed": "yellow", "failed": "bold red"}


def check_gpu(config: Path, overrides: Sequence[str], only: Sequence[str], root: Path) -> int:
    """Run the steps, or those named in ``only``; the exit code is 1 if one fails.

    If the machine is not fit the others are not tried. Without a GPU all of them run small, on the CPU. The report is
    in the current folder; the steps' own files are in ``root``, and stay there after a failure.
    """
    names = [step.name for step in STEPS]
    for name in only:
        if name not in names:
            raise ConfigError(f"--only {name}: no such step; {list_choices(name, names)}")
    if load_config(config, overrides).model.device == "cuda" and not has_gpu():
        raise ConfigError(
            f"{config} needs a GPU, but PyTorch sees none; magrpo doctor --gpu without CONFIG reports the reason"
        )
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    root.mkdir(parents=True, exist_ok=True)
    folder = (
        root / Path(tempfile.mkdtemp(prefix="gpu-check-", dir=root)).name
    )  # mkdtemp's is absolute since Python 3.12
    about, reports = describe_machine(), list[StepReport]()
    console.print(escape(", ".join(f"{name} {value}" for name, value in about.items())))

    def show(result: Result) -> None:
        expected = f" (expected: {result.expected})" if result.expected else ""
        line = escape(f"{result.name}: {result.found}{expected}")
        console.print(f"  [{STYLES[result.verdict]}]{result.verdict:<6}[/] {line}")

    for step in STEPS:
        if only and step.name not in only:
            continue
        console.print(f"[bold]{step.title}[/] ({step.name})")
        with console.status(step.title):
            reports.append(run_step(step, folder, [str(config), *overrides], show))
        write_report(Path.cwd(), about, reports)
        if step.name == "machine" and reports[-1].failure and has_gpu():
            break
    failure = find_failure(reports)
    console.print(f"\nresults: {JSON_FILE} and {MARKDOWN_FILE}")
    if failure is None:
        shutil.rmtree(folder)
        console.print("the GPU is ready for training")
        return 0
    console.print(escape(f"failed: {failure.name}: {failure.found}\n-> {failure.remedy}\nfiles of the steps: {folder}"))
    return 1


def describe_machine() -> dict[str, str]:
    """Hardware and versions, by name."""
    gpu = torch.cuda.get_device_name() if has_gpu() else "CPU"
    versions = {"driver": find_driver(), "CUDA": torch.version.cuda or ""}
    tags = collect_provenance()
    versions |= {name: tags.get(f"version.{name}", "") for name in ("python", "magrpo", "torch", "triton", "vllm")}
    versions["commit"] = tags.get("mlflow.source.git.commit", "")[:12]
    return {"device": gpu} | {name: version for name, version in versions.items() if version}
