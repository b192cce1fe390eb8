"""Training on truncated samples: over the support that was kept the gradient is exact, without it it is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from magrpo.algo.loss import SampledTokens, policy_loss
from magrpo.config.agents import LoraConfig
from magrpo.engines.local.sampling import kept_tokens
from magrpo.engines.transformers import LocalEngine
from magrpo.types import Request, Sample, SamplingParams
from magrpo.updates.updater import Updater
from magrpo_kernels import LossOptions, Support, TokenInputs, policy_loss_from_logits
from tests.tiny import EOS, perturb, tiny_base, tiny_config
from tests.updates.updating import (
    TEMPERATURE,
    assert_close,
    compute_gradient,
    gradients_used,
    make,
    make_samples,
    naive_gradient,
    naive_logps,
    on_policy,
    summed_kl,
    with_support,
)

VOCAB = 6
TRUNCATIONS = [(0.6, 0), (1.0, 2), (0.9, 4)]


def kept(logits: Tensor, top_p: float, top_k: int) -> list[int]:
    """The ids that the engine would draw from at TEMPERATURE."""
    weights = (logits[None] / TEMPERATURE).softmax(-1)
    return kept_tokens(weights, torch.tensor([top_p]), torch.tensor([top_k]))[0].nonzero().squeeze(1).tolist()


def over(logits: Tensor, support: Sequence[int]) -> Tensor:
    """Log-probabilities (S,) of the ids of a support, normalised over it."""
    return (logits[list(support)] / TEMPERATURE).log_softmax(-1)


# ---------------------------------------------------------------------- two tokens of a table, all outcomes enumerated
class Table:
    """A policy of two tokens: logits (V,) of the first, and (V, V) of the second after each first one."""

    def __init__(self, top_p: float, top_k: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.first = torch.randn(VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
        self.second = (2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)).requires_grad_()
        self.rewards = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        self.supports = [kept(row.detach(), top_p, top_k) for row in (self.first, *self.second)]

    def outcomes(self) -> Iterator[tuple[int, int, Tensor]]:
        """Both tokens, and the probability with which truncated sampling draws them; differentiable."""
        for i, one in zip(self.supports[0], over(self.first, self.supports[0]), strict=True):
            after = self.supports[1 + i]
            for j, two in zip(after, over(self.second[i], after), strict=True):
                yield i, j, (one + two).exp()

    def exact(self) -> tuple[Tensor, ...]:
        """The gradient of the expected reward of what is sampled."""
        value = torch.stack([p * self.rewards[i, j] for i, j, p in self.outcomes()]).sum()
        return torch.autograd.grad(value, (self.first, self.second))

    def estimated(self, support: bool, cap: float | None = None) -> tuple[Tensor, ...]:
        """Minus the gradient of the trainer's loss, in expectation over what is sampled."""
        drawn = list(self.outcomes())
        logits = torch.stack([row for i, _, _ in drawn for row in (self.first, self.second[i])])
        ids = torch.tensor([token for i, j, _ in drawn for token in (i, j)])
        rows = [self.supports[row] for i, _, _ in drawn for row in (0, 1 + i)]
        bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
        chosen = Support(torch.tensor([i for ids in rows for i in ids]), bounds) if support else None
        advantages = torch.stack([p.detach() * self.rewards[i, j] for i, j, p in drawn]).repeat_interleave(2)

        options, ones = LossOptions(TEMPERATURE), torch.ones(len(ids))
        every = TokenInputs(ids, ones, ones, support=chosen)
        sampling_logps = policy_loss_from_logits(logits, every, options).logps  # as the engine reports them
        options = replace(options, importance_cap=cap)
        tokens = SampledTokens(ids, advantages, sampling_logps, ones, support=chosen)
        loss, _, _ = policy_loss(partial(policy_loss_from_logits, logits), tokens, options, divisor=1.0, beta=0.0)
        return torch.autograd.grad(-loss, (self.first, self.second))


@pytest.mark.parametrize(("top_p", "top_k"), TRUNCATIONS)
def test_over_the_support_the_expected_gradient_is_that_of_the_expected_reward(top_p: float, top_k: int) -> None:
    table = Table(top_p, top_k)
    assert any(1 < len(support) < VOCAB for support in table.supports)
    assert math.isclose(sum(float(p.detach()) for *_, p in table.outcomes()), 1.0)
    exact = table.exact()
    torch.testing.assert_close(table.estimated(support=True), exact)
    for biased in (table.estimated(support=False), table.estimated(support=False, cap=2.0)):
        error = sum(float((one - other).square().sum()) for one, other in zip(biased, exact, strict=True))
        assert error > 1e-3 * sum(float(part.square().sum()) for part in exact)


def test_without_truncation_nothing_needs_a_support() -> None:
    table = Table(1.0, 0)
    torch.testing.assert_close(table.estimated(support=False), table.exact())


