"""``magrpo bench credit``: how much quieter the gradient is with crossed credit, from the very same completions.

Batches are drawn, sampled and scored as training would with all joint actions (``joint_mode = "crossed"``), always with
the weights that the configuration starts from. Each batch gives two gradients for every agent: of all joint actions,
and of those paired by index only (``aligned``). Over the batches their variances are compared: with few batches too,
because both are of the same completions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from magrpo.config import RunConfig, load_config
from magrpo.policy import Policy
from magrpo.registry import ConfigError
from magrpo.stages.credit import credit
from magrpo.stages.update import Updater
from magrpo.store import RunStore, read_records
from magrpo.types import Interval, RolloutGroup, ScoredTurn
from pipelines.attempt import Standing
from pipelines.console import RunConsole
from pipelines.session import Session

Groups = list[RolloutGroup[ScoredTurn]]
MODES = ("aligned", "crossed")
_RESAMPLES = 1000


def bench_credit(config: Path, overrides: Sequence[str], batches: int) -> int:
    """Print gradient noise and joint actions of both modes; the exit code, 0.

    Raises:
        ConfigError: the configuration is unusable, has several turns, or only a subset of the joint actions.
    """
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as folder:
        resolved = load_config(config, [*overrides, "rollout.joint_mode=crossed", f"root={folder}"])
        if resolved.env.num_turns > 1 or resolved.rollout.crossed_pairs is not None:
            raise ConfigError("bench credit measures one turn with all joint actions: no crossed_pairs, num_turns = 1")
        scored = list(_batches(resolved, batches))
        gradients = _gradients(resolved, scored)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(scored, gradients))
    for agent in gradients["aligned"]:
        ratio = variance_ratio(gradients["crossed"][agent], gradients["aligned"][agent])
        console.print(
            f"{agent}: the variance of the gradient is {ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times that "
            "of aligned credit"
        )
    return 0


def aligned(group: RolloutGroup[ScoredTurn]) -> RolloutGroup[ScoredTurn]:
    """The same node with the joint actions that pair completions by index only."""
    return replace(group, turns=tuple(turn for turn in group.turns if len(set(turn.picks.values())) == 1))


def noise(gradients: NDArray[np.float64]) -> float:
    """Variance of one batch's gradient over the squared length of the mean, from ``(N, P)``; inf if none is left of it.

    The squared length is estimated without the bias that the variance of the mean adds to it.
    """
    variance = _deviations(gradients).sum() / (len(gradients) - 1)
    signal = float((gradients.mean(0) ** 2).sum() - variance / len(gradients))
    return float(variance / signal) if signal > 0 else float("inf")


def variance_ratio(minuend: NDArray[np.float64], other: NDArray[np.float64]) -> Interval:
    """Variance of the first over that of the second, both ``(N, P)``, with a bootstrap 95 % interval over batches."""
    first, second = _deviations(minuend), _deviations(other)
    picks = np.random.default_rng(0).integers(len(first), size=(_RESAMPLES, len(first)))
    low, high = np.percentile(first[picks].sum(1) / second[picks].sum(1), [2.5, 97.5])
    return Interval(float(first.sum() / second.sum()), float(low), float(high))


def _deviations(gradients: NDArray[np.float64]) -> NDArray[np.float64]:
    """The squared distance of each to their mean."""
    return np.asarray(((gradients - gradients.mean(0)) ** 2).sum(1))


def _batches(config: RunConfig, number: int) -> Iterator[Groups]:
    store = RunStore.create(config, "bench")
    standing = Standing(number, config.reward.fraction)
    with RunConsole(standing) as console, Session(config, store, console, lambda _: None) as run:
        problems, checkpoint = run.prepare(), run.start()
        for iteration in range(1, number + 1):
            pointer = run.score(iteration, 0, run.rollout(iteration, 0, problems, checkpoint, None))
            yield read_records(store.folder(pointer) / "groups.jsonl.gz", RolloutGroup[ScoredTurn])
            console.say(f"batch {iteration} of {number}")


def _gradients(config: RunConfig, scored: Sequence[Groups]) -> dict[str, dict[str, NDArray[np.float64]]]:
    """By mode and agent, ``(N, P)``."""
    updater = Updater(
        Policy.open(config.agents, config.model, config.lora, config.train.seed),
        config.algo,
        config.optim,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        num_iterations=config.train.num_iterations,
        dump=config.root / "failed-batch",
    )
    agents = [agent.name for agent in config.agents if agent.trained]
    own = {agent.name: agent.estimator for agent in config.agents if agent.estimator is not None}
    found: dict[str, dict[str, list[NDArray[np.float64]]]] = {mode: {agent: [] for agent in agents} for mode in MODES}
    for groups in scored:
        for mode, chosen in zip(MODES, ([aligned(group) for group in groups], groups), strict=True):
            samples, _ = credit(chosen, config.algo, agents, own)
            for agent in agents:
                parts = updater.gradient(agent, samples[agent]).values()
                flat = torch.cat([part.flatten() for part in parts]).double().cpu().numpy()
                found[mode][agent].append(flat)
    return {mode: {agent: np.stack(rows) for agent, rows in of.items()} for mode, of in found.items()}


def _table(scored: Sequence[Groups], gradients: dict[str, dict[str, NDArray[np.float64]]]) -> Table:
    tokens = sum(len(a.token_ids) for groups in scored for g in groups for own in g.actions.values() for a in own)
    table = Table(box=box.SIMPLE_HEAD, title=f"{len(scored)} batches, {tokens:,} tokens generated, for both the same")
    for column in ("credit", "joint actions", "different ones", *(f"noise, {agent}" for agent in gradients["aligned"])):
        table.add_column(column, justify="left" if column == "credit" else "right")
    for mode in MODES:
        chosen = [aligned(g) if mode == "aligned" else g for groups in scored for g in groups]
        texts = [(g.problem.task_id, *g.texts(turn).values()) for g in chosen for turn in g.turns]
        noises = (f"{noise(rows):.2f}" for rows in gradients[mode].values())
        table.add_row(mode, f"{len(texts):,}", f"{len(set(texts)):,}", *noises)
    table.caption = "noise: variance of a batch's gradient over the squared length of the mean gradient"
    return table
