"""The memory of an update on a GPU, and a run on a GPU that is killed and resumed.

``make gpu`` runs these tests together with the others marked ``gpu``: the compiled kernels (tests/kernels) and what
every engine promises (tests/contracts/test_engines.py).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from magrpo.config.run import load_config
from magrpo.model.collate import count_padded, plan_batches
from magrpo.model.policy import Policy
from magrpo.planning.sizes import count_token_activations
from magrpo.process.children import list_family, wait_for_end
from magrpo.run.steps import Step
from magrpo.run.store import MANIFEST, RunStore
from magrpo.stages.update import Updater
from magrpo.types import Sample
from pipelines.arguments import locate_config

EMBEDDED = locate_config("embedded")
SHORT = [
    *("train.num_iterations=2", "rollout.problems_per_iteration=2", "rollout.group_size=4"),
    *("rollout.max_new_tokens=24", "algo.update_epochs=1", "eval.every=2", "eval.max_problems=2", "eval.num_samples=1"),
    *("tracking.system_metrics=false", "tracking.traces=0"),
]
MAX_SAMPLING_GAP = {"cpu": 1e-3, "cuda": 0.1}
"""Largest mean difference of log-probabilities between engine and trainer: rounding of float32 and of bfloat16."""


def make_groups(count: int, size: int = 8, length: int = 128) -> list[Sample]:
    """Groups of ``size`` completions; prompts and completions of ``length`` tokens each, and returns that differ."""
    return [
        Sample((3 + group,) * length, (4,) * length, (0.0,) * length, float(i % 2), i % 2 - 0.5, group, 0)
        for group in range(count)
        for i in range(size)
    ]


@pytest.mark.gpu
def test_a_token_of_an_update_takes_about_the_memory_that_the_dry_run_estimates(tmp_path: Path) -> None:
    config = load_config(EMBEDDED, ["model.device=cuda", "optim.micro_batch_tokens=4096"])
    policy = Policy.open(config.agents, config.model, config.lora, seed=0)
    updater = Updater.of(policy, config, tmp_path / "failed-batch")
    updater.gradient("main", make_groups(1))  # allocates the libraries' workspaces
    tokens, peaks = [], []
    for samples in (make_groups(1), make_groups(2)):
        [batch] = plan_batches(samples, 4096, share_prompts=True)
        tokens.append(count_padded(samples, batch))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        updater.gradient("main", samples)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    measured = (peaks[1] - peaks[0]) / (tokens[1] - tokens[0])
    estimated = count_token_activations(config, policy.dtype.itemsize)
    assert 0.5 * estimated <= measured <= 1.5 * estimated


def start_magrpo(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    program = "import sys; from pipelines.cli import main; sys.exit(main())"
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.timeout(1800)  # the first start of vLLM compiles for minutes
@pytest.mark.parametrize(
    ("device", "engine"),
    [
        pytest.param("cpu", "transformers", marks=pytest.mark.slow),
        pytest.param("cuda", "transformers", marks=pytest.mark.gpu),
        pytest.param("cuda", "vllm", marks=[pytest.mark.gpu, pytest.mark.vllm]),
    ],
)
def test_a_run_that_is_killed_after_an_update_leaves_no_process_and_finishes_after_a_resume(
    device: str, engine: str, tmp_path: Path
) -> None:
    log, root = tmp_path / "log", tmp_path / "runs"
    overrides = [*SHORT, f"model.device={device}", f"engine.kind={engine}", f"root={root}"]
    run = start_magrpo(["train", str(EMBEDDED), *overrides, "--name", "short", "--local", "--quiet"], log)
    first_update = RunStore(root, "short").stage_folder(Step("update", 1).folder) / MANIFEST
    try:
        while not first_update.exists():
            assert run.poll() is None, log.read_text()
            time.sleep(0.1)
        family = list_family(run.pid)
    finally:
        run.kill()
        run.wait()
    assert wait_for_end(family, 60) == []
    again = start_magrpo(["resume", "short", "--root", str(root), "--local", "--quiet"], log)
    assert again.wait() == 0, log.read_text()
    metrics = {(iteration, stage): values for iteration, stage, values in RunStore(root, "short").stage_metrics()}
    for iteration in (1, 2):
        assert metrics[iteration, "update"]["update/sampling_gap"] <= MAX_SAMPLING_GAP[device]
        assert metrics[iteration, "update"]["update/main/grad_norm"] > 0
