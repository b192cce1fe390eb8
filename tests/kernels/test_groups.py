"""The loss from returns: the advantage, formed on the way, is the stored one to the last bit of float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magrpo.types import Normalize
from magrpo_kernels import Groups, LossOptions, group_policy_loss
from tests.kernels.group_cases import group_inputs


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
