"""The list of steps; each runs in a process of its own, so that a crash of one is a result and not the end.

``python -m pipelines.gpu_check.steps NAME FOLDER CONFIG [OVERRIDES...] FD`` is that process: it sends each result as
JSON over the socket FD, and an empty message at the end.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from magrpo.config.run import load_config
from magrpo.process.child import Child, ProcessDied, share_paths
from pipelines.gpu_check.results import Result, StepReport


@dataclass(frozen=True, slots=True)
class CheckStep:
    """One step."""

    name: str
    title: str
    function: str
    """Its module and function, which takes a setting and yields results."""
    deadline_s: float = 600.0


STEPS = (
    CheckStep("machine", "Machine", "machine:check_machine"),
    CheckStep("ceilings", "Ceilings", "ceilings:measure_ceilings"),
    CheckStep("kernels", "Kernels against float64", "kernels:check_kernels"),
    CheckStep("loss", "Loss compared with its floor", "loss:measure_loss", 1800.0),
    CheckStep("engine", "Engine compared with the trainer", "engine:check_engine", 1800.0),
    CheckStep("memory", "Memory of an update", "memory:probe_memory", 1800.0),
    CheckStep("training", "Two iterations, killed and resumed", "training:train_twice", 1800.0),
)


def run_step(step: CheckStep, folder: Path, words: Sequence[str], show: Callable[[Result], None]) -> StepReport:
    """Run a step in a process of its own. ``words``: configuration and overrides; ``show`` is given each result."""
    environment = share_paths()
    if step.name == "kernels" and not has_gpu():
        environment["TRITON_INTERPRET"] = "1"
    log = folder / f"{step.name}.log"
    began, results = time.perf_counter(), list[Result]()
    child = Child([sys.executable, "-m", __name__, step.name, str(folder), *words], log, environment)
    child.name = f"step {step.name!r}"
    try:
        with child.enforce_deadline(step.deadline_s):
            while message := child.receive():
                results.append(Result(**json.loads(message)))
                show(results[-1])
    except ProcessDied as error:
        results.append(Result("the step's process", str(error), "runs to its end", "failed", f"read {log}"))
        show(results[-1])
    finally:
        child.kill()
    return StepReport(step.name, step.title, time.perf_counter() - began, tuple(results))


def has_gpu() -> bool:
    """Whether PyTorch can use a GPU."""
    import torch  # half a second

    return torch.cuda.is_available()


def list_results(name: str, folder: Path, words: Sequence[str]) -> Iterator[Result]:
    """Run a step here."""
    import torch  # half a second

    from pipelines.gpu_check.setting import Setting  # torch

    device = torch.device("cuda" if has_gpu() else "cpu")
    config = load_config(Path(words[0]), [*words[1:], f"model.device={device.type}"])
    module, _, function = next(step.function for step in STEPS if step.name == name).partition(":")
    loaded = importlib.import_module(f"pipelines.gpu_check.{module}")
    yield from getattr(loaded, function)(Setting(config, device, folder))


def main(arguments: Sequence[str]) -> None:
    """Run one step and send its results."""
    from magrpo.process.environment import prepare_environment  # before any library

    prepare_environment()
    sys.path.append(str(Path.cwd()))  # where plug-ins of a configuration are
    name, folder, *words, fd = arguments
    channel = Connection(int(fd))
    for result in list_results(name, Path(folder), words):
        channel.send_bytes(json.dumps(asdict(result)).encode())
    channel.send_bytes(b"")


if __name__ == "__main__":
    main(sys.argv[1:])