# --------------------------------------------------------------------------------------- the trainer, on a tiny model
@pytest.fixture
def few_tokens(tmp_path: Path) -> Path:
    """A base with a vocabulary of eight tokens."""
    return tiny_base(tmp_path / "few", tiny_config(vocab_size=8))


def distribution(updater: Updater, ids: Sequence[int]) -> Tensor:
    with updater.policy.active("main") as model:
        logits: Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0, -1]
    return logits


def enumerate_two(updater: Updater, prompt: tuple[int, ...], top_p: float, top_k: int) -> list[tuple[Sample, Tensor]]:
    """Every completion of at most two tokens that truncated sampling may draw, with its probability."""
    found: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...], Tensor]] = []
    logits = distribution(updater, prompt)
    support = kept(logits.detach(), top_p, top_k)
    for i, one in zip(support, over(logits, support), strict=True):
        if i == EOS:
            found.append(((i,), (tuple(support),), one))
            continue
        logits = distribution(updater, (*prompt, i))
        after = kept(logits.detach(), top_p, top_k)
        both = zip(after, over(logits, after), strict=True)
        found += [((i, j), (tuple(support), tuple(after)), one + two) for j, two in both]
    return [
        (Sample(prompt, ids, (-1.0,) * len(ids), 0.0, math.sin(1 + 3 * sum(ids)), 0, 0, support=supports), logp.exp())
        for ids, supports, logp in found
    ]


@pytest.mark.parametrize(("top_p", "top_k"), TRUNCATIONS)
def test_the_update_takes_the_exact_gradient_of_what_is_sampled(
    few_tokens: Path, dump: Path, top_p: float, top_k: int
) -> None:
    updater = make(few_tokens, dump, lora=LoraConfig(rank=4))
    perturb(updater.policy, seed=1)
    outcomes = enumerate_two(updater, (5, 6, 7), top_p, top_k)
    assert math.isclose(sum(float(p.detach()) for _, p in outcomes), 1.0, rel_tol=1e-5)
    exact = naive_gradient(updater, "main", -torch.stack([p * s.advantage for s, p in outcomes]).sum())
    # The mean over sequences, with each as often as it is drawn.
    samples = [replace(s, advantage=s.advantage * float(p.detach()) * len(outcomes)) for s, p in outcomes]
    assert_close(compute_gradient(updater, "main", samples), exact)
    biased = compute_gradient(updater, "main", [replace(sample, support=()) for sample in samples])
    error = sum(float((biased[name] - value).square().sum()) for name, value in exact.items())
    assert error > 1e-3 * sum(float(value.square().sum()) for value in exact.values())


@pytest.mark.parametrize("budget", [30, 4096])
def test_the_gradient_is_that_of_the_definition(any_base: Path, dump: Path, budget: int) -> None:
    samples = with_support(make_samples())
    updater = make(any_base, dump, micro_batch_tokens=budget)
    expected = naive_gradient(updater, "main", on_policy(updater, samples, len(samples)))
    assert_close(gradients_used(updater, samples)[0], expected)


def test_the_reference_and_the_old_policy_are_taken_over_the_same_support(base: Path, dump: Path) -> None:
    samples = with_support(make_samples())
    updater = make(base, dump, algo={"beta": 0.5, "update_epochs": 2})
    perturb(updater.policy, seed=1)
    kl = 0.5 * summed_kl(updater, samples) / len(samples)
    expected = naive_gradient(updater, "main", on_policy(updater, samples, len(samples)) + kl)
    first, _ = gradients_used(updater, samples)  # ratio 1
    assert_close(first, expected)


@pytest.mark.parametrize("importance_cap", [None, 2.0])
def test_engine_and_trainer_agree_on_what_was_sampled(base: Path, dump: Path, importance_cap: float | None) -> None:
    updater = make(base, dump, algo={"importance_cap": importance_cap})
    perturb(updater.policy, seed=1)
    sampling = SamplingParams(TEMPERATURE, top_p=0.8, top_k=30, max_new_tokens=12, keep_support=True)
    asked = [Request("main", (5, 6, 7), sampling, seed) for seed in range(8)]
    samples = [
        Sample((5, 6, 7), a.token_ids, a.sampling_logps, 0.0, (-1.0) ** i, 0, 0, support=a.support)
        for i, a in enumerate(LocalEngine(updater.policy, 8).serve(0, {}).generate(asked))
    ]
    for sample in samples:
        assert naive_logps(updater, "main", sample).tolist() == pytest.approx(sample.sampling_logps, abs=1e-4)
    expected = naive_gradient(updater, "main", on_policy(updater, samples, len(samples)))
    assert_close(compute_gradient(updater, "main", samples), expected)
    assert updater.update({"main": samples})["update/sampling_gap"] < 1e-5
