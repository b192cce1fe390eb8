"""The loss against an independent one: float64 log-softmax of full logits, differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magrpo.algo import loss as algo_loss
from magrpo.algo.advantages import group_advantages
from magrpo.algo.loss import SampledTokens, k3, loss_divisor, tabulate_returns
from magrpo.config.sections import AlgoConfig
from magrpo.types import Normalize, Sample
from magrpo_kernels import LossOptions, group_policy_loss, policy_loss_from_logits

N, D, V = 7, 5, 11


def inputs(seed: int = 0, n: int = N) -> dict[str, Tensor]:
    """Random arguments of ``policy_loss``: hidden states (n, D), a head (V, D), and three vectors of shape (n,)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden": normal(n, D),
        "head_weight": normal(V, D),
        "token_ids": torch.randint(V, (n,), generator=generator),
        "advantages": normal(n),
        "sampling_logps": -normal(n).abs(),
    }


def policy_loss(
    hidden: Tensor,
    head_weight: Tensor,
    *,
    divisor: float,
    beta: float = 0.0,
    from_logits: bool = False,
    options: LossOptions = LossOptions(),  # noqa: B008  # frozen
    **tokens: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss from hidden states or, to the same effect, from the logits."""
    loss_of = partial(group_policy_loss, hidden, head_weight)
    if from_logits:
        loss_of = partial(policy_loss_from_logits, hidden @ head_weight.T)
    sampled = SampledTokens(**{"sample_weights": torch.ones(len(hidden)), **tokens})
    loss, sums, _ = algo_loss.policy_loss(loss_of, sampled, options, divisor, beta)
    return loss, sums


def reference_logps(hidden: Tensor, head_weight: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    logits = hidden.double() @ head_weight.double().T / temperature
    return logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves)


def leaves(values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return values["hidden"].requires_grad_(), values["head_weight"].requires_grad_()


def assert_same(ours: Tensor, terms: Tensor, values: dict[str, Tensor]) -> None:
    """``ours`` and its gradients are those of the sum of ``terms``, to the rounding of each: they may cancel."""
    theirs, size = terms.sum(), float(terms.detach().abs().sum())
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=0, abs=5e-6 * size)
    for mine, other in zip(gradients(ours, *leaves(values)), gradients(theirs, *leaves(values)), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-4, atol=1e-6)


def test_the_config_offers_the_same_norms() -> None:
    norms = get_args(AlgoConfig.model_fields["loss_norm"].annotation)
    assert [loss_divisor(norm, 1.0, 1.0, 1) for norm in norms] == [1.0, 1.0, 1.0, 1.0]


def test_divisors_by_hand() -> None:
    # Three completions of 2, 4 and 6 tokens, at most 8 allowed.
    norms = ("sequence_sum", "sequence_mean", "token_mean", "dr_grpo")
    assert [loss_divisor(norm, 3.0, 12.0, 8) for norm in norms] == [3.0, 3.0, 12.0, 24.0]


def test_one_token_by_hand() -> None:
    # Logits 0 and log 3: the probability of token 1 is 3/4. L = -2 log(3/4) / 4; dL/dlogit_1 = -2/4 * (1 - 3/4).
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3.0)]], requires_grad=True)
    tokens = [torch.tensor([1]), torch.tensor([2.0]), torch.tensor([math.log(0.5)]), torch.ones(1)]
    loss_of = partial(group_policy_loss, hidden, weight)
    loss, sums, _ = algo_loss.policy_loss(loss_of, SampledTokens(*tokens), LossOptions(), divisor=4.0, beta=0.0)
    assert float(loss.detach()) == pytest.approx(-2 * math.log(0.75) / 4)
    (slope,) = gradients(loss, weight)
    assert slope.flatten().tolist() == pytest.approx([2 / 4 * 0.25, -2 / 4 * 0.25])
    assert float(sums["tokens"]) == 1.0
    assert float(sums["sampling_gap"]) == pytest.approx(math.log(0.75) - math.log(0.5))


def test_k3_by_hand_and_never_negative() -> None:
    # Twice as likely under the reference: 2 - log 2 - 1.
    assert k3(torch.tensor([-1.0]), torch.tensor([-1.0 + math.log(2.0)])).item() == pytest.approx(1 - math.log(2.0))
    near = torch.cat([torch.logspace(-6, -1, 50), -torch.logspace(-6, -1, 50)])
    assert bool((k3(torch.zeros(100), near) >= 0).all())
    assert k3(torch.zeros(1), torch.tensor([1e-3])).item() == pytest.approx(0.5001667e-6, rel=1e-3)


@pytest.mark.parametrize("from_logits", [False, True])
@given(seed=st.integers(0, 10**6), temperature=st.floats(0.2, 3.0))
@settings(max_examples=30, deadline=None)
def test_on_policy_the_gradient_is_that_of_reinforce(from_logits: bool, seed: int, temperature: float) -> None:
    values = inputs(seed)
    leaves(values)
    loss, _ = policy_loss(**values, from_logits=from_logits, divisor=3.0, options=LossOptions(temperature))
    logps = reference_logps(values["hidden"], values["head_weight"], values["token_ids"], temperature)
    assert_same(loss, -values["advantages"] * logps / 3.0, values)


def test_importance_weights_scale_each_token() -> None:
    values = inputs()
    leaves(values)
    logps = reference_logps(values["hidden"], values["head_weight"], values["token_ids"])
    weights = (logps.detach() - values["sampling_logps"]).exp().clamp(max=0.05)
    assert weights.min() < 0.05 <= weights.max()
    loss, _ = policy_loss(**values, divisor=2.0, options=LossOptions(importance_cap=0.05))
    assert_same(loss, -weights * values["advantages"] * logps / 2.0, values)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_clipped_surrogate(seed: int) -> None:
    values = inputs(seed)
    leaves(values)
    logps = reference_logps(values["hidden"], values["head_weight"], values["token_ids"])
    old = (logps + 0.5 * torch.randn(N, generator=torch.Generator().manual_seed(seed))).detach()
    loss, sums = policy_loss(
        **values, divisor=2.0, old_logps=old.float(), options=LossOptions(clip_low=0.2, clip_high=0.3)
    )
    ratio, advantages = (logps - old).exp(), values["advantages"]
    unclipped, clipped = ratio * advantages, ratio.clamp(0.8, 1.3) * advantages
    assert_same(loss, -torch.minimum(unclipped, clipped) / 2.0, values)
    assert int(sums["clipped"]) == int((clipped < unclipped).sum())


LENGTHS = st.sampled_from([(7,), (3, 4), (1, 5, 1), (2, 2, 3)])


def with_lengths(seed: int, lengths: Sequence[int]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Inputs of completions of these lengths, with the log-probabilities now and before the update."""
    values = inputs(seed)
    values["advantages"] = values["advantages"][: len(lengths)].repeat_interleave(torch.tensor(lengths))
    leaves(values)
    logps = reference_logps(values["hidden"], values["head_weight"], values["token_ids"])
    old = (logps + torch.randn(N, generator=torch.Generator().manual_seed(seed))).detach()
    return values, logps, old


@pytest.mark.parametrize("from_logits", [False, True])
@given(seed=st.integers(0, 10**6), lengths=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_the_ratio_of_sequences(from_logits: bool, seed: int, lengths: tuple[int, ...]) -> None:
    """Equation 5 of GSPO, arXiv 2507.18071, in which a completion counts once for each of its tokens."""
    values, logps, old = with_lengths(seed, lengths)
    options = LossOptions(clip_low=0.2, clip_high=0.3)
    ratios = {"old_logps": old.float(), "lengths": torch.tensor(lengths)}
    loss, sums = policy_loss(**values, **ratios, divisor=2.0, from_logits=from_logits, options=options)
    terms, num_clipped = [], 0
    for change, advantages in zip((logps - old).split(lengths), values["advantages"].split(lengths), strict=True):
        ratio, advantage = change.mean().exp(), advantages[0]
        clipped = ratio.clamp(0.8, 1.3)
        terms.append(-len(change) * torch.minimum(ratio * advantage, clipped * advantage) / 2.0)
        num_clipped += len(change) * int(clipped * advantage < ratio * advantage)
    assert_same(loss, torch.stack(terms), values)
    assert int(sums["clipped"]) == num_clipped
    gap = (logps.detach() - values["sampling_logps"]).abs().sum()
    assert float(sums["sampling_gap"]) == pytest.approx(float(gap), rel=1e-5), "not shifted with the ratio"


@given(seed=st.integers(0, 10**6), lengths=LENGTHS)
@settings(max_examples=20, deadline=None)
def test_importance_weights_beside_the_ratio_of_sequences(seed: int, lengths: tuple[int, ...]) -> None:
    """The weights are those of tokens before the update, whatever the ratio."""
    values, logps, old = with_lengths(seed, lengths)
    options = LossOptions(clip_low=0.99, clip_high=1e9, importance_cap=0.5)
    ratios = {"old_logps": old.float(), "lengths": torch.tensor(lengths)}
    loss, _ = policy_loss(**values, **ratios, divisor=2.0, options=options)
    importance = (old - values["sampling_logps"]).exp().clamp(max=0.5)
    means = torch.cat([change.mean().expand(len(change)) for change in (logps - old).detach().split(lengths)])
    ratio = (means + logps - logps.detach()).exp()
    assert_same(loss, -importance * ratio * values["advantages"] / 2.0, values)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_kl_term_counts_every_token(seed: int) -> None:
    values = inputs(seed)
    values["advantages"][::2] = 0.0
    leaves(values)
    logps = reference_logps(values["hidden"], values["head_weight"], values["token_ids"])
    ref = (logps + 0.3 * torch.randn(N, generator=torch.Generator().manual_seed(seed))).detach()
    loss, sums = policy_loss(**values, divisor=2.0, ref_logps=ref.float(), beta=0.7)
    kl = (ref - logps).exp() - (ref - logps) - 1
    assert_same(loss, torch.cat([-values["advantages"] * logps / 2.0, 0.7 * kl / 2.0]), values)
    assert float(sums["kl"]) == pytest.approx(float(kl.detach().sum()), rel=1e-4, abs=1e-5)
    assert float(sums["tokens"]) == N


@given(st.lists(st.booleans(), min_size=N, max_size=N))
@settings(max_examples=30, deadline=None)
def test_tokens_without_advantage_have_exactly_no_gradient_and_no_metrics(keep: list[bool]) -> None:
    values = inputs()
    mask = torch.tensor(keep)
    values["advantages"] = values["advantages"] * mask
    leaves(values)
    loss, sums = policy_loss(**values, divisor=2.0)
    hidden_slope, weight_slope = gradients(loss, *leaves(values))
    assert not hidden_slope[~mask].any()
    assert float(sums["tokens"]) == mask.sum()
    if mask.any():
        alone: dict[str, Any] = {key: v.detach()[mask] if len(v) == N else v.detach() for key, v in values.items()}
        leaves(alone)
        without, sums_without = policy_loss(**alone, divisor=2.0)
        torch.testing.assert_close(gradients(without, alone["head_weight"])[0], weight_slope)
        assert float(sums["sampling_gap"]) == pytest.approx(float(sums_without["sampling_gap"]), rel=1e-5)


@given(st.permutations(range(N)), st.integers(1, N - 1))
@settings(max_examples=30, deadline=None)
def test_order_and_splitting_change_nothing_but_rounding(order: list[int], cut: int) -> None:
    values = inputs()
    leaves(values)
    logps = reference_logps(values["hidden"], values["head_weight"], values["token_ids"])
    picked = {key: v[order] if len(v) == N else v for key, v in values.items()}
    parts = [
        policy_loss(**{key: v[part] if len(v) == N else v for key, v in picked.items()}, divisor=2.0)[0]
        for part in (slice(0, cut), slice(cut, N))
    ]
    assert_same(parts[0] + parts[1], -values["advantages"] * logps / 2.0, values)


def _samples(returns: list[float], advantages: list[float], group: int) -> list[Sample]:
    return [
        Sample((1,), (2,), (-1.0,), value, advantage, group, 0)
        for value, advantage in zip(returns, advantages, strict=True)
    ]


def test_the_table_of_returns_holds_what_gives_the_stored_advantages_back() -> None:
    """Two agents of one adapter count their groups apart; samples of a group may lie apart."""
    first = _samples([1.0, 3.0], [-1.0, 1.0], 0), _samples([2.0, 4.0], [-1.0, 1.0], 1)
    mixed = [first[0][0], first[1][0], first[0][1], first[1][1]]
    table = tabulate_returns({"a": mixed, "b": _samples([1.0, 5.0, 3.0], [-2.0, 2.0, 0.0], 0)}, "none")
    assert table is not None
    assert table.returns.tolist() == [1.0, 3.0, 2.0, 4.0, 1.0, 5.0, 3.0]
    assert table.returns.dtype == torch.float64
    assert table.starts.tolist() == [0, 0, 2, 2, 4, 4, 4]
    assert table.ends.tolist() == [2, 2, 4, 4, 7, 7, 7]
    assert table.sequences.tolist() == [0, 2, 1, 3, 4, 5, 6]
    nothing = tabulate_returns({"a": []}, "std")
    assert nothing is not None
    assert nothing.returns.tolist() == []


@pytest.mark.parametrize(
    "changed",
    [
        _samples([1.0, 5.0], [-4.0, 0.0], 0),  # another estimator's
        _samples([7.0], [-2.0], 0),  # a sibling is missing
        _samples([0.0], [math.nan], 0),
    ],
)
def test_stored_advantages_win_over_what_returns_would_give(changed: list[Sample]) -> None:
    unchanged = _samples([1.0, 3.0], [-1.0, 1.0], 0)
    assert tabulate_returns({"a": unchanged}, "none") is not None
    assert tabulate_returns({"a": unchanged, "b": changed}, "none") is None
    assert tabulate_returns({"a": unchanged}, "std") is not None  # the deviation is 1


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=9), max_size=5), st.sampled_from(["none", "std"]))
def test_the_loss_forms_the_very_advantages_that_credit_stores(groups: list[list[float]], normalize: Normalize) -> None:
    """To the last bit of float32, in which the loss computes. torch's float64 root may be a bit off in long tensors."""
    stored = [group_advantages(group, "magrpo", normalize) for group in groups]
    samples = [s for n, (r, a) in enumerate(zip(groups, stored, strict=True)) for s in _samples(r, a, n)]
    table = tabulate_returns({"a": samples}, normalize)
    assert table is not None
    flat = [value for group in stored for value in group]
    assert table.form_advantages().float().tolist() == torch.tensor(flat, dtype=torch.float32).tolist()
