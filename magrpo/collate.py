"""Ragged samples to tensors: rows of one prompt followed by its completions, without a token of waste where it counts.

Siblings answer the same prompt, so a row holds the prompt once and its completions one after another; each completion
sees the prompt and itself (attention mask) and starts at the position after the prompt (position ids). That is the same
computation as one row for each completion, with the prompt's share of it done once. Only positions that predict a
sampled token are handed to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from magrpo.types import Sample
from magrpo_kernels import Support

Row = tuple[int, ...]
"""Indices of samples with the same prompt, packed behind it."""

ROW_TOKENS = 4096
"""A row of several completions is at most this long: attention costs the square of it."""

_PAD = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: ``R`` rows of ``L`` input tokens, and the ``N`` sampled tokens that they predict."""

    samples: tuple[int, ...]
    """Indices of its samples, in the order of the tokens below."""
    input_ids: Int[Tensor, "R L"]
    position_ids: Int[Tensor, "R L"] | None
    """None: counted from the left."""
    attention: Bool[Tensor, "R 1 L L"] | None
    """Who may look at whom, [query, key]; None: everything to the left."""
    predictors: Int[Tensor, " N"]
    """Flat index (row * L + column) of the position whose hidden state predicts the token."""
    token_ids: Int[Tensor, " N"]
    advantages: Float[Tensor, " N"]
    """Of the token's completion."""
    sample_weights: Float[Tensor, " N"]
    """Of the token's completion."""
    sampling_logps: Float[Tensor, " N"]
    support: Support | None
    """What truncation left to draw the tokens from; None where it was not kept."""

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return Batch(
            self.samples,
            self.input_ids.to(device),
            None if self.position_ids is None else self.position_ids.to(device),
            None if self.attention is None else self.attention.to(device),
            self.predictors.to(device),
            self.token_ids.to(device),
            self.advantages.to(device),
            self.sample_weights.to(device),
            self.sampling_logps.to(device),
            None if self.support is None else Support(*(values.to(device) for values in self.support)),
        )


def plan(samples: Sequence[Sample], micro_batch_tokens: int, share_prompts: bool) -> list[list[Row]]:
    """Split samples into micro-batches of rows of like length, at most ``micro_batch_tokens`` padded tokens each.

    A row longer than that is a micro-batch of its own. The longest come first, so memory that does not suffice shows
    at once.
    """
    row_limit = min(ROW_TOKENS, micro_batch_tokens) if share_prompts else 0
    rows: list[tuple[int, Row]] = []  # length and members
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt_ids, []).append(index)
    for prompt_ids, members in by_prompt.items():
        length, row = len(prompt_ids), list[int]()
        for index in members:
            extra = len(samples[index].completion_ids) - 1
            if row and length + extra > row_limit:
                rows.append((length, tuple(row)))
                length, row = len(prompt_ids), []
            length += extra
            row.append(index)
        rows.append((length, tuple(row)))
    rows.sort(key=lambda entry: -entry[0])
    batches: list[list[Row]] = []
    width = 0
    for length, members_ in rows:
        if not batches or (len(batches[-1]) + 1) * width > micro_batch_tokens:
            batches.append([])
            width = length
        batches[-1].append(members_)
    return batches


def collate(samples: Sequence[Sample], rows: Sequence[Row]) -> Batch:
    """The tensors of one micro-batch. The last token of a completion predicts nothing and is no input."""
    inputs: list[list[int]] = []
    positions: list[list[int]] = []
    segments: list[list[int]] = []  # 0: prompt; 1, 2, ...: completions of the row
    predictors: list[tuple[int, int]] = []  # row, column
    for r, row in enumerate(rows):
        prompt_ids = samples[row[0]].prompt_ids
        assert prompt_ids, "a completion needs a token to follow"
        start = len(prompt_ids)
        inputs.append(list(prompt_ids))
        positions.append(list(range(start)))
        segments.append([0] * start)
        for number, index in enumerate(row, start=1):
            sample = samples[index]
            assert sample.completion_ids, "a completion has at least one token"
            assert sample.prompt_ids == prompt_ids, "a row has one prompt"
            extra = len(sample.completion_ids) - 1
            predictors.append((r, start - 1))
            predictors += [(r, len(inputs[r]) + i) for i in range(extra)]
            inputs[r] += sample.completion_ids[:-1]
            positions[r] += range(start, start + extra)
            segments[r] += [number] * extra
    width = max(len(row_ids) for row_ids in inputs)
    chosen = [samples[index] for row in rows for index in row]
    lengths = torch.tensor([len(sample.completion_ids) for sample in chosen])
    packed = any(len(row) > 1 for row in rows)
    return Batch(
        samples=tuple(index for row in rows for index in row),
        input_ids=_padded(inputs, width, 0),
        position_ids=_padded(positions, width, 0) if packed else None,
        attention=_attention(_padded(segments, width, _PAD)) if packed else None,
        predictors=torch.tensor([r * width + column for r, column in predictors]),
        token_ids=torch.tensor([token for sample in chosen for token in sample.completion_ids]),
        advantages=torch.tensor([sample.advantage for sample in chosen]).repeat_interleave(lengths),
        sample_weights=torch.tensor([sample.weight for sample in chosen]).repeat_interleave(lengths),
        sampling_logps=torch.tensor([logp for sample in chosen for logp in sample.sampling_logps]),
        support=_support(chosen),
    )


def _support(samples: Sequence[Sample]) -> Support | None:
    if not any(sample.support for sample in samples):
        return None
    rows = [ids for sample in samples for ids in sample.support]
    assert len(rows) == sum(len(sample.completion_ids) for sample in samples), "all tokens have a support, or none"
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return Support(torch.tensor([i for ids in rows for i in ids], dtype=torch.int32), bounds)


def _attention(segments: Int[Tensor, "R L"]) -> Bool[Tensor, "R 1 L L"]:
    """A token sees what is to its left, of the prompt and of its own completion. Padding sees itself: no empty row."""
    length = segments.shape[1]
    left = torch.ones(length, length, dtype=torch.bool).tril()
    query, key = segments[:, :, None], segments[:, None, :]  # (R, L, 1), (R, 1, L)
    return (left & ((key == 0) | (key == query)))[:, None]


def _padded(rows: Sequence[Sequence[int]], width: int, value: int) -> Int[Tensor, "R L"]:
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
