"""The loss from returns: the advantage, formed on the way, is the stored one to the last bit of float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magrpo.types import Normalize
from magrpo_kernels import Groups, LossOptions, group_policy_loss
from tests.kernels.group_cases import group_inputs
from tests.kernels.oracle import token_inputs


@pytest.mark.parametrize("normalize", ["none", "std"])
def test_the_loss_from_returns_is_the_loss_from_stored_advantages(normalize: Normalize) -> None:
    fused, stored = group_inputs(normalize, 300, "cpu")
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(300, 5, generator=generator), torch.randn(9, 5, generator=generator)
    options = LossOptions(0.7, divisor=12.0)
    results = []
    for inputs in (fused, stored):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        result = group_policy_loss(leaves[0], leaves[1], inputs, options)
        results.append((result.loss.detach(), result.logps, *torch.autograd.grad(result.loss, leaves)))
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(*results, strict=True))


def test_the_importance_weight_is_that_of_the_tokens_own_log_probability() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(6, 5, generator=generator), torch.randn(9, 5, generator=generator)
    inputs = token_inputs(torch.arange(6), torch.tensor([1.0, -2.0, 0.5, 1.0, 1.0, -1.0]))
    logps = group_policy_loss(hidden, weight, inputs).logps
    sampling = logps + torch.tensor([0.1, -0.2, 0.3, -3.0, 0.0, 2.0])
    ratios = (logps - sampling).exp().clamp(max=1.5)
    assert ratios.max() == 1.5
    weighted = replace(inputs, weights=ratios)
    options = LossOptions(importance_cap=1.5)
    gradients = []
    for chosen, chosen_options in ((replace(inputs, sampling_logps=sampling), options), (weighted, LossOptions())):
        leaf = hidden.clone().requires_grad_()
        gradients.append(torch.autograd.grad(group_policy_loss(leaf, weight, chosen, chosen_options).loss, leaf)[0])
    torch.testing.assert_close(*gradients)
    # With a policy from before the update, it is that policy's.
    old = logps - 0.1
    ratios = (old - sampling).exp().clamp(max=1.5)
    weighted = replace(inputs, weights=ratios, old_logps=old)
    clipped = LossOptions(clip_low=0.2, clip_high=0.2)
    ours = group_policy_loss(
        hidden, weight, replace(inputs, sampling_logps=sampling, old_logps=old), replace(clipped, importance_cap=1.5)
    )
    torch.testing.assert_close(ours.loss, group_policy_loss(hidden, weight, weighted, clipped).loss)


def test_returns_that_are_not_numbers_are_not_taken_for_equal() -> None:
    returns = torch.tensor([torch.nan, 1.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    starts, ends = torch.tensor([0, 0, 0, 3, 3]), torch.tensor([3, 3, 3, 5, 5])
    advantages = Groups(torch.arange(5), returns, starts, ends).form_advantages()
    assert advantages[:3].isnan().all()
    assert advantages[3:].tolist() == [0.0, 0.0]


def test_nearly_equal_large_returns_are_not_degenerate() -> None:
    returns = torch.tensor([1e6, 1e6 + 0.125], dtype=torch.float64)
    groups = Groups(torch.arange(2), returns, torch.tensor([0, 0]), torch.tensor([2, 2]))
    assert groups.form_advantages().tolist() == [-0.0625, 0.0625]
    assert replace(groups, divides_by_std=True).form_advantages().tolist() == [-1.0, 1.0]
