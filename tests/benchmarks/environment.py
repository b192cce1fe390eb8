"""The two sides as child processes, and ``.bench-venv``, the environment of the peer."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".bench-venv"
PINS = ROOT / "requirements" / "bench.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


class BenchmarkError(RuntimeError):
    """The environment could not be made, or a side ended. The message names the remedy or the log."""


def ensure_environment() -> Path:
    """Make ``.bench-venv`` if it does not match ``requirements/bench.txt``; its interpreter.

    ``TORCH_INDEX`` names the index of torch's CPU builds, as for ``make setup`` (empty: none beside pip's settings).

    Raises:
        BenchmarkError: pip failed.
    """
    stamp, python = VENV / "requirements.sha256", VENV / "bin" / "python"
    digest = hashlib.sha256(f"{VENV}\n{sys.version}\n{PINS.read_text()}".encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"Setting up {VENV.name} with CoMLRL (once; some minutes)", flush=True)
    if not python.exists():
        venv.create(VENV, with_pip=True, symlinks=True)
    log = VENV / "setup.log"
    pip = [str(python), "-m", "pip", "install", "--no-deps", "--no-input", "--disable-pip-version-check"]
    torch = next(line for line in PINS.read_text().splitlines() if line.startswith("torch=="))
    index = os.environ.get("TORCH_INDEX", TORCH_INDEX)
    first = ["--retries", "0", *(["--extra-index-url", index] if index else []), torch]
    with log.open("w") as file:
        for arguments in (first, ["-r", str(PINS)]):
            if subprocess.run([*pip, *arguments], stdout=file, stderr=subprocess.STDOUT).returncode:
                raise BenchmarkError(
                    f"pip failed, see {log}. Is the package index reachable? TORCH_INDEX names a mirror"
                )
    stamp.write_text(digest)
    return python


class Worker:
    """A side that answers commands; see :mod:`tests.benchmarks.worker`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, *command: Any) -> Any:
        """The answer to one command.

        Raises:
            BenchmarkError: the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: there is no answer to read either
        answer = self._process.stdout.readline()
        if not answer:
            tail = self._log.read_text().strip().splitlines()[-15:]
            raise BenchmarkError("\n".join([f"{self._log.name}: the process ended:", *tail]))
        return json.loads(answer)


@contextmanager
def worker(side: str, python: Path, folder: Path, vocab_size: int) -> Iterator[Worker]:
    """Start ``ours`` or ``peer`` on the model in ``folder``; it is ended with the context."""
    log = folder / f"{side}.log"
    command = [str(python), "-m", "tests.benchmarks.worker", f"tests.benchmarks.{side}", str(folder), str(vocab_size)]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled", "DO_NOT_TRACK": "true"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=ROOT,
            env=os.environ | quiet | {"PYTHONPATH": str(ROOT)},
        )
    try:
        yield Worker(process, log)
    finally:
        process.kill()
        process.communicate()
