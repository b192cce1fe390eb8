"""The losses as functions that autograd differentiates: views, repeated and scaled backward passes, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from magrpo_kernels import LossOptions, group_policy_loss, policy_loss_from_logits
from tests.kernels.oracle import token_inputs


def _head() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 4, generator=generator), torch.randn(11, 4, generator=generator)


def test_logits_that_are_a_view_are_read_in_place() -> None:
    """The (B, L + 1, V) layout of a language model: the last position predicts nothing."""
    everything = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
    inputs = token_inputs(torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, -1.0, 0.5, 2.0]))
    options = LossOptions(impl="torch")
    view, copy = everything.clone().requires_grad_(), everything.clone().requires_grad_()
    for source in (view, copy):
        rows = source[0, :-1] if source is view else source[0, :-1].contiguous()
        policy_loss_from_logits(rows, inputs, options).loss.backward()
    torch.testing.assert_close(view.grad, copy.grad)
    transposed = everything[0, :4].t().contiguous().t()  # (4, 6), the vocabulary not contiguous
    expected = policy_loss_from_logits(everything[0, :4], inputs, options)
    torch.testing.assert_close(policy_loss_from_logits(transposed, inputs, options).logps, expected.logps)


def test_hidden_states_by_column_are_those_by_row() -> None:
    """As a transposed activation."""
    hidden, weight = _head()
    inputs = token_inputs(torch.arange(7), torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 1.0, 1.0]))
    by_row = hidden.clone().requires_grad_()
    by_column = hidden.t().contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(group_policy_loss(by_row, weight, inputs).loss, by_row)
    (found,) = torch.autograd.grad(group_policy_loss(by_column.t(), weight, inputs).loss, by_column)
    torch.testing.assert_close(found.t(), expected)


def _losses() -> list[tuple[Callable[..., Tensor], list[Tensor]]]:
    """The losses from hidden states and from logits, each with the tensors that it takes before its ``LossOptions``."""
    hidden, weight = _head()
    inputs = token_inputs(torch.arange(7), torch.ones(7))
    return [
        (lambda h, w, options: group_policy_loss(h, w, inputs, options).loss, [hidden, weight]),
        (lambda z, options: policy_loss_from_logits(z, inputs, options).loss, [hidden @ weight.t()]),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_a_second_derivative_is_an_error_and_not_zero(number: int) -> None:
    loss, tensors = _losses()[number]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    gradients = torch.autograd.grad(loss(*leaves, LossOptions()), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), leaves)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss(*leaves, LossOptions()).square(), leaves, create_graph=True)


@pytest.mark.parametrize("number", [0, 1])
def test_backward_that_runs_once_scales_the_gradients_where_they_lie(number: int) -> None:
    loss, tensors = _losses()[number]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    for factor in (1.0, 0.3):
        expected = torch.autograd.grad(factor * loss(*leaves, LossOptions()), leaves)
        value = loss(*leaves, LossOptions(backward_once=True))
        for ours, wanted in zip(torch.autograd.grad(factor * value, leaves, retain_graph=True), expected, strict=True):
            assert torch.equal(ours, wanted)
        with pytest.raises(RuntimeError, match="backward runs a second time"):
            torch.autograd.grad(factor * value, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1 / 3, 65536.0])
def test_a_scaled_loss_rounds_its_gradient_once(dtype: torch.dtype, factor: float) -> None:
    """1/3 is 0.18 % off in bfloat16, and so would every gradient be; 65,536 does not exist in float16."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 500, generator=generator).to(dtype).requires_grad_()
    inputs = token_inputs(torch.arange(64), torch.full((64,), 1e-3))
    (alone,) = torch.autograd.grad(policy_loss_from_logits(logits, inputs).loss, logits)
    (scaled,) = torch.autograd.grad(policy_loss_from_logits(logits, inputs).loss * factor, logits)
    assert torch.equal(scaled, (alone.float() * factor).to(dtype))


def test_backward_takes_no_more_memory_than_the_gradient() -> None:
    logits = torch.randn(64, 1000, requires_grad=True)
    loss = policy_loss_from_logits(logits, token_inputs(torch.arange(64), torch.ones(64))).loss
    activities = [torch.profiler.ProfilerActivity.CPU]
    # acc_events: torch 2.11 warns without it.
    with torch.profiler.profile(profile_memory=True, activities=activities, acc_events=True) as profile:
        torch.autograd.grad(loss, logits)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert taken <= 1.01 * logits.numel() * logits.element_size()
