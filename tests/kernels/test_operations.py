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
    policy_loss_from_hidden,
    policy_loss_from_logits,
)
from tests.kernels.oracle import case

OPTIONS = (0.7, 0.2, 0.3, True, "torch")  # temperature, clip range, entropy, impl


def _row(support: bool = False) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    arguments = case(7, 11, 2, ratio=True, kl=True, support=support)
    names = ("token_ids", "coefficients", "old_logps", "ref_logps", "kl_coefficients")
    return arguments["logits"], (*(arguments[name] for name in names), *arguments.get("support", (None, None)))


def _head() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((7, 4), (11, 4), (11,)))
    return hidden, weight, bias


@pytest.mark.parametrize("support", [False, True])
def test_schemas_fakes_and_autograd_are_registered_as_they_should_be(support: bool) -> None:
    logits, row = _row(support)
    ops = torch.ops.magrpo
    torch.library.opcheck(ops.policy_loss_from_logits, (logits.requires_grad_(), *row, *OPTIONS, True))
    torch.library.opcheck(ops.policy_loss_from_logits, (logits.detach(), *row, *OPTIONS, False))
    hidden, weight, bias = (tensor.requires_grad_() for tensor in _head())
    torch.library.opcheck(ops.policy_loss_from_hidden, (hidden, weight, bias, *row, *OPTIONS, [True] * 3))
    frozen = (hidden, weight.detach(), None, *row, *OPTIONS, [True, False, False])
    torch.library.opcheck(ops.policy_loss_from_hidden, frozen)
    torch.library.opcheck(ops.group_advantages, (torch.rand(5), torch.tensor([0, 2, 5]), "marloo", "std"))


def _train(hidden: Tensor, weight: Tensor, ids: Tensor, returns: Tensor, support: Support | None) -> Tensor:
    advantages = group_advantages(returns, torch.tensor([0, 3]))
    inputs = TokenInputs(ids, advantages[torch.tensor([0, 0, 1, 1, 2, 2, 2])], support=support)
    from_hidden = policy_loss_from_hidden(hidden, weight, inputs, LossOptions(temperature=0.7)).loss
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
