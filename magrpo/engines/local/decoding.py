"""Batched decoding with a key-value cache: each prompt runs once for all its siblings; finished rows are dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from magrpo.engines import Completion
from magrpo.engines.local.captured_steps import CapturedStep, can_capture
from magrpo.engines.local.llama_steps import LlamaStep, is_plain_llama
from magrpo.engines.local.sampling import TokenSampler
from magrpo.engines.local.steps import DecodingStep, ModuleStep, Prompts, list_prompts
from magrpo.interfaces import Progress
from magrpo.model.rounding import RoundedLinear
from magrpo.types import Request

if TYPE_CHECKING:
    from magrpo.model.policy import Policy

_PREFILL_TOKENS = 4096
"""Most padded tokens that run through a model at once: enough to keep a GPU busy, and few enough for a CPU not to ask
the system for new memory in every layer."""
Start = Callable[[PreTrainedModel, Sequence[Request], int], tuple[Tensor, DecodingStep]]
"""Runs the prompts of requests; returns logits (B, V) of their first new tokens, and the step that computes the next
ones, for up to ``room`` more tokens."""


def make_step(model: PreTrainedModel, prompts: Prompts, room: int) -> DecodingStep:
    """Make the fastest step for a causal language model in eval mode, for up to ``room`` more tokens."""
    if can_capture(model):
        return CapturedStep(model, prompts, room)
    if is_plain_llama(model):
        return LlamaStep(model, prompts, room)
    return ModuleStep(model, prompts, room)


def start_padded(
    model: PreTrainedModel,
    requests: Sequence[Request],
    room: int,
    make_step: Callable[[PreTrainedModel, Prompts, int], DecodingStep] = make_step,
) -> tuple[Tensor, DecodingStep]:
    """Start with prompts padded to one length, for models whose memory is keys and values."""
    logits, prompts = _prefill(model, requests)
    return logits, make_step(model, prompts, room)


@contextmanager
def decoding_model(policy: Policy, agent: str) -> Iterator[PreTrainedModel]:
    """Return the agent's causal language model, prepared for many small steps.

    A float32 adapter is merged into a copy that shares all other tensors with the base: one matrix product per layer
    instead of three, exact up to rounding. On a layer in bfloat16 the adapter stays separate, because a merged weight
    would lose its small updates.
    """
    with policy.active(agent) as model:
        assert not model.training
        if policy.lineup.weights(agent) == "full" or model.dtype != torch.float32:
            yield model
            return
        memo: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        for layer in model.modules():
            if isinstance(layer, LoraLinear) and type(base := layer.get_base_layer()) is not RoundedLinear:
                assert isinstance(base, nn.Linear)
                [adapter] = layer.active_adapters
                with torch.no_grad():
                    # In place: a third tensor for each layer leaves holes in the heap that the next ones do not fit.
                    weight = layer.get_delta_weight(adapter).add_(base.weight)
                plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(weight, requires_grad=False)
                plain.bias = base.bias
                memo[id(layer)] = plain
        yield deepcopy(model, memo)


def can_decode_apart(policy: Policy) -> bool:
    """Whether each agent has its own :func:`decoding_model`, on cores that several may share."""
    has_own = policy.dtype == torch.float32 or all(policy.lineup.holder(name) == name for name in policy.agents)
    return policy.device.type == "cpu" and has_own


@torch.no_grad()
def decode_batch(
    model: PreTrainedModel,
    requests: Sequence[Request],
    stop_token_ids: Sequence[int],
    progress: Progress | None,
    stop: Callable[[], bool] = lambda: False,
    start: Start = start_padded,
) -> list[Completion]:
    """Complete each request of one agent, in order. Log-probabilities are nan where logits are not finite.

    Raises CancelledError once ``stop()`` returns true.
    """
    device = model.device
    limits = torch.tensor([request.sampling.max_new_tokens for request in requests], device=device)  # (B,)
    room = int(limits.max())
    sampler = TokenSampler(requests, device)
    stops = torch.tensor(stop_token_ids, device=device)
    tokens = torch.zeros(len(requests), room, dtype=torch.long, device=device)
    logps = torch.zeros(len(requests), room, device=device)
    support: list[list[list[int]]] = [[] for _ in requests]
    lengths = limits.clone()
    positions = torch.tensor([len(request.prompt_ids) for request in requests], device=device)  # of the first new token
    live = torch.arange(len(requests), device=device)
    logits, run_step = start(model, requests, room)
    for step in range(room):
        if stop():
            raise CancelledError
        token, logp, kept = sampler(logits, live, step)
        tokens[live, step], logps[live, step] = token, logp
        for request, ids in kept.items():
            support[request].append(ids)
        over = torch.isin(token, stops) | (limits[live] == step + 1)
        if over.any():
            lengths[live[over]] = step + 1
            if progress:
                progress(int(over.sum()))
            rows = run_step.drop_rows(over)
            if not len(rows):
                break
            live, token = live[rows], token[rows]
        logits = run_step(token, positions[live] + step)
    ends = lengths.tolist()
    sampled = zip(tokens.tolist(), logps.tolist(), support, ends, strict=True)
    return [Completion(t[:end], p[:end], s) for t, p, s, end in sampled]


def _prefill(model: PreTrainedModel, requests: Sequence[Request]) -> tuple[Tensor, Prompts]:
    """Run every distinct prompt once; return logits (B, V) of the first new token, and the prompts."""
    device = model.device
    prompts, index = list_prompts(requests)
    parents = torch.tensor(index, device=device)  # (B,)
    width = max(map(len, prompts))
    ids = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts], device=device)  # (P, width)
    starts = torch.tensor([width - len(prompt) for prompt in prompts], device=device)[:, None]
    mask = torch.arange(width, device=device) >= starts  # (P, width)
    chunk = max(1, _PREFILL_TOKENS // width)
    outputs, states, paddings = [], [], []
    for start in range(0, len(prompts), chunk):
        rows = slice(start, start + chunk)
        padding = int(starts[rows].min())  # columns that no prompt of the chunk uses
        real = mask[rows, padding:]
        cache = DynamicCache()
        output = model(
            input_ids=ids[rows, padding:],
            attention_mask=real,
            position_ids=(real.cumsum(-1) - 1).clamp_(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        outputs.append(output.logits[:, -1])
        states.append(deque(_cached_states(layer) for layer in cache.layers))
        paddings.append(padding)
    # A layer's chunks are freed once they are joined: all layers twice would be the most memory of an evaluation.
    del cache, output
    joined = []
    while states[0]:
        layer = [layers_left.popleft() for layers_left in states]  # (keys, values) of each chunk
        keys = torch.cat([_pad_left(part, padding) for (part, _), padding in zip(layer, paddings, strict=True)])
        values = torch.cat([_pad_left(part, padding) for (_, part), padding in zip(layer, paddings, strict=True)])
        joined.append((keys, values))
    return torch.cat(outputs)[parents], Prompts(joined, mask, parents)


def _pad_left(states: Tensor, padding: int) -> Tensor:
    """Put that many slots of padding before states (P, heads, W, size); without any they are not copied."""
    return functional.pad(states, (0, 0, padding, 0)) if padding else states


def _cached_states(layer: object) -> tuple[Tensor, Tensor]:
    """Return the keys and values (P, heads, width, size) that a layer has cached."""
    if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
        raise ValueError("a layer of the model has no plain key-value cache")
    return layer.keys, layer.values
