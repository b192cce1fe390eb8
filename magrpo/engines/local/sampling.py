"""Drawing tokens from logits: one pass of exponentials, a two-level inverse CDF, no sort unless truncation asks.

Randomness is one uniform number for each token of a request, drawn from the request's own seed, so that a completion
does not depend on what else is in the batch.
"""

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magrpo.types import Request

_BLOCK = 128
_HEAD = 2.0**-12
"""A weight, the likeliest token's being 1. In texts of language models about a hundred tokens are above it, and a
nucleus of 95 % seldom reaches below it."""
_LARGEST_HEAD = 1024
_BUCKET_SHIFT = 18
"""Leaves the sign, the exponent and five bits of the fraction of a float32."""

Floats = NDArray[np.floating]
Mask = NDArray[np.bool_]


class TokenSampler:
    """Samples the next tokens of the requests of one batch."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        params = [request.sampling for request in requests]
        uniforms = np.zeros((len(requests), max(p.max_new_tokens for p in params)))
        for row, request in zip(uniforms, requests, strict=True):
            length = request.sampling.max_new_tokens
            row[:length] = np.random.default_rng(request.seed).random(length)
        self._uniforms = torch.from_numpy(uniforms).to(device)  # (B, T)
        temperature = torch.tensor([p.temperature for p in params], device=device)
        self._greedy = temperature == 0
        self._temperature = torch.where(self._greedy, 1.0, temperature)
        self._top_p = torch.tensor([p.top_p if p.truncates else 1.0 for p in params], device=device)
        self._top_k = torch.tensor([p.top_k if p.truncates else 0 for p in params], device=device)
        self._scales = any(p.temperature not in (0, 1) for p in params)
        self._truncates = any(p.truncates for p in params)
        self._records = torch.tensor([p.records_support for p in params], device=device)
        self._any_records = any(p.records_support for p in params)
        self._has_greedy = any(p.temperature == 0 for p in params)
        self._only_greedy = all(p.temperature == 0 for p in params)

    def __call__(self, logits: Tensor, live: Tensor, step: int) -> tuple[Tensor, Tensor, dict[int, list[int]]]:
        """Draw token ``step`` of each completion. Row ``i`` of ``logits`` (n, V) belongs to request ``live[i]``.

        Returns ids (n,), natural log-probabilities (n,) in float32, and the support: the ids that truncation kept,
        ascending, by index in the batch, of requests that record it. Log-probabilities are at the sampling temperature
        (1 for greedy requests): before truncation, or over a recorded support. They are nan if logits are not finite.
        """
        scaled = logits.float()
        if self._scales:
            scaled = scaled / self._temperature[live, None]
        peak = scaled.amax(-1, keepdim=True)
        weights = (scaled - peak).exp_()  # (n, V), the largest is 1
        sums = _block_sums(weights)
        log_normaliser = _log_normaliser(peak, sums)
        support: dict[int, list[int]] = {}
        if self._truncates:
            kept = kept_tokens(weights, self._top_p[live], self._top_k[live])
            weights.masked_fill_(~kept, 0)
            sums = _block_sums(weights)
            if self._any_records:
                records = self._records[live]
                log_normaliser = torch.where(records, _log_normaliser(peak, sums), log_normaliser)
                support = dict(zip(live[records].tolist(), _list_kept(kept[records]), strict=True))
        token = self._draw(scaled, weights, sums, live, step)
        return token, scaled.gather(-1, token[:, None]).squeeze(-1) - log_normaliser, support

    def _draw(self, scaled: Tensor, weights: Tensor, sums: Tensor, live: Tensor, step: int) -> Tensor:
        """Draw ids (n,) from weights (n, V) with the sums of their blocks; greedy rows take their largest logit."""
        if self._only_greedy:
            return scaled.argmax(-1)
        token = _invert(weights, sums, self._uniforms[live, step])
        if self._has_greedy:
            token = torch.where(self._greedy[live], scaled.argmax(-1), token)
        return token


def kept_tokens(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return which tokens, (n, V) bool, are in each row's top-k and, among these, in its nucleus.

    The nucleus is the smallest set of the likeliest tokens whose probability reaches ``top_p`` (Holtzman et al. 2020,
    arXiv 1904.09751). ``top_k = 0`` and ``top_p = 1`` keep everything. Ties go to the lower ids.

    On a CPU only the rows that need it are sorted, which changes no set.
    """
    if weights.device.type != "cpu":
        return _keep_by_sorting(weights, top_p, top_k)
    kept = torch.ones_like(weights, dtype=torch.bool)
    undecided = []
    for row, (share, number) in enumerate(zip(top_p.tolist(), top_k.tolist(), strict=True)):
        found = _keep_in_row(weights[row].numpy(), share, number)
        if found is None:
            undecided.append(row)
        else:
            kept[row] = torch.from_numpy(found)
    if undecided:
        kept[undecided] = _keep_by_sorting(weights[undecided], top_p[undecided], top_k[undecided])
    return kept


