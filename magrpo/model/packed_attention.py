"""Attention over rows that hold a prompt and several completions, on a CPU.

A row of a prompt of P tokens and G completions of C has ``(P + G C)^2`` pairs of a query and a key, and the mask of
:mod:`magrpo.model.collate` discards most of them, because completions do not see each other. Here each part of a row is
computed by itself, the prompt with P keys and each completion with ``P + C``, which leaves ``P^2 + G C (P + C)`` pairs.
That takes more calls, so it pays for long rows of large models only.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

WORTHWHILE = 5_000_000
"""Pairs that a completion saves on average, times the hidden size, from which on it pays: between the rows of the
embedded model (2 million), whose update took 1.4 times as long by parts, and SmolLM2's (21 million), 0.9 times."""


@dataclass(frozen=True)
class Packing:
    """How the rows of a micro-batch are packed."""

    parts: tuple[tuple[int, ...], ...]
    """For each row, the numbers of tokens of its prompt, of each completion, and of its padding if it has any. Padding
    is computed like a completion, and nothing reads the result."""
    whole_mask: Float[Tensor, "R 1 L L"]
    """The mask over all pairs. A layer that is given another one, such as those of Doge make, hides more than that."""
    _masks: dict[tuple[int, int, int, torch.dtype], Tensor] = field(default_factory=dict)

    def is_worthwhile(self, hidden_size: int) -> bool:
        """Whether a model of this width attends faster by parts than with a mask over all pairs."""
        calls = saved = 0
        for prompt, *others in self.parts:
            calls += len(others)
            seen = prompt**2 + sum(length * (prompt + length) for length in others)
            saved += (prompt + sum(others)) ** 2 - seen
        return saved * hidden_size >= calls * WORTHWHILE

    def make_mask(
        self, prompt: int, completion: int, repeats: int, dtype: torch.dtype
    ) -> Float[Tensor, "queries keys"]:
        """The mask that lets a completion see its prompt, and itself up to each query. All layers share it.

        The queries of the completion come ``repeats`` times, one copy after the other.
        """
        key = prompt, completion, repeats, dtype
        if key not in self._masks:
            later = torch.full((completion, prompt + completion), -torch.inf, dtype=dtype).triu_(prompt + 1)
            self._masks[key] = later.repeat(repeats, 1)
        return self._masks[key]


def find_packing(segments: Int[Tensor, "R L"], whole_mask: Float[Tensor, "R 1 L L"]) -> Packing:
    """The packing of rows with these segments (see :class:`magrpo.model.collate.Batch`) and the mask made of them."""
    counts = (row.unique_consecutive(return_counts=True)[1].tolist() for row in segments)
    return Packing(tuple(map(tuple, counts)), whole_mask)


def attend_packed(
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

    Rows are packed for models in eval mode only, so that a ``packing`` comes without dropout. Layers with a mask of
    their own, or with a bias for each pair of positions, compute all pairs.
    """
    if packing is None or attention_mask is not packing.whole_mask or options.get("position_bias") is not None:
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
    mask = packing.make_mask(num_keys - length, length, repeats, queries.dtype)
    grouped = queries.reshape(1, num_groups, repeats * length, size)
    output = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return output.reshape(1, num_heads, length, -1).transpose(1, 2)


# Models look the function up by the name of their attention, and hand it what else their forward pass is given. Under a
# name of our own, models that ask whether their attention is "sdpa" would compute something else.
AttentionInterface.register("sdpa", attend_packed)
