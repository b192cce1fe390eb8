"""Old partners: what their pairs are, what they weigh, and the expected gradient with them, by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from magrpo.algo.returns import partner_weight
from magrpo.config.sections import AlgoConfig, RolloutConfig
from magrpo.engines.transformers import LocalEngine
from magrpo.stages.credit import CreditRules, credit
from magrpo.stages.partners import (
    Repeated,
    add_drawn,
    compute_log_ratios,
    pair_completions,
    take_newest,
    weigh_partners,
)
from magrpo.types import (
    Action,
    JointReward,
    Observation,
    OldPairs,
    Problem,
    Prompt,
    Request,
    RolloutGroup,
    Sample,
    SamplingParams,
    ScoredTurn,
    Turn,
)
from magrpo_kernels import LossOptions
from tests.tiny import perturb
from tests.updates.updating import TEMPERATURE, make, naive_logps

AGENTS = ("helper", "main")
CROSSED = RolloutConfig(group_size=2, joint_mode="crossed")
OPTIONS = LossOptions(TEMPERATURE, checked=True)


def write(agent: str, token: int) -> Action:
    return Action(agent, str(token), (token,), (0.0,), "stop", 0)


def make_node(task_id: str, tokens: Mapping[str, Sequence[int]]) -> RolloutGroup[Turn]:
    """A node with these completions of one token and all their combinations."""
    actions = {agent: tuple(write(agent, token) for token in written) for agent, written in tokens.items()}
    picks = itertools.product(*(range(len(written)) for written in tokens.values()))
    turns = tuple(Turn(dict(zip(tokens, pick, strict=True))) for pick in picks)
    prompts = {agent: Prompt(Observation(()), (1,)) for agent in tokens}
    return RolloutGroup(Problem(task_id, ""), (), (), prompts, actions, turns)


# --------------------------------------------------------------------------------------------------------------- pairs
def test_old_partners_are_the_newest_completions_and_each_is_one_of_every_other_agent() -> None:
    newer, older = (make_node("a", {n: [10 * k + i for i in (0, 1)] for n in "xyz"}) for k in (2, 1))
    old = take_newest([newer, older], 3)
    assert {agent: [action.text for action in actions] for agent, actions in old.items()} == {
        agent: ["20", "21", "10"] for agent in "xyz"
    }
    today = make_node("a", {name: [1, 2] for name in "xyz"})
    repeated = Repeated(score_by({}, today), old)
    pairing = pair_completions(repeated, "y", [1.0, 0.001, 0.5])
    texts = [tuple(pairing.node.texts(turn).values()) for turn in pairing.node.turns]
    assert texts == [("20", "1", "20"), ("20", "2", "20"), ("10", "1", "10"), ("10", "2", "10")]
    assert pairing.weights == [1.0, 0.5], "a partner of nearly no weight is not worth its programs"


def test_weights_are_those_of_all_partners_together_and_at_most_1() -> None:
    log_ratios = {"x": [-1.0, 2.0], "y": [0.5, 0.25], "z": [0.25, -0.5]}
    assert weigh_partners(log_ratios, "x") == pytest.approx([1.0, np.exp(-0.25)])
    assert weigh_partners(log_ratios, "y") == pytest.approx([np.exp(-0.75), 1.0])
    assert partner_weight([1e6]) == 1.0


def test_a_problem_remembers_the_newest_iterations_that_sampled_it() -> None:
    drawn = add_drawn({"a": (3, 1), "b": (2,)}, ["a", "c"], 4, keep=2)
    assert drawn == {"a": (4, 3), "b": (2,), "c": (4,)}


def test_rewards_are_those_of_the_agent_and_masked_ones_are_left_out() -> None:
    today = score_by({}, make_node("a", {"helper": [1, 2], "main": [5]}))
    pairing = pair_completions(
        Repeated(today, {"main": [write("main", 7)], "helper": [write("helper", 8)]}), "helper", [1]
    )
    turns = [
        ScoredTurn(pairing.node.turns[0].picks, JointReward(2.0, {}, {"helper": 0.5, "main": 9.0}), {}),
        ScoredTurn(pairing.node.turns[1].picks, JointReward(0.0, {}), {}, masked=True),
    ]
    assert pairing.collect_rewards(pairing.node.with_scores(tuple(turns))) == OldPairs(
        "a", "helper", (1,), ((2.5, None),)
    )


# ------------------------------------------------------------------------------------------------------------ gradient
def score_by(rewards: Mapping[tuple[int, ...], float], node: RolloutGroup[Turn]) -> RolloutGroup[ScoredTurn]:
    def price(turn: Turn) -> ScoredTurn:
        written = tuple(map(int, node.texts(turn).values()))
        return ScoredTurn(turn.picks, JointReward(rewards.get(written, 0.0), {}), {})

    return node.with_scores(tuple(map(price, node.turns)))


RNG = np.random.default_rng(5)
HELPER, MAIN, OLD_MAIN = (RNG.dirichlet(np.ones(3)) for _ in range(3))
REWARDS = {pair: RNG.uniform(0, 4) for pair in itertools.product(range(3), repeat=2)}
OUTCOMES = list(itertools.product(range(3), repeat=5))
"""Two completions of helper, two of main, and an old one of main."""


def expect_gradient(then: NDArray[np.float64], num_old: int = 1) -> tuple[NDArray[np.float64], float]:
    """The exact mean and variance of the helper's gradient, with ``num_old`` times the old completion of ``then``."""
    groups, pairs, chances = [], [], []
    for outcome in OUTCOMES:
        *helper, first, second, last = outcome
        chances.append(np.prod(HELPER[helper]) * MAIN[first] * MAIN[second] * then[last])
        today = score_by(REWARDS, make_node(str(outcome), {"helper": helper, "main": [first, second]}))
        old = {"helper": (write("helper", 0),) * num_old, "main": (write("main", last),) * num_old}
        ratios = {"helper": [0.0] * num_old, "main": [float(np.log(MAIN[last] / then[last]))] * num_old}
        pairing = pair_completions(Repeated(today, old), "helper", weigh_partners(ratios, "helper"))
        pairs.append(pairing.collect_rewards(score_by(REWARDS, pairing.node)))
        groups.append(today)
    rules = CreditRules(AlgoConfig(estimator="marloo"), {}, CROSSED, 1, old_pairs=pairs)
    samples, _ = credit(groups, ["helper"], rules)
    gradients = np.zeros((len(OUTCOMES), 3))
    for sample in samples["helper"]:
        gradients[sample.group, sample.completion_ids[0]] += sample.advantage / 2
        gradients[sample.group] -= sample.advantage / 2 * HELPER
    mean = np.array(chances) @ gradients
    return mean, float(chances @ ((gradients - mean) ** 2).sum(1))


