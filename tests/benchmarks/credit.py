"""The variance of the gradient under crossed and aligned credit, from the same completions.

:mod:`tests.benchmarks.measure` runs it. Batches are sampled and scored with all joint actions and the initial weights.
Each problem gives every agent's gradients under crossed credit, and under aligned credit for every pairing of the
completions: crossed credit is the mean over all pairings, and a single pairing would add the noise of its choice.
"""

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter, validators
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.model.policy import Policy
from magrpo.stages.credit import CreditRules, credit
from magrpo.types import Interval, RolloutGroup, ScoredTurn
from magrpo.updates.updater import Updater
from pipelines.arguments import ConfigFile, Overrides
from pipelines.benchmarks.iteration import score_batches
from tests.updates.updating import compute_gradient

Group = RolloutGroup[ScoredTurn]
_NUM_RESAMPLES = 1000


def bench_credit(
    config: ConfigFile,
    /,
    *overrides: Overrides,
    batches: Annotated[int, Parameter(validator=validators.Number(gte=2))] = 8,
) -> int:
    """Print gradient noise and joint actions of both modes; the exit code is 0.

    Raises ConfigError if the configuration has several turns, or only a subset of the joint actions.

    Args:
        config: TOML file of a run with one turn.
        batches: Number of iterations to sample problems for.
    """
    with tempfile.TemporaryDirectory(prefix="magrpo-bench-") as folder:
        resolved = load_config(config, [*overrides, "rollout.joint_mode=crossed", f"root={folder}"])
        if resolved.env.num_turns > 1 or resolved.rollout.crossed_pairs is not None:
            raise ConfigError(
                "this benchmark measures one turn with all joint actions: remove crossed_pairs, set env.num_turns = 1"
            )
        groups = score_batches(resolved, batches)
        complete = [group for group in groups if not any(turn.masked for turn in group.turns)]
        if len(complete) < 2:
            raise ConfigError("fewer than two problems are left to compare: the sandbox failed on the others")
        gradients = _compute_gradients(resolved, complete)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_make_table(groups, batches, gradients, resolved.rollout.problems_per_iteration))
    for agent, node_products in gradients.items():
        ratio = node_products.variance_ratio()
        console.print(
            f"{agent}: the variance of the gradient is {ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times that "
            f"of aligned credit, over {len(complete)} problems"
        )
    return 0


