"""A run whose reward judges texts: nothing in it speaks of programs or tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from magrpo.run.store import RunStore
from pipelines.cli import main

CONFIG = str(Path(__file__).parents[2] / "pipelines" / "configs" / "writing_embedded.toml")
SHORT = (
    "train.num_iterations=1",
    "rollout.problems_per_iteration=2",
    "rollout.group_size=2",
    "eval.max_problems=2",
    "eval.num_samples=1",
    "penalty.copied=0.5",
)
CODE = re.compile(r"pass@|isolation|tests|syntax|cooperation")


def test_authors_train_and_are_set_beside_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(tmp_path), "--local"]
    assert main(["train", CONFIG, *SHORT, "--name", "mine", *root]) == 0
    said = capsys.readouterr().out
    assert "length ratio" in said
    assert re.search(r"^ +penalty +-\d", said, re.MULTILINE)
    assert "programs run" not in said
    assert not CODE.search(said)

    assert main(["evaluate", "mine", "--baselines", "single,sequential,discussion,swap,voting", *root]) == 0
    said = capsys.readouterr().out
    for number, row in enumerate(("naive", "discussion", "swap"), start=1):
        assert f"\nrow {number} of 3, {row}: return " in said
    for row in ("single", "sequential", "voting"):
        assert f"skipped: {row}: it needs the reward coding or solo or team, not writing\n" in said
    assert not CODE.search(said)
    for store in (RunStore.open(tmp_path, name) for name in ("mine", "mine-baselines")):
        pages = list(store.path.glob("stages/*/report/*.html"))
        assert pages
        for page in pages:
            assert "pass@" not in page.read_text()
            assert "penalty" in page.read_text()


def test_a_plan_needs_no_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", CONFIG, f"root={tmp_path}", "--dry-run"]) == 0
    assert "sandbox  not needed: 96 joint actions per iteration are scored as texts\n" in capsys.readouterr().out