def exact_gradient(partners: NDArray[np.float64]) -> NDArray[np.float64]:
    """The gradient of the helper's expected reward with partners of these probabilities."""
    worths = np.array([sum(p * REWARDS[token, b] for b, p in enumerate(partners)) for token in range(3)])
    return HELPER * (worths - HELPER @ worths)


def test_with_an_unchanged_policy_the_expected_gradient_is_the_exact_one_with_less_noise() -> None:
    (plain, noise), (paired, less_noise) = expect_gradient(MAIN, num_old=0), expect_gradient(MAIN)
    assert plain == pytest.approx(exact_gradient(MAIN))
    assert paired == pytest.approx(exact_gradient(MAIN))
    assert less_noise < 0.95 * noise


def test_with_a_changed_policy_the_gradient_is_that_of_the_weighted_partners() -> None:
    weights = np.minimum(1, MAIN / OLD_MAIN)
    mixture = np.zeros(3)
    for first, second, last in itertools.product(range(3), repeat=3):
        share = MAIN[first] * MAIN[second] * OLD_MAIN[last] / (2 + weights[last])
        mixture[first] += share
        mixture[second] += share
        mixture[last] += share * weights[last]
    assert mixture.sum() == pytest.approx(1)
    found, _ = expect_gradient(OLD_MAIN)
    assert found == pytest.approx(exact_gradient(mixture))
    unweighted = (2 * MAIN + OLD_MAIN) / 3
    assert np.abs(mixture - MAIN).sum() < np.abs(unweighted - MAIN).sum(), "weights correct for the change"


def test_an_old_partner_stands_for_the_smaller_of_both_probabilities() -> None:
    """So weighted rewards are unbiased but for the cut: their mean is that of today less what the limit leaves out."""
    weights = [partner_weight([float(np.log(now / then))]) for now, then in zip(MAIN, OLD_MAIN, strict=True)]
    assert OLD_MAIN * weights == pytest.approx(np.minimum(MAIN, OLD_MAIN))


# -------------------------------------------------------------------------------------------------- log-probabilities
def test_unchanged_weights_write_old_completions_as_likely_as_before(any_base: Path, tmp_path: Path) -> None:
    policy = make(any_base, tmp_path).policy
    sampling = SamplingParams(TEMPERATURE, max_new_tokens=8)
    requests = [Request("main", (5, 6 + i % 2), sampling, seed) for i, seed in enumerate(range(6))]
    actions = LocalEngine(policy, max_batch=4).serve(0, {}).generate(requests)
    samples = [
        Sample(request.prompt_ids, a.token_ids, a.sampling_logps, 0.0, 0.0, 0, 0)
        for request, a in zip(requests, actions, strict=True)
    ]
    assert compute_log_ratios(policy, "main", samples, OPTIONS, 64) == pytest.approx([0.0] * 6, abs=1e-4)


@pytest.mark.parametrize("with_support", [False, True])
def test_changed_weights_are_compared_with_those_that_sampled(base: Path, tmp_path: Path, with_support: bool) -> None:
    updater = make(base, tmp_path)
    samples = [Sample((5, 6), (7, 8, 9), (-1.0, -2.0, -0.5), 0.0, 0.0, 0, 0)]
    samples.append(replace(samples[0], prompt_ids=(4,), completion_ids=(3, 2), sampling_logps=(-3.0, -4.0)))
    if with_support:
        samples = [replace(s, support=tuple((t, 100, 200) for t in s.completion_ids)) for s in samples]
    perturb(updater.policy, seed=1)
    expected = [naive_logps(updater, "main", s).sum().item() - sum(s.sampling_logps) for s in samples]
    found = compute_log_ratios(updater.policy, "main", samples, OPTIONS, 64)
    assert found == pytest.approx(expected, abs=1e-4)
