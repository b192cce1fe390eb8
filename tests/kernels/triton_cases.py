"""The Triton kernel against its definition. ``test_triton.py`` says where these tests run.

On a GPU they run compiled, elsewhere in Triton's interpreter.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from magrpo.algo.loss import SampledTokens, policy_loss
from magrpo.types import Normalize
from magrpo_kernels import LossOptions, Support, group_policy_loss, policy_loss_from_logits
from magrpo_kernels.row import row_loss
from tests.kernels.group_cases import group_inputs
from tests.kernels.oracle import VARIANTS, case, head_factors, loss_by_definition, records, token_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    """A copy of the loss arguments with every tensor and ``Support`` moved to ``DEVICE``."""

    def move(value: Any) -> Any:
        if isinstance(value, Support):
            return Support(*(values.to(DEVICE) for values in value))
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value

    return {name: move(value) for name, value in arguments.items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("num_tokens", "vocabulary"), [(0, 5), (1, 1), (5, 127), (3, 1000), (2, 9001)])
def test_float32_is_the_definition(variant: dict[str, bool], num_tokens: int, vocabulary: int) -> None:
    arguments = on_device(case(num_tokens, vocabulary, 7, **variant))
    logits = arguments.pop("logits")
    ours, truth = logits.clone().requires_grad_(), logits.double().requires_grad_()
    result = policy_loss_from_logits(ours, *records(temperature=0.8, divisor=3.0, impl="triton", **arguments))
    expected, logps = loss_by_definition(truth, temperature=0.8, divisor=3.0, **arguments)
    (gradient,) = torch.autograd.grad(result.loss, ours)
    (wanted,) = torch.autograd.grad(expected, truth)
    torch.testing.assert_close(result.loss.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(result.logps.double(), logps, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, atol=1e-5, rtol=1e-4)
    outside = torch.zeros_like(logits, dtype=torch.bool)
    if "support" in variant:
        ids, bounds = arguments["support"]
        outside |= True
        outside[torch.arange(num_tokens, device=DEVICE).repeat_interleave(bounds.diff()), ids] = False
    assert not gradient[outside].any(), "exactly 0"


GRADIENT_BOUND = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Largest error of a gradient, as a share of its row's largest element."""
LARGE = [50_257, 151_936] if DEVICE == "cuda" else [50_257]
VOCABULARIES = [700, *LARGE] if DEVICE == "cuda" else [700]
# The interpreter is slow, and precisions only change how elements are read and written.
READ_VARIANTS = VARIANTS if DEVICE == "cuda" else [VARIANTS[0], VARIANTS[-1]]


