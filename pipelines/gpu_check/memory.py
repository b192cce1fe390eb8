"""Step 6: the memory of an update of the configuration, and the micro-batch that it leaves room for."""

import sys
from collections.abc import Iterator

import torch

from magrpo.config.run import RunConfig
from magrpo.model.collate import count_padded, plan_batches
from magrpo.model.forward import can_share_prompts, find_logit_map
from magrpo.model.policy import Policy
from magrpo.planning.card import GIB
from magrpo.planning.sizes import count_token_activations
from magrpo.process.faults import is_out_of_memory
from magrpo.stages.update import Updater
from magrpo.types import Sample
from magrpo_kernels import bench
from pipelines.gpu_check.results import Result, Verdict, judge
from pipelines.gpu_check.setting import Setting

LENGTH = 256
"""Tokens of a sequence, half of them sampled."""
MAX_GROUP = 8
"""Completions that share a prompt, and a row: at most as many as in a rollout."""
SPARE = 0.9
"""Share of the card that an update should take: ragged micro-batches fragment memory."""
ASLEEP_BYTES = 2 * GIB
"""What an engine that sleeps may keep."""


def probe_memory(setting: Setting) -> Iterator[Result]:
    """Measure the bytes per token of an update and say which ``optim.micro_batch_tokens`` fits.

    The update of one group is compared with that of two.
    """
    config = with_micro_batch(setting.config, 2 * MAX_GROUP * LENGTH)
    policy = Policy.open(config.agents, config.model, config.lora, config.train.seed)
    updater = Updater.of(policy, config, setting.folder / "failed-batch")
    agent = next(agent for agent in policy.agents if policy.lineup.config(agent).trained)
    with policy.active(agent) as model:
        linear, shares = find_logit_map(model) is not None, can_share_prompts(model)
    for name, holds in (
        ("logits are linear in the hidden states", linear),
        ("completions share the row of their prompt", shares),
    ):
        yield Result(name, "yes" if holds else "no: updates take longer", verdict="note")
    length, size = min(LENGTH, policy.lineup.max_length(agent)), min(MAX_GROUP, config.rollout.group_size)
    probes = [make_samples(number, size, length) for number in (1, 2)]
    tokens = [count_padded(samples, plan_batches(samples, sys.maxsize, shares)[0]) for samples in probes]
    try:
        updater.gradient(agent, probes[0])  # makes the workspaces of libraries
        peaks = [_measure_peak(setting, updater, agent, samples) for samples in probes]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        remedy = "take a smaller base model, weights = 'lora', or a larger card"
        yield Result("update", "out of memory", f"fits at {tokens[1]} tokens", "failed", remedy)
        return
    if updater.micro_batch_tokens != config.optim.micro_batch_tokens:
        limit = updater.micro_batch_tokens
        expected = f"{tokens[1]} tokens fit: set optim.micro_batch_tokens={limit}"
        yield Result("update", f"out of memory, continued with {limit}", expected, "missed", value=float(limit))
        return
    per_token = max(peaks[1] - peaks[0], 1) / (tokens[1] - tokens[0])
    yield _compare_estimate(setting, per_token)
    if not setting.is_small:
        yield _advise_tokens(setting, policy, per_token)


def with_micro_batch(config: RunConfig, tokens: int) -> RunConfig:
    """The configuration with other micro-batches."""
    return config.model_copy(update={"optim": config.optim.model_copy(update={"micro_batch_tokens": tokens})})


def make_samples(num_groups: int, group_size: int, length: int) -> list[Sample]:
    """Groups of samples that share a prompt, with different returns; ``length``: of prompt and completion."""
    half = length // 2
    return [
        Sample((3 + group,) * half, (4,) * half, (0.0,) * half, float(i % 2), i % 2 - 0.5, group, 0)
        for group in range(num_groups)
        for i in range(group_size)
    ]


def _measure_peak(setting: Setting, updater: Updater, agent: str, samples: list[Sample]) -> int:
    row = bench.Row("update")
    with bench.peak_memory(row, setting.device):
        updater.gradient(agent, samples)
    return row.peak_bytes


def _compare_estimate(setting: Setting, per_token: float) -> Result:
    estimated = count_token_activations(setting.config, setting.model_dtype.itemsize)
    found, expected = f"{per_token / 1e6:.3g} MB", f"{estimated / 1e6:.3g} MB as --dry-run estimates"
    near = 0.5 * estimated <= per_token <= 1.5 * estimated
    # On a CPU the resident set says little about small tensors.
    verdict: Verdict = "note" if setting.is_small else "ok" if near else "missed"
    return Result("a token of an update", found, expected, verdict, value=per_token / 1e6)


def _advise_tokens(setting: Setting, policy: Policy, per_token: float) -> Result:
    policy.lineup.release_cached_memory()
    free, total = torch.cuda.mem_get_info(setting.device)
    config = setting.config
    trained = [
        sum(parameter.numel() for parameter in policy.parameters(agent).values())
        for agent in policy.agents
        if policy.lineup.config(agent).trained and policy.lineup.holder(agent) == agent
    ]
    states = 8 * sum(trained) + 4 * max(trained)
    room = free - (1 - SPARE) * total - states - ASLEEP_BYTES
    most = int(room / per_token) // 256 * 256
    configured = config.optim.count_micro_batch_tokens("cuda")
    expected = f"at most {most:,} on {total / GIB:.0f} GiB"
    if most < LENGTH:
        remedy = "take a smaller base model, weights = 'lora', or a larger card"
        return judge("optim.micro_batch_tokens", f"{configured:,}", expected, good=False, remedy=remedy)
    expected += "" if configured <= most else f": set optim.micro_batch_tokens={most}"
    verdict: Verdict = "ok" if configured <= most else "missed"
    return Result("optim.micro_batch_tokens", f"{configured:,}", expected, verdict, value=float(most))
