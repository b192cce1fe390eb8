"""What share of the maximum a joint reward is, whatever ``scale`` and ``shift`` the training gives it."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from magrpo.rewards.coding import CodingReward


@pytest.mark.parametrize("shift", [0.0, -4.0])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_shift_and_scale_leave_the_share_alone(shift: float, scale: float) -> None:
    reward = CodingReward(scale=scale, shift=shift)
    largest = sum(reward.maxima.values())
    for share in (0.0, 0.75, 1.0):
        assert reward.fraction(scale * share * largest + shift) == pytest.approx(share)


@pytest.mark.parametrize("unusable", [{"scale": -1.0}, {"shift": math.nan}])
def test_a_scale_that_tells_nothing_apart_is_refused(unusable: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        CodingReward(**unusable)


def test_parts_with_equal_sums_give_equal_totals() -> None:
    """Added up one after another, the second would be 0.8999999999999999."""
    reward = CodingReward()
    assert reward.scale_parts({"a": 0.4, "b": 0.5}) == reward.scale_parts({"a": 0.4, "b": 0.5, "c": 0.5, "d": -0.5})
