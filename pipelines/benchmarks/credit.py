"""``magrpo bench credit``: how much quieter the gradient is with crossed credit, from the very same completions.

Batches are drawn, sampled and scored as training would with all joint actions (``joint_mode = "crossed"``), always with
the weights that the configuration starts from. Each problem gives gradients for every agent: with the credit of all
joint actions, and with that of one pairing of the completions (``aligned``), for every pairing. Crossed credit is the
mean of aligned credit over the pairings; one of them alone would compare a mean with the luck of one of its terms.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from magrpo.config import RunConfig, load_config
from magrpo.layout import Step, read_scored
from magrpo.plugins import ConfigError
from magrpo.policy import Policy
from magrpo.stages.credit import credit
from magrpo.stages.update import Updater
from magrpo.store import RunStore
from magrpo.types import Interval, RolloutGroup, ScoredTurn
from pipelines.progress.console import RunConsole
from pipelines.progress.state import RunProgress, RunState
from pipelines.training.stages import StageRunner

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
        whole = [group for batch in scored for group in batch if not any(turn.masked for turn in group.turns)]
        if len(whole) < 2:
            raise ConfigError("bench credit: the sandbox failed on all problems but one at most; nothing is compared")
        gradients = _gradients(resolved, whole)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(scored, gradients, resolved.rollout.problems_per_iteration))
    for agent, found in gradients.items():
        ratio = found.variance_ratio()
        console.print(
            f"{agent}: the variance of the gradient is {ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times that "
            f"of aligned credit, over {len(whole)} problems"
        )
    return 0


@dataclass(frozen=True, slots=True)
class NodeGradients:
    """What variances need of one agent's gradients of ``N`` nodes under both kinds of credit."""

    crossed: NDArray[np.float64]
    """Scalar products of the nodes' gradients with the credit of all joint actions, ``(N, N)``."""
    aligned: NDArray[np.float64]
    """The same of the means over all pairings, ``(N, N)``."""
    spread: NDArray[np.float64]
    """The mean squared distance of a pairing's gradient to that mean, ``(N,)``."""

    def variance(self, mode: str, counts: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """The variance of one node's gradient, summed over parameters, ``(R,)``.

        Of the nodes, or of ``R`` resamples of them, ``counts`` of shape ``(R, N)``. That of aligned credit is by the
        law of total variance: how completions are paired is as random as they are. The mean over all pairings is what
        crossed credit gives, where advantages are linear in returns; so crossed credit varies less (Rao-Blackwell).
        """
        products = self.crossed if mode == "crossed" else self.aligned
        number = len(products)
        if counts is None:
            counts = np.ones((1, number))
        around = counts @ products.diagonal() - ((counts @ products) * counts).sum(1) / number
        between = around / (number - 1)
        return np.asarray(between if mode == "crossed" else between + counts @ self.spread / number)

    def noise(self, mode: str, num_nodes: int) -> float:
        """Variance of the mean of ``num_nodes`` nodes over the squared length of its expectation; inf if none is left.

        The squared length is estimated without the bias that the variance of the mean adds to it.
        """
        signal = float(self.crossed.mean() - self.variance("crossed")[0] / len(self.crossed))
        return float(self.variance(mode)[0] / num_nodes / signal) if signal > 0 else float("inf")

    def variance_ratio(self) -> Interval:
        """Variance under crossed over that under aligned credit, with a bootstrap 95 % interval over nodes."""
        number = len(self.spread)
        counts = np.random.default_rng(0).multinomial(number, [1 / number] * number, size=_RESAMPLES).astype(float)
        ratios = _ratio(self.variance("crossed", counts), self.variance("aligned", counts))
        low, high = np.percentile(ratios, [2.5, 97.5])
        [mean] = _ratio(self.variance("crossed"), self.variance("aligned"))
        return Interval(float(mean), float(low), float(high))


def _ratio(crossed: NDArray[np.float64], aligned: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 where neither varies at all."""
    return np.divide(crossed, aligned, out=np.ones_like(crossed), where=aligned > 0)


def pairings(group: RolloutGroup[ScoredTurn]) -> Iterator[RolloutGroup[ScoredTurn]]:
    """The node with the joint actions of each pairing of its completions, all shifts of the agents against the first.

    Of ``G`` completions of each of ``n`` agents there are ``G ** (n - 1)`` such pairings; the first one pairs equal
    indices, and together they hold every joint action once.
    """
    first, *others = group.actions
    size = len(group.actions[first])
    for shifts in itertools.product(range(size), repeat=len(others)):
        wanted = dict(zip(others, shifts, strict=True))
        kept = (
            turn
            for turn in group.turns
            if all((turn.picks[agent] - turn.picks[first]) % size == shift for agent, shift in wanted.items())
        )
        yield replace(group, turns=tuple(kept))


def node_gradients(
    crossed: NDArray[np.float64], aligned: NDArray[np.float64], of_completions: Iterable[NDArray[np.float32]]
) -> NodeGradients:
    """From advantages under crossed credit, ``(N, G)``, and under each pairing, ``(K, N, G)``.

    ``of_completions``: for each node the gradients of its completions at an advantage of 1, ``(G, P)``. The gradient of
    a node is the mean over its completions, linear in their advantages. Holds ``2 N P`` numbers.
    """
    number, size = crossed.shape
    means, spread = aligned.mean(0), np.zeros(number)
    rows: list[list[NDArray[np.float32]]] = [[], []]
    for node, gradients in enumerate(of_completions):
        products = gradients.astype(float) @ gradients.T.astype(float)  # (G, G)
        off = (aligned[:, node] - means[node]) / size  # (K, G)
        spread[node] = ((off @ products) * off).sum(1).mean()
        for kept, advantages in zip(rows, (crossed[node], means[node]), strict=True):
            kept.append((advantages / size).astype(np.float32) @ gradients)
    of_crossed, of_aligned = (np.stack(kept) for kept in rows)
    return NodeGradients((of_crossed @ of_crossed.T).astype(float), (of_aligned @ of_aligned.T).astype(float), spread)


def _batches(config: RunConfig, number: int) -> Iterator[Groups]:
    store = RunStore.create(config, "bench")
    state = RunState(number, config.reward.fraction)
    with (
        RunConsole(state) as console,
        StageRunner(config, store, RunProgress(state, console), lambda _: None) as stages,
    ):
        untrained = [stages.run_step(Step("prepare", 0), []), stages.run_step(Step("start", 0), [])]
        for iteration in range(1, number + 1):
            rollout = stages.run_step(Step("rollout", iteration, "0"), untrained)
            scored = stages.run_step(Step("score", iteration, "0"), [rollout])
            yield read_scored(store.folder(scored))
            console.say(f"batch {iteration} of {number}")


def _gradients(config: RunConfig, nodes: Sequence[RolloutGroup[ScoredTurn]]) -> dict[str, NodeGradients]:
    """By agent. Token losses are summed and no penalty is added: ``loss_norm`` and ``beta`` do not depend on credit."""
    policy = Policy.open(config.agents, config.model, config.lora, config.train.seed)
    algo = config.algo.model_copy(update={"loss_norm": "sequence_sum", "beta": 0.0})
    updater = Updater.of(policy, config.model_copy(update={"algo": algo}), config.root / "failed-batch")
    agents = [agent.name for agent in config.agents if agent.trained]
    own = {agent.name: agent.estimator for agent in config.agents if agent.estimator is not None}
    samples, _ = credit(nodes, config.algo, agents, own)
    aligned = [credit(chosen, config.algo, agents, own)[0] for chosen in zip(*map(pairings, nodes), strict=True)]
    found = {}
    for agent in agents:
        shape = len(nodes), config.rollout.group_size
        of_crossed = np.array([sample.advantage for sample in samples[agent]]).reshape(shape)
        of_aligned = np.stack([np.array([s.advantage for s in one[agent]]).reshape(shape) for one in aligned])
        each = (_flat(updater.gradient(agent, [replace(sample, advantage=1.0)])) for sample in samples[agent])
        of_completions = (np.stack([*itertools.islice(each, shape[1])]) for _ in nodes)
        found[agent] = node_gradients(of_crossed, of_aligned, of_completions)
    return found


def _flat(gradient: Mapping[str, torch.Tensor]) -> NDArray[np.float32]:
    return torch.cat([part.flatten() for part in gradient.values()]).float().cpu().numpy()


def _table(scored: Sequence[Groups], gradients: Mapping[str, NodeGradients], num_nodes: int) -> Table:
    groups = [group for batch in scored for group in batch]
    tokens = sum(len(a.token_ids) for g in groups for own in g.actions.values() for a in own)
    table = Table(box=box.SIMPLE_HEAD, title=f"{len(scored)} batches, {tokens:,} tokens generated, for both the same")
    for column in ("credit", "joint actions", "different ones", *(f"noise, {agent}" for agent in gradients)):
        table.add_column(column, justify="left" if column == "credit" else "right")
    for mode in MODES:
        chosen = [next(pairings(group)) if mode == "aligned" else group for group in groups]
        texts = [(g.problem.task_id, *g.texts(turn).values()) for g in chosen for turn in g.turns]
        noises = (f"{found.noise(mode, num_nodes):.2f}" for found in gradients.values())
        table.add_row(mode, f"{len(texts):,}", f"{len(set(texts)):,}", *noises)
    table.caption = f"noise: variance of the gradient of {num_nodes} problems over the squared length of its mean"
    return table
