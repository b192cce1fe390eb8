"""Damage to the files of a run is found when they are read and named; computed again, the run has the bits it had."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from magrpo.errors import ConfigError
from magrpo.export.team import TrainedTeam
from magrpo.run.files import EVALUATION, OPTIMIZER, read_evaluations
from magrpo.run.manifest import MANIFEST
from magrpo.run.rewind import steps_to_repeat
from magrpo.run.store import RunStore
from pipelines.cli import main
from tests.pipelines.micro import resume_locally, write_config
from tests.training.test_resume import Runs

REMEDY = "delete this folder and resume the run, which computes it again"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With the finished run ``whole`` of three iterations, evaluated at 0, 2 and 3."""
    folder = tmp_path_factory.mktemp("damage")
    runs = Runs(folder, [str(write_config(folder, iterations=3))])
    runs.train_unrecorded("whole")
    return runs


@pytest.fixture
def copy(runs: Runs) -> Iterator[RunStore]:
    shutil.copytree(runs.root / "whole", runs.root / "copy")
    yield RunStore.open(runs.root, "copy")
    shutil.rmtree(runs.root / "copy")


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def assert_stops(store: RunStore, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        resume_locally(store)


def digests(store: RunStore) -> dict[str, dict[str, str]]:
    """The digests of the files of every rollout, credit and update, by stage: those that hold no times."""
    names = (str(path.relative_to(store.path / "stages")) for path in store.path.glob("stages/*/*"))
    return {
        name: {file: facts["sha256"] for file, facts in store.manifest_of(name)["files"].items()}
        for name in names
        if name.endswith(("rollout.0", "credit", "update"))
    }


def keep_until(store: RunStore, last: str) -> None:
    """Delete the outputs after ``last``, as if the run had been killed then."""
    for folder in store.path.glob("stages/*/*"):
        if str(folder.relative_to(store.path / "stages")) > last:
            shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("last", "damaged", "file"),
    [
        ("00003/credit", "00003/credit", "main.jsonl.gz"),
        ("00003/credit", "00000/prepare", "train.jsonl.gz"),
        ("00003/credit", "00000/evaluate", EVALUATION),
    ],
)
def test_a_damaged_input_stops_the_resume_and_is_computed_again_once_it_is_deleted(
    runs: Runs, copy: RunStore, last: str, damaged: str, file: str
) -> None:
    keep_until(copy, last)
    folder = copy.stage_folder(damaged)
    path = folder / file
    assert path.exists()
    flip_byte(path)
    assert_stops(copy, f"{folder}: {file} is damaged; {REMEDY}")
    path.unlink()
    assert_stops(copy, f"{folder}: {file} is missing; {REMEDY}")
    shutil.rmtree(folder)
    resume_locally(copy)
    assert digests(copy) == digests(RunStore.open(runs.root, "whole"))


def test_a_damaged_manifest_stops_the_resume_wherever_it_is(runs: Runs, copy: RunStore) -> None:
    folder = copy.stage_folder("00001/score.0")
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:40])
    assert_stops(copy, f"{folder}: {MANIFEST} is damaged; {REMEDY}")
    (folder / MANIFEST).unlink()  # what is left is no output
    resume_locally(copy)
    assert digests(copy) == digests(RunStore.open(runs.root, "whole"))


def test_a_resume_reads_only_what_it_needs(copy: RunStore) -> None:
    for path in copy.path.glob(f"stages/*/update/{OPTIMIZER}"):
        flip_byte(path)
    resume_locally(copy)


def test_a_lost_checkpoint_after_a_pruned_one_takes_from_stage(runs: Runs, copy: RunStore) -> None:
    keep_until(copy, "00002/update")
    folder = copy.stage_folder("00002/update")
    flip_byte(folder / OPTIMIZER)
    assert_stops(copy, f"{folder}: {OPTIMIZER} is damaged; {REMEDY}")
    shutil.rmtree(folder)
    assert copy.pruned_files("00001/update")
    assert_stops(
        copy,
        "00002/update needs the optimizer state of 00001/update, deleted to save space; to compute them again: "
        f"{copy.format_command('resume')} --from-stage update:2",
    )
    repeated = steps_to_repeat(copy, copy.config(), "update:2")
    assert [str(step) for step in repeated] == ["update:1", "evaluate:2"]
    copy.set_aside([step.output for step in repeated])
    resume_locally(copy)
    assert digests(copy) == digests(RunStore.open(runs.root, "whole"))


def test_samples_that_came_out_differently_take_from_stage(copy: RunStore) -> None:
    """As on a GPU: those of iteration 2 differ, and the optimizer's state before its update is pruned."""
    other, manifest = copy.stage_folder("00001/credit"), copy.manifest_of("00002/credit")

    def write(folder: Path) -> dict[str, float]:
        shutil.copytree(other, folder, dirs_exist_ok=True, ignore=lambda *_: [MANIFEST])
        return manifest["metrics"]

    copy.commit("00002/credit", manifest["key"], write)
    before = copy.manifest_of("00002/update")["key"]
    with pytest.raises(ConfigError, match=r"--from-stage update:2$"):
        resume_locally(copy)
    copy.set_aside([step.output for step in steps_to_repeat(copy, copy.config(), "update:2")])
    resume_locally(copy)
    assert copy.manifest_of("00002/update")["key"] != before


def test_damaged_weights_are_not_exported(copy: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = TrainedTeam.of(copy).weights.parent
    weights = next(folder.glob("weights/*/*.safetensors"))
    flip_byte(weights)
    assert main(["export", "copy", "--root", str(copy.path.parent), "--output", str(tmp_path / "agents")]) == 2
    said = capsys.readouterr().err
    assert f"{folder}: {weights.relative_to(folder)} is damaged; {REMEDY}" in said
    assert not (tmp_path / "agents").exists()


def test_a_damaged_evaluation_is_named_by_its_readers(copy: RunStore) -> None:
    folder = copy.stage_folder("00002/evaluate")
    flip_byte(folder / EVALUATION)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(folder))}: {EVALUATION} is damaged; "):
        read_evaluations(copy)