@pytest.mark.parametrize("dtype", GRADIENT_BOUND)
@pytest.mark.parametrize("variant", READ_VARIANTS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logits_of_every_precision_are_read_and_written_once(
    variant: dict[str, bool], vocabulary: int, dtype: torch.dtype
) -> None:
    arguments = on_device(case(6, vocabulary, 2, **variant))
    logits = arguments.pop("logits").to(dtype)
    ours, truth = logits.clone().requires_grad_(), logits.double().requires_grad_()
    result = policy_loss_from_logits(ours, *records(impl="triton", **arguments))
    expected, logps = loss_by_definition(truth, **arguments)
    (gradient,) = torch.autograd.grad(result.loss, ours)
    (wanted,) = torch.autograd.grad(expected, truth)
    torch.testing.assert_close(result.logps.double(), logps, atol=2e-6, rtol=1e-6)
    bound = GRADIENT_BOUND[dtype] * wanted.abs().amax(1, keepdim=True) + 1e-5
    assert ((gradient.double() - wanted).abs() <= bound).all()


def test_the_gradient_may_overwrite_the_logits() -> None:
    """A race between reading and writing shows on a GPU alone, while copies on another stream delay some warps."""
    num_tokens, vocabulary, repeats = (1024, 151_936, 200) if DEVICE == "cuda" else (2, 9001, 2)
    generator = torch.Generator(DEVICE).manual_seed(5)
    logits = 3 * torch.randn(num_tokens, vocabulary, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    # The kernel writes low ids last and high ids first.
    ids = torch.arange(num_tokens, device=DEVICE) * 63 % 4096
    ids = torch.where(ids % 2 == 0, ids, vocabulary - 1 - ids)
    ones = torch.ones(num_tokens, device=DEVICE)
    logps = logits.float().log_softmax(1).gather(1, ids[:, None]).squeeze(1)
    inputs = token_inputs(ids, ones, old_logps=logps + 0.1)
    options = LossOptions(clip_low=0.2, clip_high=0.3, impl="triton")
    wanted = torch.empty_like(logits)
    expected = row_loss(logits, inputs, options, wanted)
    for _ in range(repeats):
        rows = logits.clone()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.zeros(1 << 28, dtype=torch.uint8, device=DEVICE).flip(0)
        found = row_loss(rows, inputs, options, rows)
        assert torch.equal(rows, wanted)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("from_hidden", [False, True])
def test_the_ratio_of_sequences(from_hidden: bool) -> None:
    """The gradient of the objective of GSPO, arXiv 2507.18071, equation 5, with both sides of the clip."""
    lengths, advantages = (1, 4, 3, 4), (1.0, -2.0, 0.5, -1.0)
    generator = torch.Generator().manual_seed(7)
    hidden, head = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((12, 8), (301, 8)))
    ids = torch.randint(301, (12,), generator=generator).to(DEVICE)
    tokens = SampledTokens(
        ids,
        torch.tensor(advantages, device=DEVICE).repeat_interleave(torch.tensor(lengths, device=DEVICE)),
        torch.zeros(12, device=DEVICE),
        lengths=torch.tensor(lengths, device=DEVICE),
        sample_weights=torch.tensor([1 / n for n in lengths for _ in range(n)], device=DEVICE),
    )
    leaf = (hidden if from_hidden else hidden @ head.T).requires_grad_()
    logits = leaf.double() @ head.T.double() if from_hidden else leaf.double()
    logps = logits.log_softmax(1).gather(1, ids[:, None]).squeeze(1)
    changes = (0.5, -0.4, -0.3, 0.6)
    noise = 0.3 * torch.randn(12, generator=generator).to(DEVICE)
    shifted = [part - part.mean() + change for part, change in zip(noise.split(lengths), changes, strict=True)]
    old = (logps.detach() - torch.cat(shifted)).float()

    terms, sides = [], []
    for change, advantage in zip((logps - old).split(lengths), advantages, strict=True):
        ratio = change.mean().exp()
        clipped = ratio.clamp(0.8, 1.2)
        terms.append(-torch.minimum(ratio * advantage, clipped * advantage) / 4)
        sides.append(bool(clipped * advantage < ratio * advantage))
    assert sides == [True, True, False, False]
    (wanted,) = torch.autograd.grad(torch.stack(terms).sum(), leaf)

    loss_of = partial(group_policy_loss, leaf, head) if from_hidden else partial(policy_loss_from_logits, leaf)
    options = LossOptions(clip_low=0.2, clip_high=0.2, impl="triton")
    loss, sums, _ = policy_loss(loss_of, replace(tokens, old_logps=old), options, divisor=4.0, beta=0.0)
    (gradient,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    assert float(loss.detach()) == pytest.approx(float(sum(terms).detach()), rel=1e-4)
    assert int(sums["clipped"]) == 1 + 4


def test_the_loss_from_hidden_states_repeats_to_the_last_bit() -> None:
    tokens, width, vocabulary, dtype = (
        (4096, 1024, 50_257, torch.bfloat16) if DEVICE == "cuda" else (8, 16, 300, torch.float32)
    )
    generator = torch.Generator().manual_seed(1)
    hidden, head = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()
        for shape in ((tokens, width), (vocabulary, width))
    )
    ids = torch.randint(vocabulary, (tokens,), generator=generator).to(DEVICE)
    inputs = token_inputs(ids, torch.randn(tokens, generator=generator).to(DEVICE))

    def compute() -> list[torch.Tensor]:
        loss, logps = group_policy_loss(hidden, head, inputs, LossOptions(impl="triton"))
        return [loss.detach(), logps, *torch.autograd.grad(loss, [hidden, head])]

    first = compute()
    assert all(values.isfinite().all() for values in first)
    for _ in range(10 if DEVICE == "cuda" else 1):
        assert all(map(torch.equal, compute(), first))


def test_rows_of_minus_infinity_and_extreme_logits() -> None:
    lowest = torch.finfo(torch.float32).min
    rows = [[-1e30] * 3, [lowest] * 3, [-torch.inf, 0.0, -torch.inf], [88.0, 89.0, 0.0], [-1e38, -1e38, 1e30]]
    logits = torch.tensor(rows, device=DEVICE)
    ids = torch.tensor([0, 1, 1, 1, 2], device=DEVICE)
    logits.requires_grad_()
    inputs = token_inputs(ids, torch.ones(5, device=DEVICE))
    result = policy_loss_from_logits(logits, inputs, LossOptions(impl="triton"))
    (gradient,) = torch.autograd.grad(result.loss, logits)
    third = -torch.tensor(3.0).log().item()
    expected = [third, third, 0.0, -torch.tensor(1 + 2.718281828**-1).log().item(), 0.0]
    assert result.logps.tolist() == pytest.approx(expected, abs=1e-6)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mean", "deviation", "temperature"),
    [(0.0, 3.0, 1.0), (20.0, 1.0, 0.8), (0.0, 10.0, 0.8), (50.0, 1.0, 0.1), (1e3, 3.0, 1.0), (-1e4, 30.0, 0.7)],
)
@pytest.mark.parametrize("vocabulary", LARGE)
def test_log_probabilities_are_near_those_of_float64(
    mean: float, deviation: float, temperature: float, vocabulary: int, dtype: torch.dtype
) -> None:
    """The bound of docs/kernels.md also where logits are far from 0, which a product with the temperature rounds."""
    generator = torch.Generator().manual_seed(3)
    num_tokens = 64 if DEVICE == "cuda" else 1
    drawn = mean + deviation * torch.randn(num_tokens, vocabulary, generator=generator)
    logits = drawn.to(DEVICE, dtype)
    ids = logits.argmax(1) if deviation > 3 else torch.arange(num_tokens, device=DEVICE)
    inputs = token_inputs(ids, torch.ones(num_tokens, device=DEVICE))
    _, logps = row_loss(logits, inputs, LossOptions(temperature, impl="triton"), None)
    wanted = (logits.double() / temperature).log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(logps.double(), wanted, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("normalize", ["none", "std"])
def test_the_advantage_formed_in_the_kernel_is_the_stored_one_to_the_last_bit(normalize: Normalize) -> None:
    num_tokens = 4096 if DEVICE == "cuda" else 16
    logits = torch.randn(num_tokens, 9, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    options = LossOptions(divisor=12.0, impl="triton")
    results = []
    for inputs in group_inputs(normalize, num_tokens, DEVICE):
        gradient = torch.full_like(logits, torch.nan)
        results.append((*row_loss(logits, inputs, options, gradient), gradient))
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(*results, strict=True))
    assert results[0][2].isfinite().all()


@pytest.mark.parametrize("ratio", [False, True])
def test_the_importance_weight_is_that_of_the_definition(ratio: bool) -> None:
    arguments = on_device(case(12, 30, 4, ratio=ratio))
    logits = arguments.pop("logits")
    logps = logits.log_softmax(-1).gather(1, arguments["token_ids"][:, None]).squeeze(1)
    sampling = logps + 0.5 * torch.randn(12, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    is_capped = (arguments.get("old_logps", logps) - sampling).exp() > 1.2
    assert 3 <= int(is_capped.sum()) <= 9
    results = []
    for impl in ("triton", "torch"):
        inputs, options = records(sampling_logps=sampling, importance_cap=1.2, impl=impl, **arguments)
        gradient = torch.empty_like(logits)
        results.append((*row_loss(logits, inputs, options, gradient), gradient))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-4)


def test_a_reference_nearby_costs_what_its_series_says() -> None:
    """exp(d) - d - 1 is rounding alone where d is small: 5.36e-7 for 5.00e-7, or nothing at all."""
    distances = torch.tensor([1e-1, 9e-2, 1e-2, 1e-3, 1e-4, -1e-4, -1e-2, -9.99e-2, 2.0, -2.0], dtype=torch.float64)
    logits = torch.zeros(len(distances), 1, device=DEVICE)  # a vocabulary of one: log-probability 0
    ids, ones = torch.zeros(len(distances), dtype=torch.long, device=DEVICE), torch.ones(len(distances), device=DEVICE)
    reference = distances.float().to(DEVICE)
    inputs = token_inputs(ids, 0 * ones, ref_logps=reference, kl_coefficients=ones)
    losses, _ = row_loss(logits, inputs, LossOptions(impl="triton"), None)
    exact = reference.double().expm1() - reference.double()
    torch.testing.assert_close(losses.double(), exact, atol=0, rtol=1e-5)


def test_backward_that_runs_once_leaves_gradients_alone_or_scales_them() -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(2)).to(DEVICE).requires_grad_()
    inputs = token_inputs(torch.arange(5, device=DEVICE), torch.ones(5, device=DEVICE))
    for factor in (1.0, 0.3):
        gradients = []
        for once in (False, True):
            loss = policy_loss_from_logits(logits, inputs, LossOptions(backward_once=once, impl="triton")).loss
            gradients.append(torch.autograd.grad(factor * loss, logits)[0])
        assert torch.equal(*gradients)


