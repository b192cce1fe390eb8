from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from magrpo_kernels import (
    Groups,
    LossOptions,
    Support,
    TokenInputs,
    group_policy_loss,
    policy_loss_from_logits,
    row,
)
from magrpo_kernels import hidden as hidden_module
from tests.kernels.oracle import VARIANTS, case, head_factors, loss_by_definition, records, token_inputs


def test_two_tokens_by_hand() -> None:
    # p = (1/4, 3/4); loss = -2 log(1/4) + 1 log(3/4); gradient rows c (p - onehot).
    logits = torch.tensor([[0.0, math.log(3.0)]] * 2, requires_grad=True)
    inputs = token_inputs(torch.tensor([0, 1]), torch.tensor([2.0, -1.0]))
    result = policy_loss_from_logits(logits, inputs, LossOptions(impl="torch"))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(2 * math.log(4) + math.log(0.75))
    assert result.logps.tolist() == pytest.approx([math.log(0.25), math.log(0.75)])
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.5, 1.5], [-0.25, 0.25]]))


@pytest.mark.parametrize("variant", VARIANTS)
@given(
    num_tokens=st.integers(0, 9),
    vocabulary=st.integers(1, 40),
    temperature=st.floats(0.3, 3.0),
    seed=st.integers(0, 10_000),
)
def test_loss_and_gradient_are_those_of_the_definition(
    variant: dict[str, bool], num_tokens: int, vocabulary: int, temperature: float, seed: int
) -> None:
    arguments = case(num_tokens, vocabulary, seed, **variant)
    logits = arguments.pop("logits").double()
    ours, truth = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    result = policy_loss_from_logits(ours, *records(temperature=temperature, divisor=3.0, impl="torch", **arguments))
    expected, logps = loss_by_definition(truth, temperature=temperature, divisor=3.0, **arguments)
    (gradient,) = torch.autograd.grad(3 * result.loss, ours)
    (wanted,) = torch.autograd.grad(3 * expected, truth)
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.logps, logps)
    torch.testing.assert_close(gradient, wanted)
    masked = arguments["advantages"] == 0
    assert not gradient[masked].any()
    if "support" in variant:
        ids, bounds = arguments["support"]
        outside = torch.ones_like(gradient, dtype=torch.bool)
        outside[torch.arange(num_tokens).repeat_interleave(bounds.diff()), ids] = False
        assert not gradient[outside].any(), "exactly 0"


