"""The benchmark measures every figure it promises; what it measures is not asserted."""

from __future__ import annotations

import shutil

import pytest

from pipelines.benchmarks import sandbox as bench_sandbox


@pytest.mark.slow
def test_every_figure_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("bwrap"):
        pytest.skip("compares with bubblewrap")
    figures = bench_sandbox.measure_sandbox(workers=2, candidates=12, peer_candidates=3, looping=2)
    assert len(figures) == 13
    assert [figure.target for figure in figures if figure.target].count(">= 5") == 4
    [left] = [figure for figure in figures if figure.name == "processes left behind"]
    assert (left.value, left.met) == (0, True)
    assert all(figure.value > 0 for figure in figures if figure is not left)
    monkeypatch.setattr(bench_sandbox, "measure_sandbox", lambda _: figures)
    assert bench_sandbox.bench_sandbox() == 0
    assert figures[0].name in capsys.readouterr().out