def _keep_in_row(weights: Floats, top_p: float, top_k: int) -> Mask | None:
    """Return :func:`kept_tokens` of a row, or None if rounding could decide."""
    vocab = len(weights)
    kept = None
    if 0 < top_k < vocab:
        # Between two whole numbers, so that no count is near the limit.
        kept = _keep_share(weights, np.ones(vocab), (top_k - 0.5) / vocab)
        if kept is None:
            return None
        weights = np.where(kept, weights, 0)
    if top_p < 1:
        return _keep_share(weights, weights, top_p)
    return np.ones(vocab, dtype=np.bool_) if kept is None else kept


def _keep_share(weights: Floats, amounts: Floats, share: float) -> Mask | None:
    """Return the smallest set of the likeliest tokens whose amounts reach this share of all amounts.

    Only tokens around the end of the set are sorted: those above :data:`_HEAD` if they are few and reach the share,
    else those of one bucket of a histogram. Its buckets are the leading bits of the weights, which order them.

    In whatever order V positive numbers are added in float64, the sums differ by less than V * 2 ** -51 of their value.
    The set is therefore certain if no sum is about as close to the limit; otherwise returns None.
    """
    limit = share * float(amounts.sum(dtype=np.float64))
    if not isfinite(limit):
        return None
    ids = np.flatnonzero(weights > _HEAD)
    likelier = 0.0
    kept: Mask = np.zeros(len(weights), dtype=np.bool_)
    if len(ids) > _LARGEST_HEAD or amounts[ids].sum(dtype=np.float64) <= limit:
        buckets = weights.astype(np.float32, copy=False).view(np.uint32) >> _BUCKET_SHIFT
        reached = np.bincount(buckets, amounts)[::-1].cumsum()  # from the likeliest bucket down
        number = int(np.searchsorted(reached[:-1], limit))
        bucket = len(reached) - 1 - number
        ids = np.flatnonzero(buckets == bucket)
        if number:
            likelier = float(reached[number - 1])
        kept = buckets > bucket
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    sums = np.concatenate([[likelier], amounts[ids]]).cumsum()  # before each of these tokens, and after the last
    if (np.abs(sums - limit) <= len(weights) * 2.0**-50 * limit).any():
        return None
    kept[ids[: np.count_nonzero(sums < limit)]] = True
    return kept


def _keep_by_sorting(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return :func:`kept_tokens` from cumulative sums over whole rows in order."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    in_top_k = (top_k[:, None] == 0) | (rank < top_k[:, None])
    ordered = torch.where(in_top_k, ordered, 0).double()
    reached = ordered.cumsum(-1)
    before = reached - ordered
    keep = in_top_k & ((before < top_p[:, None] * reached[:, -1:]) | (top_p[:, None] >= 1))
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _log_normaliser(peak: Tensor, sums: Tensor) -> Tensor:
    """Return what turns logits into log-probabilities (n,), from the sums of weights ``exp(logits - peak)``."""
    return peak.squeeze(-1) + sums.sum(-1).log().float()


def _list_kept(kept: Tensor) -> list[list[int]]:
    """List the ids that are kept in each row of a mask (n, V), ascending."""
    rows, ids = kept.nonzero().cpu().unbind(-1)
    sizes = torch.bincount(rows, minlength=len(kept)).tolist()
    return [ids_of_row.tolist() for ids_of_row in torch.split(ids, sizes)]


def _block_sums(weights: Tensor) -> Tensor:
    """Sum consecutive blocks of the vocabulary, in float64; return (n, ceil(V / block))."""
    n, vocab = weights.shape
    whole = vocab // _BLOCK * _BLOCK
    sums = weights[:, :whole].reshape(n, -1, _BLOCK).sum(-1) if whole else weights.new_zeros(n, 0)
    if whole < vocab:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=-1)
    return sums.double()


def _invert(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Find the ids (n,) whose cumulative weight passes ``uniforms`` (n,) of the total: first block, then token."""
    reached = sums.cumsum(-1)
    target = uniforms[:, None] * reached[:, -1:]
    block = torch.searchsorted(reached, target, right=True).clamp_(max=sums.shape[-1] - 1)  # (n, 1)
    inside = (target - reached.gather(-1, block) + sums.gather(-1, block)) / sums.gather(-1, block)
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # (n, block)
    beyond = tokens >= weights.shape[-1]
    mass = weights.gather(-1, tokens.clamp_(max=weights.shape[-1] - 1)).double().masked_fill_(beyond, 0).cumsum_(-1)
    # A fraction below 1 of the block's own total always lands on a token with a weight above 0.
    fraction = inside.clamp_(0.0, 1.0 - 1e-12) * mass[:, -1:]
    offset = torch.searchsorted(mass, fraction, right=True).clamp_(max=_BLOCK - 1)
    return tokens.gather(-1, offset).squeeze(-1)