def test_threads_may_launch_at_the_same_time() -> None:
    num_threads, num_tokens = (32, 8) if DEVICE == "cuda" else (8, 2)
    shape = num_threads, num_tokens, 300
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    inputs = token_inputs(torch.arange(num_tokens, device=DEVICE), torch.ones(num_tokens, device=DEVICE))

    def compute_gradient(row: torch.Tensor) -> torch.Tensor:
        loss = policy_loss_from_logits(row, inputs, LossOptions(backward_once=True, impl="triton")).loss
        return torch.autograd.grad(0.3 * loss, row)[0]

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(compute_gradient, logits))
    assert torch.equal(torch.stack(together), torch.stack([compute_gradient(row) for row in logits]))


def test_one_id_and_rows_of_any_stride() -> None:
    column = torch.randn(4, 3, device=DEVICE)[:, 1:2]  # (N, 1), whose second stride says nothing
    inputs = token_inputs(torch.zeros(4, dtype=torch.long, device=DEVICE), torch.ones(4, device=DEVICE))
    result = policy_loss_from_logits(column.t().contiguous().t(), inputs, LossOptions(impl="triton"))
    assert result.logps.tolist() == [0.0] * 4
    assert policy_loss_from_logits(column, inputs, LossOptions(impl="triton")).logps.tolist() == [0.0] * 4


