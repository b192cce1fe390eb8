"""Series of training metrics: which stage has the last word on an iteration."""

from __future__ import annotations

from magrpo.reports.series import metric_series


def test_the_last_of_more_than_ten_turns_counts() -> None:
    metrics = [(1, f"rollout.{turn}", {"rollout/lag": float(turn), "time/rollout_s": 1.0}) for turn in range(12)]
    assert metric_series(metrics, "rollout/lag") == [(1, 11.0)]
    assert metric_series(metrics, "time/rollout_s") == [(1, 12.0)]
