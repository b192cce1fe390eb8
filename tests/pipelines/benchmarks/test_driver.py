"""The benchmark measures every part it promises; what it measures is not asserted."""

from __future__ import annotations

import pytest

from pipelines.benchmarks import driver


def test_every_part_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.bench_driver(completions=64, tokens=96) == 0
    shown = capsys.readouterr().out
    parts = ("rollout, the rest", "answers decoded", "actions made", "score", "credit", "samples read by the update")
    assert [part for part in (*parts, "all", "the reward's own work") if part not in shown] == []
