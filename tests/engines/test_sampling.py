"""Sampling from logits: goldens, then agreement with the textbook inverse CDF."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magrpo.engines.local.sampling import TokenSampler, kept_tokens
from magrpo.types import Request, SamplingParams


def requests(*params: SamplingParams) -> list[Request]:
    return [Request("main", (1,), sampling, seed) for seed, sampling in enumerate(params)]


def draw(logits: torch.Tensor, asked: list[Request], step: int = 0) -> tuple[list[int], torch.Tensor]:
    token, logp, _ = TokenSampler(asked, torch.device("cpu"))(logits, torch.arange(len(asked)), step)
    return token.tolist(), logp


def test_greedy_golden() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 5.0]])
    tokens, logp = draw(logits, requests(*[SamplingParams(temperature=0.0, max_new_tokens=1)] * 2))
    assert tokens == [1, 0]
    # log softmax at temperature 1: 2 - log(1 + e^2 + e), and -log(2 + e^-6)
    torch.testing.assert_close(logp, torch.tensor([2 - np.log(1 + np.e**2 + np.e), -np.log(2 + np.e**-6)]).float())


def test_temperature_golden() -> None:
    # Probabilities 1/5 and 4/5 at temperature 1 become 1/17 and 16/17 at temperature 0.5.
    logits = torch.tensor([[1.0, 4.0]]).log().expand(64, 2)
    asked = requests(*[SamplingParams(temperature=0.5, max_new_tokens=1)] * 64)
    tokens, logp = draw(logits, asked)
    uniforms = [np.random.default_rng(request.seed).random(1)[0] for request in asked]
    assert tokens == [int(uniform > 1 / 17) for uniform in uniforms]
    expected = torch.tensor([1 / 17, 16 / 17]).log()[torch.tensor(tokens)]
    torch.testing.assert_close(logp, expected)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, [0.1, 0.4, 0.2, 0.3]),
        (1.0, 2, [0.0, 0.4, 0.0, 0.3]),
        (0.7, 0, [0.0, 0.4, 0.0, 0.3]),  # 0.4 + 0.3 reaches 0.7
        (0.71, 0, [0.0, 0.4, 0.2, 0.3]),
        (0.01, 0, [0.0, 0.4, 0.0, 0.0]),
        (0.5, 2, [0.0, 0.4, 0.0, 0.0]),  # after top-k the first one holds 4/7
        (0.6, 2, [0.0, 0.4, 0.0, 0.3]),
        (1.0, 9, [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_kept_tokens_golden(top_p: float, top_k: int, kept: list[float]) -> None:
    weights = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)
    out = kept_tokens(weights, torch.tensor([top_p], dtype=torch.float64), torch.tensor([top_k]))
    assert out.tolist() == [[weight > 0 for weight in kept]]


@given(
    vocab=st.sampled_from([1, 2, 127, 128, 129, 300, 1024]),
    scale=st.sampled_from([0.0, 1.0, 20.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_tokens_are_those_of_the_inverse_cdf(vocab: int, scale: float, temperature: float, seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(8, vocab)) * scale).float()
    asked = requests(*[SamplingParams(temperature=temperature, max_new_tokens=3)] * 8)
    tokens, logp = draw(logits, asked, step=2)
    logps = (logits.double() / temperature).log_softmax(-1)
    reached = logps.exp().cumsum(-1)
    for row, (token, request) in enumerate(zip(tokens, asked, strict=True)):
        uniform = np.random.default_rng(request.seed).random(3)[2]
        assert reached[row, token] > uniform - 1e-5
        assert token == 0 or reached[row, token - 1] <= uniform + 1e-5
        assert logp[row] == pytest.approx(float(logps[row, token]), abs=1e-4)


def sort_and_keep(weights: torch.Tensor, top_p: float, top_k: int) -> list[int]:
    """The definition of :func:`kept_tokens` for one row: sums in float64, over the whole row, from the likeliest."""
    values = weights.tolist()
    order = sorted(range(len(values)), key=lambda token: -values[token])[: top_k or None]
    reached = np.cumsum(weights[order].double().numpy())
    kept = [token for token, before in zip(order, [0.0, *reached], strict=False) if before < top_p * reached[-1]]
    return sorted(kept if top_p < 1 else order)


@st.composite
def rows_of_logits(draw: st.DrawFn) -> torch.Tensor:
    """Logits (6, V): flat, peaked or with a long tail; continuous or with ties; perhaps with tokens at -inf."""
    vocab = draw(st.sampled_from([1, 2, 17, 128, 300, 3000]))
    numbers = np.random.default_rng(draw(st.integers(0, 10**6)))
    scales = np.array(draw(st.lists(st.sampled_from([0.0, 0.01, 1.0, 3.0, 9.0, 30.0]), min_size=6, max_size=6)))
    rows = numbers.normal(size=(6, vocab)) * scales[:, None]
    grid = draw(st.sampled_from([0.0, 0.125, 1.0]))
    if grid:
        rows = np.round(rows / grid) * grid
    if draw(st.booleans()):
        hidden = numbers.random(size=rows.shape) < 0.7
        hidden[:, numbers.integers(vocab)] = False
        rows[hidden] = -np.inf
    return torch.from_numpy(rows).float()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1e-6, 0.1, 0.25, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 299, 300, 10**6]),
    max_new_tokens=st.just(1),
    keep_support=st.booleans(),
)


@given(rows_of_logits(), st.lists(PARAMS, min_size=6, max_size=6))
def test_kept_tokens_are_those_of_a_sort(logits: torch.Tensor, params: list[SamplingParams]) -> None:
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    top_p = torch.tensor([p.top_p for p in params])
    kept = kept_tokens(weights, top_p, torch.tensor([p.top_k for p in params]))
    for row, share in enumerate(top_p.tolist()):
        assert kept[row].nonzero().squeeze(-1).tolist() == sort_and_keep(weights[row], share, params[row].top_k)


@given(rows_of_logits(), st.integers(0, 10**6))
def test_rounding_decides_as_in_a_sort(logits: torch.Tensor, rank: int) -> None:
    """Shares that a sum of the likeliest tokens meets to the last bit, or misses by it."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    reached = weights.double().sort(descending=True).values.cumsum(-1)
    top_p = (reached / reached[:, -1:])[:, rank % weights.shape[1]]
    kept = kept_tokens(weights, top_p, torch.zeros(6, dtype=torch.long))
    for row, share in enumerate(top_p.tolist()):
        assert kept[row].nonzero().squeeze(-1).tolist() == sort_and_keep(weights[row], share, 0)


