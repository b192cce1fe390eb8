"""Going on from a named stage: what is done again, what it gives, and what a wrong name is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from magrpo.config.run import load_config
from magrpo.errors import ConfigError
from magrpo.run.rewind import steps_to_repeat
from magrpo.run.store import RunStore
from magrpo.training.recorder import describe_run
from pipelines.cli import main
from tests.pipelines.micro import write_config
from tests.training.test_resume import Runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With a finished run, ``whole``."""
    runs = Runs(tmp_path_factory.mktemp("order"))
    assert main(runs.arguments("whole")) == 0
    return runs


def names(runs: Runs, stage: str) -> list[str]:
    store = RunStore.open(runs.root, "whole")
    return [str(step) for step in steps_to_repeat(store, store.config(), stage)]


def test_what_is_done_again(runs: Runs) -> None:
    last = ["rollout.0:2", "score.0:2", "credit:2", "update:2", "evaluate:2", "report"]
    assert names(runs, "report") == ["report"]
    assert names(runs, "evaluate") == ["evaluate:2", "report"]
    assert names(runs, "evaluate:0") == [
        *("evaluate:0", "rollout.0:1", "score.0:1", "credit:1", "update:1"),
        *last,
    ]
    # The optimizer's state after iteration 1 is deleted, so iteration 1's update comes first.
    assert names(runs, "update:2") == ["update:1", "update:2", "evaluate:2", "report"]
    assert names(runs, "rollout") == ["update:1", *last]
    assert names(runs, "rollout:1") == ["rollout.0:1", "score.0:1", "credit:1", "update:1", *last]
    assert names(runs, "prepare")[:3] == ["prepare", "start", "evaluate:0"]


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ("updat", "no stage 'updat'; did you mean 'update'"),
        ("update:3", "no iteration '3' of update so far; possible: 1-2"),
        ("evaluate:1", "no iteration '1' of evaluate so far; possible: 0, 2"),
        ("update:x", "no iteration 'x' of update"),
    ],
)
def test_a_wrong_name_is_told_the_right_ones(runs: Runs, stage: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        names(runs, stage)
    assert "\n" not in str(told.value)


def test_a_stage_that_is_still_to_come(runs: Runs, tmp_path: Path) -> None:
    path, *given = runs.config
    config = load_config(path, [*given, f"root={tmp_path}"])
    store = RunStore.create(config, "fresh")
    with pytest.raises(ConfigError, match="has only reached prepare"):
        steps_to_repeat(store, config, "update")
    assert steps_to_repeat(store, config, "prepare") == []


def test_a_run_whose_evaluations_were_set_aside_has_no_verdict(tmp_path: Path) -> None:
    store = RunStore.create(load_config(write_config(tmp_path)), "again")
    assert not {"verdict", "gain"} & set(describe_run(store, "RUNNING"))
    (store.path / "set-aside" / "1" / "00000").mkdir(parents=True)
    tags = describe_run(store, "RUNNING")
    assert (tags["verdict"], tags["gain"]) == ("-", "-"), "instead of those that MLflow has"


@pytest.mark.parametrize(
    "stage", ["update:2", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("rollout.0:1", "evaluate:0"))]
)
def test_going_on_from_a_stage_ends_where_the_run_had_ended(
    runs: Runs, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = runs.outcome("whole"), runs.tracked("whole")
    aside = runs.root / "whole" / "set-aside"
    moved = names(runs, stage)
    earlier = set(aside.iterdir()) if aside.exists() else set()
    assert main(["resume", "whole", "--root", str(runs.root), "--from-stage", stage, "--local"]) == 0
    said = capsys.readouterr().out
    [folder] = set(aside.iterdir()) - earlier
    assert len(list(folder.glob("*/*/_SUCCESS"))) == len(moved)
    assert (runs.outcome("whole"), runs.tracked("whole")) == before
    tags = runs.mlflow_run("whole").data.tags
    assert "where a step has two values, the later one counts" in tags["mlflow.note.content"]
    done_again = int(moved[0].partition(":")[2] or 0)
    assert int(tags["magrpo.rewound"].split()[2]) <= done_again
    assert f"{len(moved)} committed stages, from {moved[0]} on, set aside in" in said
