"""One decoding step of any model, and its memory: keys and values of the prompts and of each row."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from magrpo.types import Request


@dataclass(frozen=True)
class Prompts:
    """The distinct prompts of a batch, each run once, and the rows that continue them."""

    states: Sequence[tuple[Float[Tensor, "P heads width size"], Float[Tensor, "P heads width size"]]]
    """Keys and values of each layer."""
    mask: Bool[Tensor, "P width"]
    """False on the left padding, true on tokens."""
    parents: Int[Tensor, " B"]
    """Index of the prompt that each row continues."""


def list_prompts(requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the distinct prompts, and the index of the prompt of each request."""
    prompts = list(dict.fromkeys(request.prompt_ids for request in requests))
    index = {prompt: i for i, prompt in enumerate(prompts)}
    return prompts, [index[request.prompt_ids] for request in requests]


class DecodingStep(ABC):
    """Computes logits (n, V) of the next tokens of live rows from their last tokens (n,) and positions (n,)."""

    @abstractmethod
    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor: ...

    @abstractmethod
    def drop_rows(self, over: Tensor) -> Tensor:
        """Drop the rows where ``over`` (n,); return the old index of every remaining row, in the new order."""


class ModuleStep(DecodingStep):
    """The step of any model, through its own forward pass: each row has a copy of its prompt's keys and values."""

    def __init__(self, model: PreTrainedModel, prompts: Prompts, room: int) -> None:
        self._model, parents = model, prompts.parents
        self._layers = [CacheLayer(keys[parents], values[parents], room) for keys, values in prompts.states]
        self._cache = Cache(layers=[*self._layers])
        mask = prompts.mask[parents]
        self._mask = None if mask.all() else torch.cat([mask, mask.new_ones(len(mask), room)], dim=1)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=None if self._mask is None else self._mask[:, : self._layers[0].length + 1],
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def drop_rows(self, over: Tensor) -> Tensor:
        rows = drop_rows(self._layers, over)
        if self._mask is not None:
            self._mask = self._mask[rows]
        return rows


class CacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Copies of keys and values (B, heads, length, size) of one layer with ``room`` for more; live rows come first.

    Values may have another number of heads, and another size, than keys.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, _, self.length, _ = keys.shape
        self.keys, self.values = _add_room(keys, room), _add_room(values, room)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[2]
        keys, values = self.keys[: self.rows, :, :end], self.values[: self.rows, :, :end]
        keys[:, :, self.length :] = key_states
        values[:, :, self.length :] = value_states
        self.length = end
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the layer is created with its tensors")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


def attends_fully(model: PreTrainedModel) -> bool:
    """Whether every layer attends to all earlier tokens, with torch's ``scaled_dot_product_attention``."""
    config: Any = model.config
    layer_types = config.to_dict().get("layer_types") or ()
    # private: transformers 5.19 has a public function to set the attention, but none to read it
    is_sdpa: bool = config._attn_implementation == "sdpa"
    return is_sdpa and all(kind == "full_attention" for kind in layer_types)


def _add_room(states: Tensor, room: int) -> Tensor:
    rows, heads, length, size = states.shape
    roomy = states.new_empty(rows, heads, length + room, size)
    roomy[:, :, :length] = states
    return roomy


def drop_rows(layers: Sequence[CacheLayer], over: Tensor) -> Tensor:
    """Drop rows of the layers as in :meth:`DecodingStep.drop_rows`: the last ones move into the holes."""
    keep = (~over).nonzero().squeeze(-1)
    count = len(keep)
    holes = over[:count].nonzero().squeeze(-1)
    movers = keep[keep >= count]
    rows = torch.arange(count, device=over.device)
    rows[holes] = movers
    for layer in layers:
        for states in (layer.keys, layer.values):
            states[holes, :, : layer.length] = states[movers, :, : layer.length]
        layer.rows = count
    return rows
