"""The memory of an update, and a run that is killed and resumed, on a GPU and on a CPU.

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
from torch import nn

from magrpo.config.run import load_config
from magrpo.model.collate import count_padded, make_attention_mask, plan_batches
from magrpo.model.policy import Policy
from magrpo.planning.sizes import UPDATING, estimate_memory
from magrpo.process.children import list_family
from magrpo.run.manifest import MANIFEST
from magrpo.run.steps import Step
from magrpo.run.store import RunStore
from magrpo.types import Sample
from magrpo.updates.updater import Updater
from pipelines.arguments import locate_config
from tests.memory_meter import MemoryMeter
from tests.processes import assert_all_end
from tests.updates.updating import compute_gradient

EMBEDDED = locate_config("embedded")
SHORT = [
    *("train.num_iterations=2", "rollout.problems_per_iteration=2", "rollout.group_size=4"),
    *("rollout.max_new_tokens=24", "algo.update_epochs=1", "eval.every=2", "eval.max_problems=2", "eval.num_samples=1"),
    *("tracking.system_metrics=false", "tracking.traces=0"),
]
MAX_SAMPLING_GAP = {"cpu": 1e-3, "cuda": 0.1}
"""Largest mean difference of log-probabilities between engine and trainer: rounding of float32 and of bfloat16."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masked_attention_has_gradients_at_every_length(device: str) -> None:
    """As for an attention head of Qwen2.5-Coder, whose scores are far below 0; cuDNN's gradients are NaN there."""
    config = load_config(EMBEDDED, [f"model.device={device}"])
    Policy.open(config.agents, config.model, config.lora, seed=0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for length in (310, 320, 384):  # 320 is 64 more than a multiple of 128
        mask = make_attention_mask(torch.tensor([[0] * 100 + [1] * 100 + [2] * (length - 200)], device=device), dtype)
        query, key, value = (torch.ones(1, 2, length, 64, device=device, dtype=dtype) for _ in range(3))
        query, key = query.requires_grad_(), (-20 * key).requires_grad_()  # scores of -20 x 64 / 8
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        attended.sum().backward()
        assert attended.isfinite().all()
        assert query.grad is not None
        assert query.grad.isfinite().all(), length


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.dtype=float32"],
        ["model.dtype=bfloat16"],
        ["model.dtype=bfloat16", "agents.0.weights=full", "agents.1.weights=full"],
        ["model.dtype=float32", "optim.gradient_checkpointing=true"],
    ],
    ids=["adapters", "bfloat16", "full", "computed-again"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("threads")
def test_an_update_takes_about_the_memory_that_the_dry_run_estimates(
    device: str, overrides: list[str], tmp_path: Path
) -> None:
    torch.set_num_threads(1)  # one agent at a time
    num_tokens = 2048 if device == "cuda" else 1024
    given = [f"model.device={device}", f"optim.micro_batch_tokens={num_tokens}", *overrides]
    config = load_config(EMBEDDED, given)
    policy = Policy.open(config.agents, config.model, config.lora, seed=0)
    updater = Updater.of(policy, config, tmp_path / "failed-batch")
    samples = [
        Sample((3,) * 128, (4,) * 128, (0.0,) * 128, float(i % 2), i % 2 - 0.5, 0, 0)
        for i in range(num_tokens // 128 - 1)
    ]
    [batch] = plan_batches(samples, num_tokens, share_prompts=True)
    assert count_padded(samples, batch) > 0.99 * num_tokens
    if device == "cuda":
        compute_gradient(updater, "main", samples)  # allocates the libraries' workspaces
    with MemoryMeter() as meter:
        compute_gradient(updater, "main", samples)
    sizes = estimate_memory(config, policy.dtype.itemsize, None)
    estimated = sum(sizes.get(purpose, 0.0) for purpose in UPDATING)
    # Full copies take a tensor of logits less on some processors than on others: 23 % of this small model's estimate.
    assert meter.peak == pytest.approx(estimated, rel=0.25)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compute_gradient(updater, "main", samples)
        assert torch.cuda.max_memory_allocated() - before == pytest.approx(estimated, rel=0.2)


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
    first_update = RunStore(root, "short").stage_folder(Step("update", 1).output) / MANIFEST
    try:
        while not first_update.exists():
            assert run.poll() is None, log.read_text()
            time.sleep(0.1)
        family = list_family(run.pid)
    finally:
        run.kill()
        run.wait()
    assert_all_end(family)
    again = start_magrpo(["resume", "short", "--root", str(root), "--local", "--quiet"], log)
    assert again.wait() == 0, log.read_text()
    metrics = {(iteration, stage): values for iteration, stage, values in RunStore(root, "short").stage_metrics()}
    for iteration in (1, 2):
        assert metrics[iteration, "update"]["update/sampling_gap"] <= MAX_SAMPLING_GAP[device]
        assert metrics[iteration, "update"]["update/main/grad_norm"] > 0