@dataclass(frozen=True, slots=True)
class NodeGradients:
    """Inner products of one agent's gradients at ``N`` nodes under both kinds of credit."""

    crossed: NDArray[np.float64]
    """``(N, N)``."""
    aligned: NDArray[np.float64]
    """Of the mean gradients over all pairings, ``(N, N)``."""
    spread: NDArray[np.float64]
    """Mean squared distance of a pairing's gradient from the mean over all pairings, ``(N,)``."""

    def estimate_variance(self, mode: str, counts: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Variance of one node's gradient, summed over parameters, in each of ``R`` resamples of the nodes, ``(R,)``.

        ``counts``: how often each resample holds each node, ``(R, N)``; by default every node once. The variance under
        aligned credit follows from the law of total variance, as the pairing is random too. Where advantages are linear
        in returns, the mean over all pairings is crossed credit, which therefore varies less (Rao-Blackwell).
        """
        products = self.crossed if mode == "crossed" else self.aligned
        num_nodes = len(products)
        counts = np.ones((1, num_nodes)) if counts is None else counts
        squares = counts @ products.diagonal() - ((counts @ products) * counts).sum(1) / num_nodes
        variance = squares / (num_nodes - 1)
        return np.asarray(variance if mode == "crossed" else variance + counts @ self.spread / num_nodes)

    def relative_noise(self, mode: str, num_nodes: int) -> float:
        """Variance of the mean over ``num_nodes`` nodes by the squared norm of its expectation, estimated unbiased."""
        signal = float(self.crossed.mean() - self.estimate_variance("crossed")[0] / len(self.crossed))
        return float(self.estimate_variance(mode)[0] / num_nodes / signal) if signal > 0 else float("inf")

    def variance_ratio(self) -> Interval:
        """Variance under crossed credit over that under aligned credit, with a 95 % bootstrap interval over nodes."""
        num_nodes = len(self.spread)
        resamples = np.random.default_rng(0).multinomial(num_nodes, [1 / num_nodes] * num_nodes, size=_NUM_RESAMPLES)
        counts = np.vstack([np.ones(num_nodes), resamples])
        crossed, aligned = (self.estimate_variance(mode, counts) for mode in ("crossed", "aligned"))
        mean, *ratios = np.divide(crossed, aligned, out=np.ones_like(crossed), where=aligned > 0)  # 1: neither varies
        low, high = np.percentile(ratios, [2.5, 97.5])
        return Interval(float(mean), float(low), float(high))


def list_pairings(group: Group) -> Iterator[Group]:
    """The node once for each pairing of its completions, with the joint actions of that pairing alone.

    A pairing shifts the completions of each of ``n`` agents, ``G`` each, against those of the first: ``G ** (n - 1)``
    pairings, which hold every joint action once. The first pairs equal indices.
    """
    first, *others = group.actions
    size = len(group.actions[first])
    for shifts in itertools.product(range(size), repeat=len(others)):
        paired = [
            turn
            for turn in group.turns
            if all((turn.picks[a] - turn.picks[first]) % size == shift for a, shift in zip(others, shifts, strict=True))
        ]
        yield replace(group, turns=tuple(paired))


def multiply_gradients(
    crossed: NDArray[np.float64], aligned: NDArray[np.float64], of_completions: Iterable[NDArray[np.float32]]
) -> NodeGradients:
    """Compute the inner products, from advantages under crossed credit, ``(N, G)``, and each pairing, ``(K, N, G)``.

    ``of_completions``: for each node the gradients of its completions at an advantage of 1, ``(G, P)``. The gradient of
    a node is the mean over its completions, linear in their advantages. Needs memory for ``2 N P`` numbers.
    """
    num_nodes, size = crossed.shape
    means, spread = aligned.mean(0), np.zeros(num_nodes)
    crossed_rows, aligned_rows = [], []
    for node, gradients in enumerate(of_completions):
        products = gradients.astype(float) @ gradients.T.astype(float)  # (G, G)
        deviations = (aligned[:, node] - means[node]) / size  # (K, G)
        spread[node] = ((deviations @ products) * deviations).sum(1).mean()
        crossed_rows.append((crossed[node] / size).astype(np.float32) @ gradients)
        aligned_rows.append((means[node] / size).astype(np.float32) @ gradients)
    of_crossed, of_aligned = np.stack(crossed_rows), np.stack(aligned_rows)
    return NodeGradients((of_crossed @ of_crossed.T).astype(float), (of_aligned @ of_aligned.T).astype(float), spread)


def _compute_gradients(config: RunConfig, nodes: Sequence[Group]) -> dict[str, NodeGradients]:
    """By agent, of the summed token losses without a KL penalty: ``loss_norm`` and ``beta`` do not depend on credit."""
    policy = Policy.open(config.agents, config.model, config.lora, config.train.seed)
    algo = config.algo.model_copy(update={"loss_norm": "sequence_sum", "beta": 0.0})
    updater = Updater.of(policy, config.model_copy(update={"algo": algo}), config.root / "failed-batch")
    agents = [agent.name for agent in config.agents if agent.trained]
    rules = CreditRules.of(config)
    samples, _ = credit(nodes, agents, rules)
    aligned = [credit(chosen, agents, rules)[0] for chosen in zip(*map(list_pairings, nodes), strict=True)]
    gradients = {}
    for agent in agents:
        shape = len(nodes), config.rollout.group_size
        of_crossed = np.array([sample.advantage for sample in samples[agent]]).reshape(shape)
        of_aligned = np.stack([np.array([s.advantage for s in pairing[agent]]).reshape(shape) for pairing in aligned])
        with_gain = [replace(sample, advantage=1.0) for sample in samples[agent]]
        parts = (compute_gradient(updater, agent, [sample]).values() for sample in with_gain)
        flat = (torch.cat([part.flatten() for part in each]).float().cpu().numpy() for each in parts)
        of_completions = (np.stack([*itertools.islice(flat, shape[1])]) for _ in nodes)
        gradients[agent] = multiply_gradients(of_crossed, of_aligned, of_completions)
    return gradients


def _make_table(
    groups: Sequence[Group], num_batches: int, gradients: Mapping[str, NodeGradients], num_nodes: int
) -> Table:
    """A table with a row for each credit mode, where aligned credit counts the joint actions of one pairing only."""
    tokens = sum(len(action.token_ids) for group in groups for actions in group.actions.values() for action in actions)
    table = Table(box=box.SIMPLE_HEAD, title=f"{num_batches} batches, the same {tokens:,} generated tokens for both")
    for column in ("credit", "joint actions", "distinct", *(f"noise, {agent}" for agent in gradients)):
        table.add_column(column, justify="left" if column == "credit" else "right")
    for mode in ("aligned", "crossed"):
        of_mode = [next(list_pairings(group)) if mode == "aligned" else group for group in groups]
        texts = [(group.problem.task_id, *group.texts(turn).values()) for group in of_mode for turn in group.turns]
        noises = (f"{of_agent.relative_noise(mode, num_nodes):.2f}" for of_agent in gradients.values())
        table.add_row(mode, f"{len(texts):,}", f"{len(set(texts)):,}", *noises)
    table.caption = f"noise: variance of the gradient of {num_nodes} problems over the squared norm of its mean"
    return table
