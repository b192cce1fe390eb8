"""Collating ragged samples into tensors: each row is one prompt followed by its completions.

Siblings answer the same prompt, so a row holds the prompt once and its completions one after another. Each completion
attends to the prompt and to itself (segments) and starts at the position after the prompt (position ids), as if it had
a row of its own. The loss sees only the positions that predict a sampled token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from magrpo.algo.loss import SampledTokens
from magrpo.types import Sample
from magrpo_kernels import Support

Row = tuple[int, ...]
"""Indices of samples with the same prompt, packed behind it."""

ROW_TOKENS = 4096
"""Longest row of several completions, in tokens: the cost of attention grows with the square of the length."""

MASK_ALIGNMENT = 8
"""Elements between the rows of a mask are a multiple of this number, as the kernels of a GPU need."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: ``R`` rows of ``L`` input tokens, and the ``N`` sampled tokens that they predict."""

    samples: tuple[int, ...]
    """Indices of the samples, in the order of ``tokens``."""
    input_ids: Int[Tensor, "R L"]
    position_ids: Int[Tensor, "R L"] | None
    """Position of each token; None: counted from the left end."""
    segments: Int[Tensor, "R L"] | None
    """0: the prompt; 1, 2, ...: the completions of the row; -1: padding. None: a row holds one completion, and every
    token attends to everything on its left."""
    predictors: Int[Tensor, " N"]
    """Flat index (row * L + column) of the position whose hidden state predicts the token."""
    tokens: SampledTokens


def make_probe_sample(prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Sample:
    """A sample that a model is only probed with: everything besides its tokens is 0."""
    return Sample(
        prompt_ids,
        completion_ids,
        sampling_logps=(0.0,) * len(completion_ids),
        returns=0.0,
        advantage=0.0,
        group=0,
        policy_version=0,
    )


def plan_batches(samples: Sequence[Sample], micro_batch_tokens: int, share_prompts: bool) -> list[list[Row]]:
    """Split samples into micro-batches of rows of similar length, at most ``micro_batch_tokens`` padded tokens each.

    A longer row is a micro-batch of its own. The longest rows come first, so that memory runs out at once or never.
    """
    row_limit = min(ROW_TOKENS, micro_batch_tokens) if share_prompts else 0
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt_ids, []).append(index)
    rows: list[tuple[int, Row]] = []  # length and members
    for prompt_ids, members in by_prompt.items():
        length = len(prompt_ids)
        packed: list[int] = []
        for index in members:
            extra = len(samples[index].completion_ids) - 1
            if packed and length + extra > row_limit:
                rows.append((length, tuple(packed)))
                length, packed = len(prompt_ids), []
            length += extra
            packed.append(index)
        rows.append((length, tuple(packed)))
    rows.sort(key=lambda entry: -entry[0])
    batches: list[list[Row]] = []
    width = 0
    for length, row in rows:
        if not batches or (len(batches[-1]) + 1) * width > micro_batch_tokens:
            batches.append([])
            width = length
        batches[-1].append(row)
    return batches


def count_padded(samples: Sequence[Sample], rows: Sequence[Row]) -> int:
    """The number of input tokens of a micro-batch, padding included."""
    lengths = (len(samples[row[0]].prompt_ids) + sum(len(samples[i].completion_ids) - 1 for i in row) for row in rows)
    return len(rows) * max(lengths)


@dataclass(slots=True)
class _PackedRow:
    """The inputs of a row: its prompt, and one after the other its completions without their last tokens."""

    token_ids: list[int]
    positions: list[int]
    segments: list[int]
    predictors: list[int]
    """The column of the input that predicts each token of the completions."""


def _pack_row(samples: Sequence[Sample]) -> _PackedRow:
    prompt_ids = samples[0].prompt_ids
    assert prompt_ids, "a completion needs a token to follow"
    start = len(prompt_ids)
    row = _PackedRow(list(prompt_ids), list(range(start)), [0] * start, [])
    for number, sample in enumerate(samples, start=1):
        assert sample.completion_ids, "a completion has at least one token"
        assert sample.prompt_ids == prompt_ids, "a row has one prompt"
        # The last token of a completion predicts nothing, so it is not an input.
        inputs, end = sample.completion_ids[:-1], len(row.token_ids)
        row.predictors += [start - 1, *range(end, end + len(inputs))]
        row.token_ids += inputs
        row.positions += range(start, start + len(inputs))
        row.segments += [number] * len(inputs)
    return row


def collate(samples: Sequence[Sample], rows: Sequence[Row], device: torch.device | None = None) -> Batch:
    """Make the tensors of one micro-batch."""
    packed_rows = [_pack_row([samples[index] for index in row]) for row in rows]
    tensor = partial(torch.tensor, device=device)
    width = max(len(row.token_ids) for row in packed_rows)

    def pad(values: Iterable[Sequence[int]], filler: int) -> Int[Tensor, "R L"]:
        return tensor([[*row_values, *[filler] * (width - len(row_values))] for row_values in values])

    order = tuple(index for row in rows for index in row)
    chosen = [samples[index] for index in order]
    packed = any(len(row) > 1 for row in rows)
    return Batch(
        samples=order,
        input_ids=pad((row.token_ids for row in packed_rows), 0),
        position_ids=pad((row.positions for row in packed_rows), 0) if packed else None,
        segments=pad((row.segments for row in packed_rows), -1) if packed else None,
        predictors=tensor([r * width + column for r, row in enumerate(packed_rows) for column in row.predictors]),
        tokens=SampledTokens(
            token_ids=tensor([token for sample in chosen for token in sample.completion_ids]),
            advantages=tensor([sample.advantage for sample in chosen for _ in sample.completion_ids]),
            sampling_logps=tensor([logp for sample in chosen for logp in sample.sampling_logps]),
            sample_weights=tensor([sample.weight for sample in chosen for _ in sample.completion_ids]),
            support=_collate_support(chosen, device),
        ),
    )


def _collate_support(samples: Sequence[Sample], device: torch.device | None) -> Support | None:
    rows = [ids for sample in samples for ids in sample.support]
    if not rows:
        return None
    assert len(rows) == sum(len(sample.completion_ids) for sample in samples), "all tokens have a support, or none"
    bounds = torch.tensor([0, *map(len, rows)], device=device).cumsum(0)
    return Support(torch.tensor([i for ids in rows for i in ids], dtype=torch.int32, device=device), bounds)


def find_attended(segments: Int[Tensor, "R L"]) -> Bool[Tensor, "R L L"]:
    """Whether a query attends to a key, [query, key]: to the prompt and its own completion, on its left.

    Padding attends to padding: an empty row of attention would be NaN.
    """
    length = segments.shape[1]
    left = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    query, key = segments[:, :, None], segments[:, None, :]  # (R, L, 1), (R, 1, L)
    return left & ((key == 0) | (key == query))


def make_attention_mask(segments: Int[Tensor, "R L"], dtype: torch.dtype) -> Float[Tensor, "R 1 L L"]:
    """The mask that attention in ``dtype`` adds to its scores: 0 where a query attends to a key, else -inf.

    Attention turns a Boolean mask, or one with unaligned rows on a GPU, into such a mask in every layer, and keeps
    every copy until the backward pass.
    """
    num_rows, length = segments.shape
    aligned = -(-length // MASK_ALIGNMENT) * MASK_ALIGNMENT
    mask = torch.zeros(num_rows, 1, length, aligned, dtype=dtype, device=segments.device)[..., :length]
    return mask.masked_fill_(~find_attended(segments)[:, None], -torch.inf)
