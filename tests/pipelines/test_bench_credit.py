from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from magrpo.types import Action, JointReward, Problem, RolloutGroup, ScoredTurn
from pipelines.bench_credit import aligned, noise, variance_ratio
from pipelines.cli import main
from tests.pipelines.micro import write_config


def test_noise_by_hand() -> None:
    # Mean (2, 0); squared distances 1 and 1, so the variance is 2; the squared length 4 less 2 / 2 is 3.
    assert noise(np.array([[1.0, 0.0], [3.0, 0.0]])) == pytest.approx(2 / 3)
    assert noise(np.array([[1.0], [-1.0]])) == float("inf")


def test_noise_is_that_of_the_distribution() -> None:
    rows = np.random.default_rng(0).normal(1.0, 2.0, size=(2000, 10))  # variance 40, squared length 10
    assert noise(rows) == pytest.approx(4.0, rel=0.05)


def test_the_ratio_of_variances() -> None:
    rows = np.random.default_rng(0).normal(size=(64, 5))
    ratio = variance_ratio(0.5 * rows + 3.0, rows)
    assert (ratio.low, ratio.mean, ratio.high) == pytest.approx((0.25, 0.25, 0.25))
    other = variance_ratio(np.random.default_rng(1).normal(size=(64, 5)), rows)
    assert other.low < 1.0 < other.high


def test_aligned_keeps_the_pairs_of_equal_index() -> None:
    actions = {name: tuple(Action(name, "", (), (), "stop", 0) for _ in range(2)) for name in ("a", "b")}
    turns = tuple(ScoredTurn({"a": i, "b": j}, JointReward(0.0, {}), {}) for i in range(2) for j in range(2))
    group = RolloutGroup(Problem("t", ""), (), (), {}, actions, turns)
    assert [turn.picks for turn in aligned(group).turns] == [{"a": 0, "b": 0}, {"a": 1, "b": 1}]


def test_it_compares_the_same_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path))
    assert main(["bench", "credit", config, "--batches", "2"]) == 0
    said = capsys.readouterr().out
    rows = {
        line.split()[0]: line.split() for line in said.splitlines() if line.strip().startswith(("aligned", "cross"))
    }
    assert (rows["aligned"][1], rows["crossed"][1]) == ("16", "64")  # 2 batches, 2 problems, 4 or 4 x 4
    assert said.count("times that of aligned credit") == 2
    assert not (tmp_path / "runs").exists(), "it leaves nothing"
    assert main(["bench", "credit", config, "env.num_turns=2"]) == 2
    assert "num_turns = 1" in capsys.readouterr().err