def test_float64_is_not_rounded_behind_the_callers_back() -> None:
    logits = torch.randn(3, 50, dtype=torch.float64, device=DEVICE)
    inputs = token_inputs(torch.arange(3, device=DEVICE), torch.ones(3, device=DEVICE))
    logps = policy_loss_from_logits(logits, inputs).logps
    assert logps.dtype == torch.float64
    torch.testing.assert_close(logps, logits.log_softmax(-1)[:, :3].diagonal())
    with pytest.raises(ValueError, match="takes no float64"):
        policy_loss_from_logits(logits, inputs, LossOptions(impl="triton"))


def test_rows_with_a_stride_keep_what_lies_between_them() -> None:
    storage = torch.randn(4, 2, 50, device=DEVICE)
    untouched = storage[:, 1].clone()
    inputs = token_inputs(torch.arange(4, device=DEVICE), torch.ones(4, device=DEVICE))
    plain = storage[:, 0].clone()
    losses, _ = row_loss(storage[:, 0], inputs, LossOptions(impl="triton"), storage[:, 0])
    expected, _ = row_loss(plain, inputs, LossOptions(impl="torch"), plain)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(storage[:, 0], plain)
    assert torch.equal(storage[:, 1], untouched)


@pytest.mark.parametrize("support", [False, True])
def test_from_hidden_states_both_implementations_agree(support: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(9, 8, generator=generator), torch.randn(60, 8, generator=generator)
    arguments = on_device(case(9, 60, 5, kl=True, support=support))
    del arguments["logits"]
    gradients = []
    for impl in ("triton", "torch"):
        leaves = [tensor.clone().to(DEVICE).requires_grad_() for tensor in (hidden, weight)]
        loss = group_policy_loss(leaves[0], leaves[1], *records(impl=impl, **arguments)).loss
        gradients.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_and_float32_logits_with_gradients_of_the_models_dtype(dtype: torch.dtype) -> None:
    arguments = on_device(case(5, 300, 3, kl=True, support=True))
    del arguments["logits"]
    leaves = [tensor.to(DEVICE, dtype) for tensor in head_factors(5, 300)]
    ours = [tensor.clone().requires_grad_() for tensor in leaves]
    truth = [tensor.double().requires_grad_() for tensor in leaves]
    inputs, options = records(impl="triton", soft_cap=5.0, float32_logits=True, **arguments)
    result = group_policy_loss(ours[0], ours[1], inputs, options, bias=ours[2])
    products = truth[0] @ truth[1].t() + truth[2]
    expected, logps = loss_by_definition(5 * (products / 5).tanh(), **arguments)
    result.loss.backward()
    expected.backward()
    torch.testing.assert_close(result.logps.double(), logps, atol=1e-5, rtol=1e-5)
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    for tensor, wanted in zip(ours, truth, strict=True):
        torch.testing.assert_close(tensor.grad.double(), wanted.grad, atol=bound, rtol=bound)
