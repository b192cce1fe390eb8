"""The kernels' benchmark on tiny shapes: it compares like with like, and says what it left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magrpo_kernels import bench


def test_it_measures_ours_against_the_floor_and_eager(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = bench.list_implementations

    def list_some(case: bench.Case) -> dict[str, bench.Loss]:
        chosen = listed(case) | {"wrong": lambda case: 2 * bench.eager_loss(case)}
        del chosen["torch.compile"]  # which takes long
        return chosen

    monkeypatch.setattr(bench, "list_implementations", list_some)
    file = tmp_path / "report.json"
    shape = ["--device", "cpu", "--dtype", "float32", "--tokens", "16", "--hidden", "8", "--vocabulary", "40"]
    assert bench.main([*shape, "--sequences", "8", "--rounds", "3", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    for title in ("trained head", "frozen head", "trained head, half the groups degenerate"):
        rows = {row["name"]: row for row in report[title]}
        for name in (bench.FLOOR, f"{bench.OURS} torch", "eager torch"):
            assert len(rows[name]["both_s"]) == 3, rows[name]
        assert "wrong gradient" in rows["wrong"]["skipped"]
        assert len(rows["torch linear_cross_entropy"]["both_s"]) == 3
        assert rows["Liger fused linear GRPO"]["skipped"] or rows["Liger fused linear GRPO"]["both_s"]
    assert len(report["logits in"][0]["both_s"]) == 3
    printed = capsys.readouterr().out
    for title in ("trained head", "frozen head", "trained head, half the groups degenerate", "logits in"):
        assert f"\n{title} takes" in printed
    assert "GB by calculation" in printed


def test_shapes_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--tokens", "10", "--sequences", "4"])
    assert "--tokens 10 must be a multiple of --sequences 4" in capsys.readouterr().err
