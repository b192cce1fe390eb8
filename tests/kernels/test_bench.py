"""The kernels' benchmark on tiny shapes: it compares like with like, and says what it left out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch

from magrpo_kernels import bench
from tests.fakes import FakeGpu

SMALL = ["--device", "cpu", "--dtype", "float32", "--tokens", "8", "--hidden", "4", "--vocabulary", "9"]


def make_case(*, frozen: bool = False) -> bench.BenchmarkCase:
    return bench.make_case("trained head", bench.make_parser().parse_args([*SMALL, "--sequences", "8"]), frozen=frozen)


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float]) -> None:
    """Let the benchmark read these times from its clock, one after another."""
    ticks = iter(seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))


def test_it_measures_ours_against_the_floor_and_eager(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SLOW_S", math.inf)  # on a busy machine the first call of a library takes long
    file = tmp_path / "report.json"
    shape = ["--device", "cpu", "--dtype", "float32", "--tokens", "16", "--hidden", "8", "--vocabulary", "40"]
    assert bench.main([*shape, "--sequences", "8", "--rounds", "3", "--no-compile", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    for title in ("trained head", "frozen head"):
        rows = {row["name"]: row for row in report[title]["rows"]}
        for name in (bench.FLOOR, f"{bench.OURS} torch", "eager torch"):
            assert len(rows[name]["both_s"]) == 3, rows[name]
        assert bench.COMPILED not in rows
        own = rows["torch linear_cross_entropy"]
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # since torch 2.13
            assert len(own["both_s"]) == 3
        else:
            assert "LinearCrossEntropyOptions" in own["skipped"]
        assert rows["Liger fused linear GRPO"]["skipped"] or rows["Liger fused linear GRPO"]["both_s"]
    assert len(report["logits in"]["rows"][0]["both_s"]) == 3
    assert report["ratios"].keys() == {*bench.TITLES, bench.LOOP}
    assert report["ratios"]["trained head"][1] == 1.1
    printed = capsys.readouterr().out
    for title in bench.TITLES:
        assert f"\n{title} takes" in printed


@pytest.mark.parametrize("frozen", [False, True])
def test_an_implementation_with_another_gradient_is_not_timed(frozen: bool) -> None:
    losses: dict[str, bench.Loss] = {
        "right": bench.eager_loss,
        "wrong": lambda case: 2 * bench.eager_loss(case),
    }
    right, wrong = bench.measure_case(make_case(frozen=frozen), losses, rounds=3)
    assert (len(right.both_s), len(wrong.both_s)) == (3, 0)
    assert "wrong gradient" in wrong.skipped


def test_an_implementation_that_takes_long_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {bench.FLOOR: bench.matrix_products, "slow": bench.eager_loss}
    set_clock(monkeypatch, range(0, 10_000, 100))
    assert [len(row.both_s) for row in bench.measure_case(make_case(), losses, rounds=4)] == [1, 1]


def test_compiling_is_not_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {bench.FLOOR: bench.matrix_products, bench.COMPILED: bench.eager_loss}
    set_clock(monkeypatch, chain([0.0] * 4, repeat(100.0)))  # the first call of the second takes 100 s
    assert [row.both_s for row in bench.measure_case(make_case(), losses, rounds=2)] == [[0.0, 0.0], [0.0, 0.0]]


def test_the_expected_gradient_is_that_of_all_tokens_at_once() -> None:
    shape = ["--device", "cpu", "--dtype", "float32", "--tokens", "2048", "--hidden", "4", "--vocabulary", "9"]
    case = bench.make_case("frozen head", bench.make_parser().parse_args(shape), frozen=True)
    assert bench.measure_gradient(case) == pytest.approx(bench.time_once(bench.eager_loss, case)[2], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "10", "--sequences", "4"], "--tokens 10 must be a multiple of --sequences 4"),
        (["--rounds", "0"], "'0' is not a number of 1 or more"),
        (["--device", "cpu", "--json", "no/such/folder.json"], "--json no/such/folder.json: no such folder"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], gpu: FakeGpu) -> None:
    gpu.is_usable = False
    with pytest.raises(SystemExit):
        bench.main(["--device", "cuda"])
    assert "--device cuda: PyTorch sees no CUDA device; use --device cpu" in capsys.readouterr().err
