from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magrpo_kernels import group_advantages

RETURNS = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 5.0])
OFFSETS = torch.tensor([0, 3, 5, 5, 6])


@pytest.mark.parametrize(
    ("estimator", "first"),
    [
        ("magrpo", [-2.0, -1.0, 3.0]),
        ("marloo", [-3.0, -1.5, 4.5]),
        ("maremax", [-5.0, -4.0, 0.0]),
        ("mareinforce", [1.0, 2.0, 6.0]),
    ],
)
def test_golden(estimator, first: list[float]) -> None:
    # Then a degenerate group of two, an empty one, and a group of one: exactly 0, but for the one without a baseline.
    rest = [4.0, 4.0, 5.0] if estimator == "mareinforce" else [0.0, 0.0, 0.0]
    assert group_advantages(RETURNS, OFFSETS, estimator).tolist() == [*first, *rest]


def test_std_normalisation() -> None:
    deviation = (14 / 3) ** 0.5
    expected = [-2 / deviation, -1 / deviation, 3 / deviation, 0.0, 0.0, 0.0]
    assert group_advantages(RETURNS, OFFSETS, normalize="std").tolist() == pytest.approx(expected)


@given(st.lists(st.lists(st.floats(-10, 10), max_size=6), max_size=5), st.floats(-5, 5))
def test_sums_to_zero_and_ignores_a_constant(groups: list[list[float]], constant: float) -> None:
    flat = torch.tensor([value for group in groups for value in group], dtype=torch.float64)
    offsets = torch.tensor([0, *(len(group) for group in groups)]).cumsum(0)
    advantages = group_advantages(flat, offsets)
    for part in advantages.split(offsets.diff().tolist()):
        assert abs(part.sum().item()) < 1e-9
    torch.testing.assert_close(group_advantages(flat + constant, offsets), advantages, atol=1e-9, rtol=0)


def test_nearly_equal_large_returns_are_not_degenerate() -> None:
    returns = torch.tensor([1e6, 1e6 + 0.125])
    assert group_advantages(returns, torch.tensor([0, 2])).tolist() == [-0.0625, 0.0625]


@pytest.mark.parametrize("offsets", [[0, 5], [1, 6], [0, 4, 2, 6], []])
def test_offsets_must_cover_the_returns(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="group_offsets"):
        group_advantages(RETURNS, torch.tensor(offsets, dtype=torch.long))
