"""The registered operations: schema, fake tensors, autograd, and torch.compile without a graph break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from magrpo_kernels import (
    LossOptions,
    Support,
    TokenInputs,
    group_advantages,
    group_policy_loss,
    policy_loss_from_logits,
)
from tests.kernels.oracle import case

OPTIONS = (0.7, 0.2, 0.3, "none", 2.0, 1.5, 3.0, False, True, False, False, "torch")  # of LossOptions, in their order


def _row(support: bool = False) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    arguments = case(7, 11, 2, ratio=True, kl=True, support=support)
    names = ("token_ids", "coefficients", "old_logps", "ref_logps", "kl_coefficients")
    returns = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    groups = (torch.tensor([0, 0, 1, 1, 2, 2, 2]), returns, torch.tensor([0, 2, 3]), torch.tensor([1, 4]))
    columns = (*(arguments[name] for name in names), arguments["old_logps"])
    return arguments["logits"], (*columns, *groups, *arguments.get("support", (None, None)))


def _head() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((7, 4), (11, 4), (11,)))
    return hidden, weight, bias


@pytest.mark.parametrize("support", [False, True])
def test_schemas_fakes_and_autograd_are_registered_as_they_should_be(support: bool) -> None:
    logits, row = _row(support)
    ops = torch.ops.magrpo
    torch.library.opcheck(ops.policy_loss_from_logits, (logits.requires_grad_(), *row, *OPTIONS, [True]))
    torch.library.opcheck(ops.policy_loss_from_logits, (logits.detach(), *row, *OPTIONS, [False]))
    hidden, weight, bias = (tensor.requires_grad_() for tensor in _head())
    torch.library.opcheck(ops.group_policy_loss, (hidden, weight, bias, *row, *OPTIONS, [True] * 3))
    frozen = (hidden, weight.detach(), None, *row, *OPTIONS, [True, False, False])
    torch.library.opcheck(ops.group_policy_loss, frozen)
    by_column = torch.randn(4, 7).t().requires_grad_()  # as a transposed activation
    torch.library.opcheck(ops.group_policy_loss, (by_column, *frozen[1:]))
    torch.library.opcheck(ops.group_advantages, (torch.rand(5), torch.tensor([0, 2, 5]), "marloo", "std"))


def _train(hidden: Tensor, weight: Tensor, ids: Tensor, returns: Tensor, support: Support | None) -> Tensor:
    advantages = group_advantages(returns, torch.tensor([0, 3]))
    inputs = TokenInputs(ids, advantages[torch.tensor([0, 0, 1, 1, 2, 2, 2])], support=support)
    from_hidden = group_policy_loss(hidden, weight, inputs, LossOptions(temperature=0.7)).loss
    from_logits = policy_loss_from_logits(hidden @ weight.t(), inputs).loss
    return from_hidden + 2 * from_logits


@pytest.mark.parametrize("support", [None, Support(torch.arange(7), torch.arange(8))])
@pytest.mark.parametrize("trains_head", [True, False])
def test_compiled_without_a_graph_break_is_what_eager_is(trains_head: bool, support: Support | None) -> None:
    hidden, weight, _ = _head()
    weight.requires_grad_(trains_head)
    ids, returns = torch.arange(7), torch.tensor([1.0, 2.0, 4.0])
    compiled = torch.compile(_train, backend="aot_eager", fullgraph=True)

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        leaf = hidden.clone().requires_grad_()
        loss = function(leaf, weight, ids, returns, support)
        return [loss.detach(), *torch.autograd.grad(loss, [leaf, weight] if trains_head else [leaf])]

    for ours, expected in zip(gradients(compiled), gradients(_train), strict=True):
        torch.testing.assert_close(ours, expected)


def test_logits_that_are_a_view_are_read_in_place() -> None:
    """The (B, L + 1, V) layout of a language model: the last position predicts nothing."""
    everything = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
    inputs = TokenInputs(torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, -1.0, 0.5, 2.0]))
    options = LossOptions(impl="torch")
    view, copy = everything.clone().requires_grad_(), everything.clone().requires_grad_()
    for source in (view, copy):
        rows = source[0, :-1] if source is view else source[0, :-1].contiguous()
        policy_loss_from_logits(rows, inputs, options).loss.backward()
    torch.testing.assert_close(view.grad, copy.grad)
    transposed = everything[0, :4].t().contiguous().t()  # (4, 6), the vocabulary not contiguous
    expected = policy_loss_from_logits(everything[0, :4], inputs, options)
    torch.testing.assert_close(policy_loss_from_logits(transposed, inputs, options).logps, expected.logps)


def test_a_compiled_step_takes_hidden_states_by_column_with_tokens_that_do_not_count() -> None:
    """Inductor holds outputs to the strides that were said: they are contiguous, whatever those of the input are."""
    hidden, weight, _ = _head()
    ids, coefficients = torch.arange(7), torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 1.0, 1.0])

    def train(leaf: Tensor) -> Tensor:
        return group_policy_loss(leaf.t(), weight, TokenInputs(ids, coefficients)).loss

    gradients = []
    for function in (train, torch.compile(train, backend="aot_eager", fullgraph=True)):
        leaf = hidden.t().contiguous().requires_grad_()
        gradients.append(torch.autograd.grad(function(leaf), leaf)[0])
    torch.testing.assert_close(*gradients)


def _losses() -> list[tuple[Callable[..., Tensor], list[Tensor]]]:
    hidden, weight, _ = _head()
    inputs = TokenInputs(torch.arange(7), torch.ones(7))
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
    inputs = TokenInputs(torch.arange(64), torch.full((64,), 1e-3))
    (alone,) = torch.autograd.grad(policy_loss_from_logits(logits, inputs).loss, logits)
    (scaled,) = torch.autograd.grad(policy_loss_from_logits(logits, inputs).loss * factor, logits)
    assert torch.equal(scaled, (alone.float() * factor).to(dtype))


def test_backward_takes_no_more_memory_than_the_gradient() -> None:
    logits = torch.randn(64, 1000, requires_grad=True)
    loss = policy_loss_from_logits(logits, TokenInputs(torch.arange(64), torch.ones(64))).loss
    activities = [torch.profiler.ProfilerActivity.CPU]
    # acc_events: torch 2.11 warns without it.
    with torch.profiler.profile(profile_memory=True, activities=activities, acc_events=True) as profile:
        torch.autograd.grad(loss, logits)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert taken <= 1.01 * logits.numel() * logits.element_size()
