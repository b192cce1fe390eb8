"""Decoding steps of models whose memory is not only keys and values: slower, and right for any causal model.

All prompts of a batch have one length, because a state that a model carries from token to token would take in padding.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from magrpo.engines.local.steps import DecodingStep, list_prompts
from magrpo.types import Request


class CacheStep(DecodingStep):
    """The step of a model with the cache that transformers makes for it, such as the states of linear attention."""

    def __init__(self, model: PreTrainedModel, cache: DynamicCache) -> None:
        self._model, self._cache = model, cache

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return _run_cached(self._model, tokens[:, None], positions[:, None], self._cache)

    def drop_rows(self, over: Tensor) -> Tensor:
        rows = (~over).nonzero().squeeze(-1)
        self._cache.reorder_cache(rows)  # type: ignore[arg-type]  # any integers
        return rows


class WholeTextStep(DecodingStep):
    """The step of a model with a cache of its own, which is not used: the whole text is computed for each token."""

    def __init__(self, model: PreTrainedModel, texts: Tensor) -> None:
        self._model, self._texts = model, texts  # texts: (n, length)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self._texts = torch.cat([self._texts, tokens[:, None]], dim=1)
        return _run_texts(self._model, self._texts)

    def drop_rows(self, over: Tensor) -> Tensor:
        rows = (~over).nonzero().squeeze(-1)
        self._texts = self._texts[rows]
        return rows


def start_cached(model: PreTrainedModel, requests: Sequence[Request], room: int) -> tuple[Tensor, DecodingStep]:
    """Run each distinct prompt once; its siblings get copies of its cache."""
    prompts, parents = _collect_prompts(requests, model.device)
    cache = DynamicCache(config=model.config)
    positions = torch.arange(prompts.shape[1], device=model.device).expand(prompts.shape)
    logits = _run_cached(model, prompts, positions, cache)
    if any(isinstance(layer, DynamicLayer) and not layer.is_initialized for layer in cache.layers):
        raise ValueError("layers of the model keep keys and values, or other states, outside the cache")
    cache.reorder_cache(parents)  # type: ignore[arg-type]  # any integers
    return logits[parents], CacheStep(model, cache)


def start_whole(model: PreTrainedModel, requests: Sequence[Request], room: int) -> tuple[Tensor, DecodingStep]:
    """Run each distinct prompt once, and remember only the texts."""
    prompts, parents = _collect_prompts(requests, model.device)
    return _run_texts(model, prompts)[parents], WholeTextStep(model, prompts[parents])


def _collect_prompts(requests: Sequence[Request], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the distinct prompts (P, length), and the index of the prompt of each request (B,)."""
    prompts, parents = list_prompts(requests)
    return torch.tensor(prompts, device=device), torch.tensor(parents, device=device)


def _run_cached(model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, cache: DynamicCache) -> Tensor:
    """Run the next tokens (n, length) of all rows; return logits (n, V) of those that follow."""
    # Some models of Mamba's kind call their cache ``cache_params`` and take no positions.
    return _run_model(
        model, input_ids, use_cache=True, position_ids=position_ids, past_key_values=cache, cache_params=cache
    )


def _run_texts(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """Run whole texts (n, length); return logits (n, V) of the tokens that follow."""
    return _run_model(model, texts, use_cache=False)


def _run_model(model: PreTrainedModel, input_ids: Tensor, **inputs: Any) -> Tensor:
    """Run the model with those of the inputs that its forward pass names; return logits (n, V) at the last token."""
    names = inspect.signature(model.forward).parameters
    known = {name: value for name, value in (inputs | {"logits_to_keep": 1}).items() if name in names}
    logits: Tensor = model(input_ids=input_ids, **known).logits
    return logits[:, -1]
