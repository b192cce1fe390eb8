"""Attention over rows that hold a prompt and several completions, on a CPU.

A row of a prompt of P tokens and G completions of C has ``(P + G C)^2`` pairs of a query and a key, and the mask of
:mod:`magrpo.model.collate` discards most of them, because completions do not see each other. Here each part of a row is
computed by itself, the prompt with P keys and each completion with ``P + C``, which leaves ``P^2 + G C (P + C)`` pairs.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


@dataclass(frozen=True)
class Packing:
    """How the rows of a micro-batch are packed."""

    parts: tuple[tuple[int, ...], ...]
    """For each row, the numbers of tokens of its prompt, of each completion, and of its padding if it has any. Padding
    is computed like a completion, and nothing reads the result."""
    _masks: dict[tuple[int, int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, prompt: int, completion: int, repeats: int, dtype: torch.dtype) -> Float[Tensor, "queries keys"]:
        """The mask that lets a completion see its prompt, and itself up to each query. All layers share it.

        The queries of the completion come ``repeats`` times, one copy after the other.
        """
        key = prompt, completion, repeats, dtype
        if key not in self._masks:
            later = torch.full((completion, prompt + completion), -torch.inf, dtype=dtype).triu_(prompt + 1)
            self._masks[key] = later.repeat(repeats, 1)
        return self._masks[key]


def find_packing(segments: Int[Tensor, "R L"]) -> Packing:
    """The packing of rows with these segments (see :class:`magrpo.model.collate.Batch`)."""
    counts = (row.unique_consecutive(return_counts=True)[1].tolist() for row in segments)
    return Packing(tuple(map(tuple, counts)))


def attend(
    module: nn.Module,
    query: Float[Tensor, "R heads L size"],
    key: Float[Tensor, "R groups L size"],
    value: Float[Tensor, "R groups L width"],
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "R L heads width"], None]:
    """Attention as transformers' ``sdpa``; with a ``packing``, without the pairs that the mask discards.

    Rows are packed for models in eval mode only, so that a ``packing`` comes without dropout.
    """
    if packing is None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return attended
    rows = []
    for row, parts in enumerate(packing.parts):
        queries, keys, values = (torch.split(states[row : row + 1], [*parts], 2) for states in (query, key, value))
        prompt, _ = sdpa_attention_forward(module, queries[0], keys[0], values[0], None, **options)
        outputs = [prompt]
        for own_queries, own_keys, own_values in zip(queries[1:], keys[1:], values[1:], strict=True):
            seen_keys, seen_values = torch.cat([keys[0], own_keys], 2), torch.cat([values[0], own_values], 2)
            outputs.append(_attend_completion(own_queries, seen_keys, seen_values, packing, options.get("scaling")))
        rows.append(torch.cat(outputs, 1))
    return torch.cat(rows), None


def _attend_completion(
    queries: Float[Tensor, "1 heads C size"],
    keys: Float[Tensor, "1 groups PC size"],
    values: Float[Tensor, "1 groups PC width"],
    packing: Packing,
    scaling: float | None,
) -> Float[Tensor, "1 C heads width"]:
    """The queries of the heads of a group follow one another, so that their keys and values need no copy for each."""
    _, num_heads, length, size = queries.shape
    num_groups, num_keys = keys.shape[1:3]
    repeats = num_heads // num_groups
    mask = packing.mask(num_keys - length, length, repeats, queries.dtype)
    grouped = queries.reshape(1, num_groups, repeats * length, size)
    output = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return output.reshape(1, num_heads, length, -1).transpose(1, 2)


# Models look the function up by the name of their attention, and hand it what else their forward pass is given. Under a
# name of our own, models that ask whether their attention is "sdpa" would compute something else.
AttentionInterface.register("sdpa", attend)