def test_a_support_by_hand() -> None:
    # Over {0, 2} of p = (1, 5, 3) / 9: (1/4, 0, 3/4); loss = -2 log(1/4); over {1} alone there is nothing to choose.
    logits = torch.tensor([[1.0, 5.0, 3.0]] * 2).log().requires_grad_()
    before = logits.detach().clone()
    support = Support(torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]))
    inputs = token_inputs(torch.tensor([0, 1]), torch.tensor([2.0, 1.0]), support=support)
    result = policy_loss_from_logits(logits, inputs, LossOptions(impl="torch"))
    result.loss.backward()
    assert result.logps.tolist() == pytest.approx([math.log(0.25), 0.0])
    torch.testing.assert_close(logits.grad, torch.tensor([[-1.5, 0.0, 1.5], [0.0, 0.0, 0.0]]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("variant", VARIANTS[:4])
def test_the_whole_vocabulary_as_support_changes_no_bit(variant: dict[str, bool]) -> None:
    arguments = case(9, 33, 4, **variant)
    logits = arguments.pop("logits")
    everything = Support(torch.arange(33).repeat(9), torch.arange(10) * 33)
    results = []
    for support in (None, everything):
        leaf = logits.clone().requires_grad_()
        result = policy_loss_from_logits(leaf, *records(support=support, temperature=0.7, impl="torch", **arguments))
        results.append((result.loss.detach(), result.logps, *torch.autograd.grad(result.loss, leaf)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_that_of_the_dtype(dtype: torch.dtype) -> None:
    arguments = case(64, 1000, 1, ratio=True, kl=True)
    logits = arguments.pop("logits").to(dtype)
    truth = logits.double().requires_grad_()
    (wanted,) = torch.autograd.grad(loss_by_definition(truth, **arguments)[0], truth)
    eager, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (baseline,) = torch.autograd.grad(loss_by_definition(eager, **arguments)[0], eager)
    result = policy_loss_from_logits(ours, *records(impl="torch", **arguments))
    (gradient,) = torch.autograd.grad(result.loss, ours)
    allowance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    size = wanted.abs().amax(1, keepdim=True).clamp(min=1e-12)
    error, usual = ((gradient - wanted) / size).abs().max(), ((baseline - wanted) / size).abs().max()
    assert error <= 2 * usual + allowance
    torch.testing.assert_close(
        result.logps.double(), loss_by_definition(logits.double(), **arguments)[1], atol=2e-6, rtol=1e-6
    )


def head_case(
    dtype: torch.dtype = torch.float64, support: bool = False
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Hidden states, head and bias, with loss arguments whose old and reference policies are near the current one."""
    arguments = case(12, 30, 3, ratio=True, kl=True, support=support)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((12, 5), (30, 5), (30,)))
    del arguments["logits"]
    over = {"support": arguments["support"]} if support else {}
    ones = torch.ones(12)
    _, logps = loss_by_definition(hidden @ weight.t() + bias, arguments["token_ids"], ones, ones, **over)
    arguments["old_logps"] = logps + 0.2 * torch.randn(12, generator=generator)
    arguments["ref_logps"] = logps + 0.2 * torch.randn(12, generator=generator)
    return hidden, weight, bias, arguments


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("elements", [1 << 22, 30 * 5, 1])  # with blocks of all rows, two, and one
def test_hidden_states_in_chunks_give_what_whole_logits_give(
    elements: int, support: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hidden_module._CHUNK_ELEMENTS, "cpu", elements)
    monkeypatch.setattr(row, "_BLOCK_ELEMENTS", elements // 2)
    hidden, weight, bias, arguments = head_case(support=support)
    ours = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    truth = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    result = group_policy_loss(ours[0], ours[1], *records(temperature=0.7, impl="torch", **arguments), bias=ours[2])
    expected, logps = loss_by_definition(truth[0] @ truth[1].t() + truth[2], temperature=0.7, **arguments)
    torch.testing.assert_close(result.loss, expected)
    for gradient, wanted in zip(
        torch.autograd.grad(-2 * result.loss, ours), torch.autograd.grad(-2 * expected, truth), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)
    torch.testing.assert_close(result.logps, logps)


def test_logps_of_a_large_vocabulary_are_exact_to_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(16, 151_936, generator=generator)
    inputs = token_inputs(torch.randint(151_936, (16,), generator=generator), torch.ones(16))
    exact = logits.double().log_softmax(1).gather(1, inputs.token_ids[:, None]).squeeze(1)
    logps = policy_loss_from_logits(logits, inputs, LossOptions(impl="torch")).logps
    torch.testing.assert_close(logps.double(), exact, rtol=0, atol=1e-5)


def test_only_what_trains_gets_a_gradient_and_backward_may_run_twice() -> None:
    hidden, weight, _, arguments = head_case(torch.float32)
    hidden.requires_grad_()
    loss = group_policy_loss(hidden, weight, *records(impl="torch", **arguments)).loss
    loss.backward(retain_graph=True)
    assert weight.grad is None
    assert hidden.grad is not None
    first = hidden.grad.clone()
    loss.backward()
    torch.testing.assert_close(hidden.grad, 2 * first)
    with torch.no_grad():
        assert not group_policy_loss(hidden, weight, *records(impl="torch", **arguments)).loss.requires_grad


def test_extreme_rows() -> None:
    inputs, options = token_inputs(torch.tensor([1]), torch.tensor([1.0])), LossOptions(impl="torch")
    low = torch.full((1, 4), -1e30, requires_grad=True)
    torch.testing.assert_close(policy_loss_from_logits(low, inputs, options).logps, torch.tensor([-math.log(4)]))
    some = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]], requires_grad=True)
    result = policy_loss_from_logits(some, inputs, options)
    result.loss.backward()
    torch.testing.assert_close(some.grad, torch.tensor([[0.0, -0.5, 0.0, 0.5]]))
    target = policy_loss_from_logits(some.detach(), token_inputs(torch.tensor([0]), torch.tensor([1.0])), options)
    assert target.logps.item() == -math.inf


ONE_TOKEN = {"token_ids": torch.tensor([1]), "weights": torch.ones(1), "advantages": torch.ones(1)}
ONE_GROUP = Groups(torch.tensor([0]), torch.ones(1).double(), torch.tensor([0]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": math.nan}, "temperature must be positive"),
        ({"divisor": 0.0}, "divisor must be positive"),
        ({"soft_cap": -1.0}, "soft_cap must be positive"),
        ({"clip_low": math.nan, "clip_high": 0.2}, "clip_low must be between 0 and 1"),
        ({"clip_low": 2.0, "clip_high": 0.2}, "clip_low must be between 0 and 1"),
        ({"clip_low": 0.2, "clip_high": -0.5}, "clip_high must be 0 or more"),
        ({"clip_low": 0.2}, "clip_low and clip_high go together"),
        ({"sampling_logps": torch.zeros(1)}, "sampling_logps and importance_cap go together"),
        ({"sampling_logps": torch.zeros(1), "importance_cap": 0.0}, "importance_cap must be positive"),
        ({"old_logps": torch.zeros(1)}, "old_logps need clip_low"),
        ({"ref_logps": torch.zeros(1)}, "ref_logps and kl_coefficients go together"),
        ({"advantages": None}, "give either advantages or groups"),
        ({"groups": ONE_GROUP}, "give either advantages or groups"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_loss_from_logits(torch.zeros(1, 3), *records(**(ONE_TOKEN | changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": torch.tensor([5])},
        {"token_ids": torch.tensor([-100])},
        {"support": Support(torch.tensor([1, 3]), torch.tensor([0, 2]))},
    ],
)
def test_ids_outside_the_vocabulary_are_errors_of_torch(changes: dict[str, object]) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"index .* is out of bounds for dimension 1 with size 3"):
        policy_loss_from_logits(torch.zeros(1, 3), *records(**(ONE_TOKEN | changes)))


def test_shapes_and_types_that_do_not_fit_are_found_by_the_tests() -> None:
    """jaxtyping and beartype, which tests/conftest.py switches on, check signatures and records."""
    ones = torch.ones(1)
    for wrong in ({"token_ids": torch.tensor([1, 2])}, {"token_ids": ones}, {"old_logps": torch.zeros(2)}):
        with pytest.raises(TypeCheckError):
            TokenInputs(**({"token_ids": torch.tensor([1]), "weights": ones, "advantages": ones} | wrong))
    inputs = token_inputs(torch.tensor([1]), ones)
    with pytest.raises(TypeCheckError):
        policy_loss_from_logits(torch.zeros(1, 1, 3), inputs)
    with pytest.raises(TypeCheckError):
        group_policy_loss(torch.zeros(1, 2), torch.zeros(3, 4), inputs)
    with pytest.raises(TypeCheckError):
        group_policy_loss(torch.zeros(1, 2), torch.zeros(3, 2), inputs, bias=torch.zeros(2))
    with pytest.raises(TypeCheckError):
        Groups(torch.zeros(1), ones.double(), torch.tensor([0]), torch.tensor([1]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_capped_logits_are_those_of_the_definition(variant: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_module, "_CHUNK_ELEMENTS", {"cpu": 60})  # three chunks
    arguments = case(9, 20, 3, **variant)
    del arguments["logits"]
    leaves = head_factors(9, 20)
    ours, truth = ([tensor.double().requires_grad_() for tensor in leaves] for _ in range(2))
    inputs, options = records(temperature=0.7, impl="torch", soft_cap=5.0, **arguments)
    result = group_policy_loss(ours[0], ours[1], inputs, options, bias=ours[2])
    products = truth[0] @ truth[1].t() + truth[2]
    assert products.abs().max() > 8, "well beyond the bound"
    expected, logps = loss_by_definition(5 * (products / 5).tanh(), temperature=0.7, **arguments)
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.logps, logps)
    result.loss.backward()
    expected.backward()
    for tensor, wanted in zip(ours, truth, strict=True):
        torch.testing.assert_close(tensor.grad, wanted.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_logits_are_nearer_to_the_products_of_half_precision_factors(dtype: torch.dtype) -> None:
    arguments = case(9, 200, 3)
    del arguments["logits"]
    hidden, head, bias = (tensor.to(dtype) for tensor in head_factors(9, 200))
    truth = [tensor.double().requires_grad_() for tensor in (hidden, head, bias)]
    expected, logps = loss_by_definition(truth[0] @ truth[1].t() + truth[2], **arguments)
    expected.backward()
    gaps = []
    for wide in (False, True):
        ours = [tensor.clone().requires_grad_() for tensor in (hidden, head, bias)]
        inputs, options = records(impl="torch", float32_logits=wide, **arguments)
        result = group_policy_loss(ours[0], ours[1], inputs, options, bias=ours[2])
        result.loss.backward()
        gaps.append(float((result.logps - logps.detach()).abs().max()))
        for tensor, wanted in zip(ours, truth, strict=True):
            assert tensor.grad.dtype == dtype
            torch.testing.assert_close(tensor.grad.double(), wanted.grad, atol=0.1, rtol=0.05)
    assert gaps[1] < 1e-5 < gaps[0] / 10


def test_capped_logits_are_not_capped_again() -> None:
    with pytest.raises(ValueError, match="soft_cap is for logits from hidden states"):
        policy_loss_from_logits(
            torch.zeros(1, 2), token_inputs(torch.tensor([0]), torch.ones(1)), LossOptions(soft_cap=30.0)
        )


@pytest.mark.parametrize(("num_tokens", "trains_head"), [(1, False), (5000, False), (5000, True), (16384, True)])
def test_chunks_on_cuda_are_equal_and_end_with_tiles(num_tokens: int, trains_head: bool) -> None:
    parts = hidden_module.slice_chunks(num_tokens, 151_936, torch.device("cuda"), trains_head=trains_head)
    sizes = [part.stop - part.start for part in parts]
    assert sum(sizes) == num_tokens
    assert set(sizes[:-1]) <= {sizes[0]}
    assert all(size % 256 == 0 for size in sizes[:-1])
    assert max(sizes) <= (8192 if trains_head else 2048)
    assert len(sizes) == {1: 1, 5000: 1 if trains_head else 3, 16384: 2}[num_tokens]