@pytest.mark.parametrize("top_k", [1, 30, 200, 230])
def test_ties_go_to_the_lower_ids(top_k: int) -> None:
    weights = torch.tensor([0.999, 0.998]).repeat(200)
    expected = sorted([*range(0, 400, 2), *range(1, 400, 2)][:top_k])
    assert kept_tokens(weights[None], torch.tensor([1.0]), torch.tensor([top_k]))[0].nonzero().squeeze(-1).tolist() == (
        expected
    )


@given(rows_of_logits(), st.lists(PARAMS, min_size=6, max_size=6))
def test_a_truncated_draw_is_one_from_logits_without_the_rest(
    logits: torch.Tensor, params: list[SamplingParams]
) -> None:
    """Equal bits: a token that is cut off weighs as much as one whose logit is -inf."""
    sampler = TokenSampler(requests(*params), torch.device("cpu"))
    tokens, logps, support = sampler(logits, torch.arange(6), 0)
    for row, p in enumerate(params):
        ids = list(range(logits.shape[1]))
        if p.truncates:
            scaled = logits[row] / p.temperature
            share = float(torch.tensor(p.top_p))
            ids = sort_and_keep((scaled - scaled.amax()).exp(), share, p.top_k)
        left = torch.full_like(logits[row], -torch.inf)
        left[ids] = logits[row, ids]
        plain = replace(p, top_p=1.0, top_k=0)
        asked = [Request("main", (1,), plain, row)]
        [token], logp = draw(left[None], asked)
        assert int(tokens[row]) == token
        assert support.get(row, ids) == ids
        assert (row in support) == p.records_support
        if p.records_support or not p.truncates:
            assert torch.equal(logps[row], logp[0])
        else:
            full = (logits[row] / p.temperature).log_softmax(-1)
            torch.testing.assert_close(logps[row], full[token])


def test_a_request_draws_the_same_numbers_in_any_batch_and_room() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    asked = requests(*[SamplingParams(max_new_tokens=n) for n in (4, 40, 7)])
    together = TokenSampler(asked, torch.device("cpu"))
    for step in range(4):
        tokens, _, _ = together(logits, torch.arange(3), step)
        backwards, _, _ = together(logits.flip(0), torch.tensor([2, 1, 0]), step)
        assert tokens.tolist() == backwards.flip(0).tolist()
        for row, request in enumerate(asked):
            alone, _, _ = TokenSampler([request], torch.device("cpu"))(logits[row : row + 1], torch.tensor([0]), step)
            assert alone.item() == tokens[row]


def test_logits_that_are_not_finite_give_a_logp_that_is_not() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, float("inf")]])
    _, logp = draw(logits, requests(*[SamplingParams(max_new_tokens=1)] * 2))
    assert not logp.isfinite().any()
