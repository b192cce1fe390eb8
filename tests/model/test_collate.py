from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magrpo.model.collate import ROW_TOKENS, collate, find_attended, make_attention_mask, plan_batches
from magrpo.types import Sample


def sample(prompt: tuple[int, ...], completion: tuple[int, ...], advantage: float = 1.0) -> Sample:
    return Sample(prompt, completion, tuple(-float(t) for t in completion), 0.0, advantage, 0, 0)


A, B = (1, 2, 3), (4, 5)
SIBLINGS = [sample(A, (10, 11, 12)), sample(A, (20,)), sample(A, (30, 31)), sample(B, (40, 41))]


def test_rows_hold_siblings_behind_their_prompt() -> None:
    # Lengths: 3 + 2 + 0 + 1 = 6 and 2 + 1 = 3; together 2 * 6 padded tokens.
    assert plan_batches(SIBLINGS, 12, share_prompts=True) == [[(0, 1, 2), (3,)]]
    assert plan_batches(SIBLINGS, 11, share_prompts=True) == [[(0, 1, 2)], [(3,)]]


def test_a_row_is_split_where_the_next_completion_does_not_fit() -> None:
    assert plan_batches(SIBLINGS, 5, share_prompts=True) == [[(0, 1)], [(2,)], [(3,)]]


def test_without_sharing_every_completion_has_its_row_longest_first() -> None:
    assert plan_batches(SIBLINGS, 5, share_prompts=False) == [[(0,)], [(2,)], [(1,)], [(3,)]]
    assert plan_batches(SIBLINGS, 10, share_prompts=False) == [[(0,), (2,)], [(1,), (3,)]]


def test_a_completion_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    long = sample(A, tuple(range(50)))
    assert plan_batches([long, sample(A, (1,))], 8, share_prompts=True) == [[(0,)], [(1,)]]


def test_rows_are_bounded_whatever_the_budget() -> None:
    many = [sample((1,), (7,) * 1001) for _ in range(9)]
    rows = [row for batch in plan_batches(many, 10**6, share_prompts=True) for row in batch]
    assert [len(row) for row in rows] == [4, 4, 1]
    assert ROW_TOKENS >= 1 + 4 * 1000


def test_supports_lie_one_after_another_in_the_order_of_the_tokens() -> None:
    supports = [((1, 10), (11,), (3, 4, 12)), ((20,),), ((30, 99), (31,)), ((0, 40), (41,))]
    kept = [replace(one, support=ids) for one, ids in zip(SIBLINGS, supports, strict=True)]
    batch = collate(kept, [(1, 0), (3,)])
    assert batch.tokens.token_ids.tolist() == [20, 10, 11, 12, 40, 41]
    assert batch.tokens.support is not None
    assert batch.tokens.support.ids.tolist() == [20, 1, 10, 11, 3, 4, 12, 0, 40, 41]
    assert batch.tokens.support.bounds.tolist() == [0, 1, 3, 4, 7, 9, 10]
    assert collate(SIBLINGS, [(1, 0), (3,)]).tokens.support is None
    elsewhere = collate(kept, [(1, 0), (3,)], torch.device("meta"))
    assert elsewhere.tokens.support is not None
    assert elsewhere.tokens.support.ids.is_meta
    assert elsewhere.segments is not None
    assert elsewhere.segments.is_meta


def test_tensors_by_hand() -> None:
    batch = collate(SIBLINGS, [(0, 1, 2), (3,)])
    assert batch.input_ids.tolist() == [[1, 2, 3, 10, 11, 30], [4, 5, 40, 0, 0, 0]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 2, 0, 0, 0]]
    # Each completion's first token is predicted by the last prompt token, the others by the one before them.
    assert batch.predictors.tolist() == [2, 3, 4, 2, 2, 5, 7, 8]
    assert batch.tokens.token_ids.tolist() == [10, 11, 12, 20, 30, 31, 40, 41]
    assert batch.tokens.sampling_logps.tolist() == [-10.0, -11.0, -12.0, -20.0, -30.0, -31.0, -40.0, -41.0]
    assert batch.samples == (0, 1, 2, 3)
    assert batch.segments is not None
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 3], [0, 0, 1, -1, -1, -1]]
    attended = find_attended(batch.segments)
    assert attended.shape == (2, 6, 6)
    assert attended[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],  # of another completion: it does not see 10 and 11
    ]
    assert attended.any(dim=-1).all()  # padding too: an empty row of attention would be NaN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_is_what_attention_adds_with_rows_that_a_gpu_can_read(dtype: torch.dtype) -> None:
    segments = collate(SIBLINGS, [(0, 1, 2), (3,)]).segments
    assert segments is not None
    mask = make_attention_mask(segments, dtype)
    assert mask.dtype is dtype
    assert mask.shape == (2, 1, 6, 6)
    assert mask.exp().bool().equal(find_attended(segments)[:, None])
    assert mask.unique().tolist() == [-torch.inf, 0]
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1])


def test_single_completions_need_no_mask() -> None:
    batch = collate(SIBLINGS, [(0,), (3,)])
    assert batch.segments is None
    assert batch.position_ids is None
    assert batch.input_ids.tolist() == [[1, 2, 3, 10, 11], [4, 5, 40, 0, 0]]
    assert batch.predictors.tolist() == [2, 3, 4, 6, 7]


samples = st.lists(
    st.builds(
        sample,
        st.sampled_from([A, B, (9,)]),
        st.lists(st.integers(1, 50), min_size=1, max_size=6).map(tuple),
        st.floats(-2, 2, width=32),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(samples, st.integers(1, 60), st.booleans(), st.randoms(use_true_random=False))
def test_any_plan_covers_every_token_once_with_its_own_context(
    members: list[Sample], budget: int, share: bool, rng: random.Random
) -> None:
    rng.shuffle(members)
    batches = plan_batches(members, budget, share)
    assert sorted(i for rows in batches for row in rows for i in row) == list(range(len(members)))
    for rows in batches:
        batch = collate(members, rows)
        attended = None if batch.segments is None else find_attended(batch.segments)
        assert batch.input_ids.numel() <= budget or len(rows) == 1
        seen = 0
        for index in batch.samples:
            member = members[index]
            for step, token in enumerate(member.completion_ids):
                row, column = divmod(int(batch.predictors[seen]), batch.input_ids.shape[1])
                assert _context(batch.input_ids[row], None if attended is None else attended[row, column], column) == [
                    *member.prompt_ids,
                    *member.completion_ids[:step],
                ]
                assert batch.tokens.token_ids[seen] == token
                assert batch.tokens.advantages[seen] == member.advantage
                seen += 1
        assert seen == len(batch.tokens.token_ids)


def _context(row_ids: torch.Tensor, attended: torch.Tensor | None, column: int) -> list[int]:
    if attended is None:
        return row_ids[: column + 1].tolist()
    return row_ids[attended].tolist()
