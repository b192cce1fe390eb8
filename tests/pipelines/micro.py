"""A training run of seconds on real parts: tiny random models, the transformers engine, real updates.

Only what is written and how it is judged is scripted: a program passes when a digest of its text is even, so groups
differ and weights move. ``write_config`` makes the configuration of such a run.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from magrpo.interfaces import Progress
from magrpo.registry import Plugin
from magrpo.types import Execution, ExecutionReport
from tests.fakes import ScriptedSandbox
from tests.tiny import tiny_base, tiny_config


class DigestSandbox(ScriptedSandbox):
    """Judges by a digest of the text; kills its own process in the batch numbered ``kill_at``, from 1."""

    def __init__(self, kill_at: int) -> None:
        super().__init__(lambda e: "pass" if hashlib.sha256(e.source.encode()).digest()[0] % 2 else "wrong")
        self.kill_at = kill_at

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        if len(self.batches) + 1 == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(executions, progress)


class Sandbox(Plugin):
    """Opens a :class:`DigestSandbox`; the batch to die in comes from the environment, for one attempt only."""

    def open(self) -> DigestSandbox:
        return DigestSandbox(int(os.environ.get("MICRO_KILL_IN_SCORE", "0")))


CONFIG = """
root = "{root}"

[[agents]]
name = "helper"
role = "helper"
model = "{base}"

[[agents]]
name = "main"
role = "main"
model = "{base}"

[problems]
kind = "tests.plugins:ListedProblems"
size = 6

[env]
kind = "tests.plugins:Env"

[reward]
kind = "tests.plugins:Reward"

[sandbox]
kind = "tests.pipelines.micro:Sandbox"

[engine]
kind = "transformers"

[lora]
rank = 2
alpha = 4.0

[rollout]
problems_per_iteration = 2
group_size = 4
max_new_tokens = 6

[optim]
lr = 1e-2

[train]
num_iterations = {iterations}

[eval]
every = 2
num_samples = 2
max_problems = 2
"""


def write_config(folder: Path, iterations: int = 3) -> Path:
    """Write the base model and ``run.toml`` into ``folder``; runs go to ``folder/runs``."""
    base = folder / "base"
    if not base.exists():
        tiny_base(base, tiny_config(max_length=64))
    path = folder / "run.toml"
    path.write_text(CONFIG.format(root=folder / "runs", base=base, iterations=iterations))
    return path
