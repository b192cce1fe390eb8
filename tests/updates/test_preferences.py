"""Preferences: the gradients of whole updates against autograd of the joint DPO loss, written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from magrpo.algo.loss import preference_loss
from magrpo.algo.returns import preference_scores
from magrpo.config.run import load_config
from magrpo.config.sections import AlgoConfig, RolloutConfig
from magrpo.errors import ConfigError
from magrpo.run.files import COMPARISONS
from magrpo.run.store import read_records
from magrpo.stages.credit import CreditRules, prefer_joint_actions
from magrpo.types import Comparison, Sample
from magrpo.updates.updater import Updater
from tests.pipelines.micro import blank_pictures, run_locally, write_config
from tests.stages.test_credit import AGENTS, aligned, group
from tests.updates.updating import (
    assert_close,
    assert_same_steps,
    make,
    make_samples,
    naive_gradient,
    naive_logps,
    weights_of,
)

BETA = 0.3
SIZE = 3
RETURNS = [[1.0, 2.0, 2.0, 3.0, 0.5, 1.0, 2.5, 2.0, 4.0], [1.0] * 9, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
"""Of all pairs of three completions at three nodes; the second has no preference."""
PICKS = list(product(range(SIZE), repeat=2))


def joint_samples(agents: Sequence[str] = ("helper", "main")) -> tuple[dict[str, list[Sample]], list[Comparison]]:
    """Crossed samples of two agents, with the advantages of the first epoch, and their comparisons."""
    samples = {agent: make_samples(seed, groups=len(RETURNS), size=SIZE) for seed, agent in enumerate(agents)}
    comparisons = []
    for node, returns in enumerate(RETURNS):
        scores = preference_scores(returns)
        members = {}
        for side, agent in enumerate(agents):
            members[agent] = tuple(node * SIZE + picks[side] for picks in PICKS)
            for i in range(SIZE):
                score = sum(s for s, picks in zip(scores, PICKS, strict=True) if picks[side] == i)
                number = node * SIZE + i
                changed = replace(samples[agent][number], advantage=BETA / 2 * score, counts=1 / SIZE)
                samples[agent][number] = changed
        comparisons.append(Comparison(tuple(returns), members))
    return samples, comparisons


def written_out(
    updater: Updater,
    samples: Mapping[str, Sequence[Sample]],
    comparisons: Sequence[Comparison],
    reference: Mapping[str, Sequence[Tensor]],
) -> Tensor:
    """The joint DPO loss, pair by pair: the mean over nodes of the mean over pairs."""
    ratios = {
        agent: [naive_logps(updater, agent, one).sum() - before for one, before in zip(members, befores, strict=True)]
        for (agent, members), befores in zip(samples.items(), reference.values(), strict=True)
    }
    total = torch.zeros(())
    for comparison in comparisons:
        losses = []
        for j, k in combinations(range(len(comparison.returns)), 2):
            if comparison.returns[j] != comparison.returns[k]:
                better, worse = (j, k) if comparison.returns[j] > comparison.returns[k] else (k, j)
                margin = torch.zeros(())
                for agent, numbers in comparison.samples.items():
                    margin = margin + BETA * (ratios[agent][numbers[better]] - ratios[agent][numbers[worse]])
                losses.append(-torch.nn.functional.logsigmoid(margin))
        if losses:
            total = total + torch.stack(losses).mean()
    return total / len(comparisons)


def record_gradients(updater: Updater, compute_loss: Callable[[], Tensor]) -> list[dict[str, list[dict[str, Tensor]]]]:
    """Fills, in each epoch, with the gradients by agent that its steps take, and those of ``compute_loss``."""
    agents = list(updater.optimizers)
    epochs: list[dict[str, list[dict[str, Tensor]]]] = []

    def record(agent: str) -> None:
        if agent == agents[0]:  # no weight of the epoch has changed
            epochs.append({each: [{}, naive_gradient(updater, each, compute_loss())] for each in agents})
        parameters = updater.policy.parameters(agent)
        epochs[-1][agent][0] = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}

    for agent in agents:
        updater.optimizers[agent].register_step_pre_hook(lambda *_, agent=agent: record(agent))
    return epochs


@pytest.mark.parametrize("weights", ["lora", "shared"])
def test_every_epoch_takes_the_gradient_of_the_joint_loss(base: Path, tmp_path: Path, weights: str) -> None:
    algo = {"loss": "madpo", "preference_beta": BETA, "update_epochs": 3}
    updater = make(base, tmp_path, weights=weights, algo=algo, agents=("helper", "main"), lr=3e-3)
    samples, comparisons = joint_samples()
    with torch.no_grad():
        reference = {a: [naive_logps(updater, a, one).sum() for one in members] for a, members in samples.items()}
    # Agents that share an adapter take the mean of their gradients.
    num_sharing = 3 - len(updater.optimizers)
    epochs = record_gradients(updater, lambda: written_out(updater, samples, comparisons, reference) / num_sharing)
    metrics = updater.update(samples, None, comparisons)
    assert len(epochs) == 3
    for agent, (ours, theirs) in chain.from_iterable(taken.items() for taken in epochs):
        assert max(float(value.abs().max()) for value in theirs.values()) > 0, agent
        assert_close(ours, theirs)
    assert 0.5 < metrics["update/preference_accuracy"] <= 1
    assert 0 < metrics["update/preference_loss"] < math.log(2)


def test_nodes_at_which_only_untrained_agents_act_prefer_nothing(base: Path, tmp_path: Path) -> None:
    """As in an environment in which agents write in turn, one of which is frozen."""
    algo = {"loss": "madpo", "preference_beta": BETA, "update_epochs": 2}
    samples, comparisons = joint_samples()
    alone = [Comparison(one.returns, {"frozen": tuple(range(9))}) for one in comparisons]
    losses = []
    for added in ([], alone):
        updater = make(base, tmp_path, algo=algo, agents=("helper", "main"))
        losses.append(updater.update(samples, None, [*comparisons, *added])["update/preference_loss"])
    assert losses[0] == losses[1]


def test_pushes_that_all_cancel_leave_a_sampling_gap_of_0(base: Path, tmp_path: Path) -> None:
    algo = {"loss": "madpo", "update_epochs": 2}
    updater = make(base, tmp_path, algo=algo, agents=("helper", "main"))
    crossed = {"helper": (0, 0, 1, 1), "main": (0, 1, 0, 1)}
    samples = {agent: make_samples(seed, groups=1, size=2) for seed, agent in enumerate(crossed)}
    still = {agent: [replace(one, advantage=0.0) for one in members] for agent, members in samples.items()}
    metrics = updater.update(still, None, [Comparison((1.0, 0.0, 0.0, 1.0), crossed)])
    assert (metrics["update/preference_accuracy"], metrics["update/sampling_gap"]) == (0.5, 0.0)


def test_one_epoch_needs_no_comparison(base: Path, tmp_path: Path) -> None:
    """All margins are 0, so a pair pushes by half of beta: a policy gradient."""
    samples, comparisons = joint_samples()
    weights = []
    for algo in ({"loss": "madpo", "preference_beta": BETA}, {}):
        updater = make(base, tmp_path, algo=algo, agents=("helper", "main"))
        updater.update(samples, None, comparisons)
        weights.append([weights_of(updater, agent) for agent in ("helper", "main")])
    for ours, theirs in zip(*weights, strict=True):
        assert_same_steps(ours, theirs, num_steps=1, lr=1e-3)


def test_the_loss_by_hand() -> None:
    returns, log_ratios = torch.tensor([1.0, 3.0, 1.0]), torch.tensor([0.0, 2.0, 1.0])
    found = preference_loss(returns, log_ratios, beta=0.5)
    margins = torch.tensor([0.5 * 2, 0.5 * 1])
    torch.testing.assert_close(found.losses, -torch.nn.functional.logsigmoid(margins))
    slopes = 0.5 * torch.sigmoid(-margins) / 2
    torch.testing.assert_close(found.pushes, torch.stack([-slopes[0], slopes.sum(), -slopes[1]]))


def test_scores_count_the_pairs_that_a_joint_action_wins() -> None:
    assert preference_scores([1.0, 2.0, 2.0, 4.0]) == pytest.approx([-3 / 5, 0.0, 0.0, 3 / 5])
    assert preference_scores([2.0, 2.0]) == [0.0, 0.0]
    assert preference_scores([]) == []


def test_credit_by_hand() -> None:
    """Three joint actions, one of which the sandbox failed on, and a node without a preference."""
    rules = CreditRules(AlgoConfig(loss="madpo", preference_beta=0.4), {}, RolloutConfig(group_size=3), 1)
    nodes = [group("a", aligned(1.0, None, 3.0), size=3), group("b", aligned(2.0, 2.0, 2.0), size=3)]
    samples, comparisons, metrics = prefer_joint_actions(nodes, AGENTS, rules)
    assert comparisons[0] == Comparison((1.0, 3.0), {"helper": (0, 1), "main": (0, 1)})
    assert comparisons[1] == Comparison((2.0,) * 3, {"helper": (2, 3, 4), "main": (2, 3, 4)})
    for agent in AGENTS:
        assert [sample.advantage for sample in samples[agent]] == pytest.approx([-0.2, 0.2, 0.0, 0.0, 0.0])
        assert math.fsum(sample.counts or 0.0 for sample in samples[agent]) == pytest.approx(2.0)
    assert metrics["reward/frac_groups_equal"] == 0.5


def test_rounding_makes_no_preference() -> None:
    """Rewards of 0.3 and 0.1 + 0.2, as parts and discounts add up to, differ in their last bit."""
    rules = CreditRules(AlgoConfig(loss="madpo"), {}, RolloutConfig(group_size=3), 1)
    nodes = [group("a", aligned(0.3, 0.1 + 0.2, 0.3), size=3), group("b", aligned(0.3, 0.1 + 0.2, 1.0), size=3)]
    samples, [tied, decided], metrics = prefer_joint_actions(nodes, AGENTS, rules)
    assert len(set(tied.returns)) == 1
    assert decided.returns[0] == decided.returns[1] < decided.returns[2]
    assert [sample.advantage for sample in samples["main"][:3]] == [0.0] * 3
    assert metrics["reward/frac_groups_equal"] == 0.5


def test_a_run_learns_preferences(tmp_path: Path) -> None:
    overrides = ["algo.loss=madpo", "algo.update_epochs=2", "rollout.joint_mode=crossed", "rollout.group_size=3"]
    config = load_config(write_config(tmp_path, iterations=1), [*overrides, "tracking.traces=0"])
    with blank_pictures():
        store, _, outcome = run_locally(config)
    metrics = store.metrics(outcome.checkpoint)
    assert 0 < metrics["update/preference_loss"] < math.log(2)
    assert "update/main/clip_frac" not in metrics
    assert len(read_records(store.stage_folder("00001/credit") / COMPARISONS, Comparison)) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.group_size=1"], "rollout.group_size = 1 leaves a node one joint action"),
        (["algo.estimator=iac"], "algo.estimator: preferences need no critic"),
        (["env.num_turns=2"], 'rollout.tree: with several turns, pairs at every turn need tree = "full"'),
        (["algo.normalize=std"], "algo.normalize"),
        (["algo.ratio=sequence"], "algo.ratio = .* preferences take no ratio"),
        (["algo.loss_norm=sequence_mean"], "margins add up tokens"),
        (["algo.beta=0.1"], "algo.beta adds a second penalty"),
        (["train.lag=1", "algo.importance_cap=2"], "train.lag: .*; algo.importance_cap would weigh tokens"),
    ],
)
def test_what_does_not_fit_preferences_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write_config(tmp_path), ["algo.loss=madpo", *overrides])
