"""One side of the comparison as a process: ``python -m tests.benchmarks.worker MODULE FOLDER VOCAB``.

Reads one JSON command a line and answers each with one line: ``["iterate", PROMPTS]`` gives seconds of rollout and
update; ``["memory"]`` bytes resident now and at most so far; the others serve :mod:`tests.benchmarks.parity`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.benchmarks import workload


def main(module: str, folder: Path, vocab_size: int) -> None:
    """Serve commands until standard input ends, and keep standard output free of anything but the answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    side = importlib.import_module(module).Side(folder)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer = _COMMANDS[name](side, folder, vocab_size, *arguments)
        answers.write(json.dumps(answer) + "\n")


def _iterate(side: Any, folder: Path, vocab_size: int, count: int) -> tuple[float, float]:
    rollout, update = side.iteration(workload.prompts(vocab_size, count))
    return rollout, update


def _memory(*_: object) -> tuple[int, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {key: value.split()[0] for key, _, value in (line.partition(":") for line in lines) if value.split()}
    return int(kilobytes["VmRSS"]) * 1024, int(kilobytes["VmHWM"]) * 1024


def _sample(side: Any, folder: Path, vocab_size: int, count: int) -> list[workload.Completions]:
    """One iteration of the peer: what it sampled. Its gradients go to ``peer-AGENT.safetensors``."""
    sampled, gradients = side.sampled(workload.prompts(vocab_size, count))
    _save(gradients, folder, "peer")
    return list(sampled)


def _train(side: Any, folder: Path, vocab_size: int, sampled: list[list[Any]]) -> None:
    """Our update on those completions; gradients go to ``ours-AGENT.safetensors``."""
    _save(side.gradients([workload.Completions(*one) for one in sampled]), folder, "ours")


def _save(gradients: workload.Gradients, folder: Path, side: str) -> None:
    for agent, tensors in gradients.items():
        save_file(tensors, folder / f"{side}-{agent}.safetensors")


_COMMANDS: dict[str, Any] = {"iterate": _iterate, "memory": _memory, "sample": _sample, "train": _train}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
