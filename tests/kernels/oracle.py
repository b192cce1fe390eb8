"""The loss by definition, in float64 through autograd: what every implementation is held against."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from magrpo_kernels import LossOptions, Support, TokenInputs

VARIANTS = [{}, {"ratio": True}, {"kl": True}, {"ratio": True, "kl": True}]
VARIANTS += [{**variant, "support": True} for variant in VARIANTS]
"""Options of :func:`case`: every combination of the terms of a loss."""


def token_inputs(token_ids: Tensor, advantages: Tensor, **others: Any) -> TokenInputs:
    """Inputs of tokens of weight 1."""
    return TokenInputs(token_ids, torch.ones_like(advantages), advantages, **others)


def records(**arguments: Any) -> tuple[TokenInputs, LossOptions]:
    """The records that a loss takes, from arguments such as those of :func:`case`."""
    names = {field.name for field in fields(TokenInputs)}
    tokens = {name: value for name, value in arguments.items() if name in names}
    return TokenInputs(**tokens), LossOptions(**{name: arguments[name] for name in arguments.keys() - names})


def case(
    num_tokens: int, vocabulary: int, seed: int, *, ratio: bool = False, kl: bool = False, support: bool = False
) -> dict[str, Any]:
    """Arguments of a loss: every fourth token has advantage 0, and old policies are near the current one.

    Supports hold each other id at random, some nearly all, some nearly none, in no order.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logits = 3 * normal(num_tokens, vocabulary)
    advantages = normal(num_tokens)
    advantages[::4] = 0.0
    weights = 0.5 + torch.rand(num_tokens, generator=generator)
    ids = torch.randint(vocabulary, (num_tokens,), generator=generator)
    kept = torch.rand(num_tokens, vocabulary, generator=generator) < torch.rand(num_tokens, 1, generator=generator)
    kept |= torch.nn.functional.one_hot(ids, vocabulary).bool()
    inside = logits.masked_fill(~kept, -torch.inf) if support else logits
    logps = inside.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    arguments: dict[str, Any] = {"logits": logits, "token_ids": ids, "weights": weights, "advantages": advantages}
    if ratio:
        arguments |= {"old_logps": logps + 0.3 * normal(num_tokens), "clip_low": 0.2, "clip_high": 0.3}
    if kl:
        penalties = normal(num_tokens).abs() * (advantages != 0)
        arguments |= {"ref_logps": logps + 0.5 * normal(num_tokens), "kl_coefficients": penalties}
    if support:
        rows = [row.nonzero().squeeze(1).flip(0) for row in kept]
        bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
        arguments["support"] = Support(torch.cat([ids[:0], *rows]), bounds)
    return arguments


def head_factors(num_tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and its bias, whose logits reach beyond 8."""
    generator = torch.Generator().manual_seed(4)
    shapes = ((num_tokens, 6), (vocabulary, 6), (vocabulary,))
    hidden, head, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return 2 * hidden, head, bias


def loss_by_definition(
    logits: Tensor,
    token_ids: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    temperature: float = 1.0,
    divisor: float = 1.0,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    kl_coefficients: Tensor | None = None,
    clip_low: float = 0.0,
    clip_high: float = 0.0,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """The summed loss and the log-probabilities, in the logits' dtype."""
    if support is not None:
        outside = torch.ones_like(logits, dtype=torch.bool)
        for row, (start, end) in enumerate(pairwise(support.bounds.tolist())):
            outside[row, support.ids[start:end]] = False
        logits = logits.masked_fill(outside, -torch.inf)
    logps = (logits / temperature).log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
    c = (advantages / divisor * weights).to(logits.dtype)
    if old_logps is None:
        loss = -(c * logps).sum()
    else:
        ratio = (logps - old_logps.to(logits.dtype)).exp()
        loss = -torch.minimum(ratio * c, ratio.clamp(1 - clip_low, 1 + clip_high) * c).sum()
    if ref_logps is not None:
        assert kl_coefficients is not None
        d = ref_logps.to(logits.dtype) - logps
        loss = loss + (kl_coefficients.to(logits.dtype) * (d.exp() - d - 1)).sum()
    return loss, logps
