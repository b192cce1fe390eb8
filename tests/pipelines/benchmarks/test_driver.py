"""The benchmark measures every part it promises; what it measures is not asserted."""

from __future__ import annotations

import pytest

from pipelines.benchmarks import driver


def test_every_part_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_ITERATIONS", 1)
    assert driver.bench_driver(completions=32, tokens=96) == 0
    shown = capsys.readouterr().out
    parts = (
        "requesting answers over HTTP",
        "score: ",
        "credit: ",
        "all",
        "reading samples for the update",
        "helper processes",
    )
    assert [part for part in parts if part not in shown] == []
