"""Damage to the files of a run: whatever is damaged, a resumed run sets it aside and ends with the bits it had."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from magrpo.config.run import load_config
from magrpo.plugins import ConfigError
from magrpo.run.config_file import CONFIG, CONFIG_COPY
from magrpo.run.layout import OPTIMIZER
from magrpo.run.store import MANIFEST, RunStore
from magrpo.tracking.spool import RECORDS
from magrpo.training.loop import run_steps
from magrpo.training.recorder import RunRecorder
from magrpo.training.repair import find_damage, find_lost
from pipelines.cli import main
from tests.memory_tracker import MemoryTracker
from tests.pipelines.micro import blank_pictures, open_stages, run_locally, write_config
from tests.training.test_resume import Runs

STAGES = [
    "00000/prepare",
    "00000/update",
    "00000/evaluate",
    "00001/rollout.0",
    "00001/score.0",
    "00001/credit",
    "00001/update",
    "00002/rollout.0",
    "00002/update",
    "00002/evaluate",
    "00003/credit",
    "00003/update",
    "00003/report",
]


@pytest.fixture(scope="module", autouse=True)
def _pictures() -> Iterator[None]:
    with blank_pictures():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """With the finished run ``whole`` of three iterations, evaluated at 0, 2 and 3."""
    folder = tmp_path_factory.mktemp("damage")
    store, _, _ = run_locally(load_config(write_config(folder, iterations=3)))
    store.path.rename(folder / "runs" / "whole")
    return Runs(folder)


@pytest.fixture
def copy(runs: Runs) -> Iterator[RunStore]:
    shutil.copytree(runs.root / "whole", runs.root / "copy")
    yield RunStore.open(runs.root, "copy")
    shutil.rmtree(runs.root / "copy")


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_largest(folder: Path) -> None:
    flip_byte(largest_file(folder))


def truncate_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:40])


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def resume(store: RunStore) -> MemoryTracker:
    config, tracker = store.config(), MemoryTracker()
    with open_stages(config, store, tracker) as stages:
        run_steps(config, store, stages.run_step, RunRecorder(config, store, tracker))
    return tracker


def assert_mended(runs: Runs, store: RunStore) -> None:
    expected = runs.outcome("whole")
    found: dict[str, Any] = runs.outcome(store.run_id)
    for name, manifest in found["manifests"].items():  # the state of a checkpoint before the newest may be back
        for facts in (manifest, expected["manifests"][name]):  # type: ignore[index]
            for file in facts["files"].values():
                file.pop("pruned", None)
    found["files"] = {name: data for name, data in found["files"].items() if name in expected["files"]}  # type: ignore[operator]
    assert found == expected
    assert not find_damage(store, store.config())


@pytest.mark.parametrize("damage", [flip_largest, shutil.rmtree, truncate_manifest])
@pytest.mark.parametrize("stage", STAGES)
def test_a_damaged_stage_is_computed_again_to_the_same_bits(
    runs: Runs, copy: RunStore, stage: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(copy.stage_folder(stage))
    with caplog.at_level(logging.WARNING):
        resume(copy)
    assert_mended(runs, copy)
    said = [record.getMessage() for record in caplog.records if record.name == "magrpo.training.repair"]
    assert (damage is shutil.rmtree) == (not any(line.startswith(f"{stage}: ") for line in said))


def keep_until(store: RunStore, last: str) -> None:
    """Take the outputs after ``last`` away, as if the run had been killed then."""
    for folder in store.path.glob("stages/*/*"):
        if str(folder.relative_to(store.path / "stages")) > last:
            shutil.rmtree(folder)
    shutil.rmtree(store.stage_folder("00002/evaluate"), ignore_errors=True)


def test_the_newest_optimizer_is_lost_while_all_before_it_are_pruned(runs: Runs, copy: RunStore) -> None:
    keep_until(copy, "00002/update")
    assert copy.pruned_files("00001/update")
    flip_byte(copy.stage_folder("00002/update") / OPTIMIZER)
    resume(copy)
    assert_mended(runs, copy)
    assert (copy.path / "set-aside" / "1" / "00002" / "update" / OPTIMIZER).exists()
    assert (copy.path / "set-aside" / "2" / "00001" / "update").exists()


@pytest.mark.parametrize(
    "lost",
    [
        ("00001/update", "00003/update"),
        ("00001/update", "00002/update", "00003/update"),
        ("00002/rollout.0", "00002/score.0", "00002/credit", "00002/update", "00002/evaluate"),
        ("00000/update", "00001/update"),
    ],
)
def test_several_lost_stages_are_computed_again(runs: Runs, copy: RunStore, lost: tuple[str, ...]) -> None:
    for stage in lost:
        shutil.rmtree(copy.stage_folder(stage))
    named = {step.folder for step in find_lost(copy, copy.config())}
    assert named
    assert named <= set(lost)
    resume(copy)
    assert_mended(runs, copy)
    assert find_lost(copy, copy.config()) == []


def test_a_file_in_place_of_a_stage_is_set_aside(runs: Runs, copy: RunStore) -> None:
    replace_by_file(copy.stage_folder("00003/report"))
    resume(copy)
    assert_mended(runs, copy)
    assert (copy.path / "set-aside" / "1" / "00003" / "report").read_text() == "not a folder"


def test_a_stage_computed_again_with_another_result_goes_back_to_an_optimizer_that_is_kept(
    runs: Runs, copy: RunStore
) -> None:
    """As on a GPU: the samples of iteration 2 differ, and the optimizer's state before its update is pruned."""
    other = copy.stage_folder("00001/credit")
    manifest = copy.manifest_of("00002/credit")
    key = manifest["key"]

    def write(folder: Path) -> dict[str, float]:
        shutil.copytree(other, folder, dirs_exist_ok=True, ignore=lambda *_: [MANIFEST])
        return manifest["metrics"]

    copy.commit("00002/credit", key, write)
    update = copy.manifest_of("00002/update")["key"]
    before = copy.manifest_of("00001/update")
    resume(copy)
    assert copy.manifest_of("00002/update")["key"] != update
    assert copy.manifest_of("00001/update")["key"] == before["key"]
    assert (copy.path / "set-aside" / "1" / "00001" / "update").is_dir()
    assert not find_damage(copy, copy.config())


DAMAGED_CONFIGS: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:100],
    "empty": lambda _: b"",
    "another value": lambda data: data.replace(b'"rank": 2', b'"rank": 3'),
    "not UTF-8": lambda data: b"\xff" + data,
    "a list": lambda _: b"[]",
}


@pytest.mark.parametrize("damage", DAMAGED_CONFIGS.values(), ids=DAMAGED_CONFIGS)
def test_a_damaged_configuration_is_restored_from_its_copy(
    runs: Runs, copy: RunStore, damage: Callable[[bytes], bytes]
) -> None:
    path, config = copy.path / CONFIG, copy.config()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert copy.config() == config
    aside = copy.path / "set-aside" / "1"
    said = f"{CONFIG} is damaged or was changed: restored from {CONFIG_COPY}; the damaged file is in {aside}"
    assert copy.mend_config() == said
    assert path.read_bytes() == whole
    assert (copy.path / "set-aside" / "1" / CONFIG).read_bytes() == damage(whole)
    flip_byte(copy.path / CONFIG_COPY)
    assert copy.mend_config() == f"{CONFIG_COPY} is damaged: rewritten"
    assert copy.mend_config() == ""
    path.unlink()
    assert RunStore.open(runs.root, "copy").config() == config


@pytest.mark.parametrize("file", [CONFIG, CONFIG_COPY])
def test_a_folder_in_the_place_of_the_configuration_is_set_aside(runs: Runs, copy: RunStore, file: str) -> None:
    whole = (copy.path / CONFIG).read_bytes()
    (copy.path / file).unlink()
    (copy.path / file / "kept").mkdir(parents=True)
    store = RunStore.open(runs.root, "copy")
    store.config()
    assert store.mend_config()
    assert (copy.path / "set-aside" / "1" / file / "kept").is_dir()
    assert (copy.path / CONFIG).read_bytes() == whole
    assert store.mend_config() == ""


def test_folders_in_the_place_of_both_are_told_in_a_line(runs: Runs, copy: RunStore) -> None:
    for file in (CONFIG, CONFIG_COPY):
        (copy.path / file).unlink()
        (copy.path / file).mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        copy.config()
    with pytest.raises(ConfigError, match="no run 'copy' in"):
        RunStore.open(runs.root, "copy")


@pytest.mark.parametrize("damage", DAMAGED_CONFIGS.values(), ids=DAMAGED_CONFIGS)
def test_a_damaged_configuration_without_a_copy_is_told_in_a_line(
    copy: RunStore, damage: Callable[[bytes], bytes]
) -> None:
    path = copy.path / CONFIG
    path.write_bytes(damage(path.read_bytes()).replace(b'"rank": 3', b'"rankle": 3'))
    (copy.path / CONFIG_COPY).unlink()
    with pytest.raises(ConfigError, match=f"^{path}") as caught:
        copy.config()
    assert len(str(caught.value).splitlines()) == 1


def test_verify_names_what_is_damaged_and_how_to_repair_it(
    runs: Runs, copy: RunStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "copy", "--root", str(runs.root)]) == 0
    assert capsys.readouterr().out == "copy: 18 stages checked, all files are intact\n"
    flip_byte(copy.stage_folder("00003/update") / OPTIMIZER)
    shutil.rmtree(copy.stage_folder("00002/credit"))
    truncate_manifest(copy.stage_folder("00001/score.0"))
    flip_byte(copy.path / CONFIG)
    (copy.path / RECORDS).write_text("garbage\n")
    assert main(["verify", "copy", "--root", str(runs.root)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[:5] == [
        "config.json is damaged or was changed",
        "00001/score.0: _SUCCESS is damaged",
        "00003/update: optimizer.pt is damaged",
        "00002/credit: is missing, although later stages were computed from it",
        "tracking.jsonl: 1 line damaged; the next resume skips them, with a copy in tracking.damaged.jsonl",
    ]
    assert said[6].endswith(f"magrpo resume copy --root {runs.root}")


def test_optim_keep_says_how_many_optimizer_states_are_kept(runs: Runs) -> None:
    """A damaged newest one then costs one iteration."""
    path = str(runs.root.parent / "run.toml")
    config = load_config(path, ["train.num_iterations=4", "eval.every=4", "optim.keep=2"])
    store, _, _ = run_locally(config)
    kept = [i for i in range(5) if not store.pruned_files(f"{i:05d}/update")]
    assert kept == [0, 3, 4]
    flip_byte(store.stage_folder("00004/update") / OPTIMIZER)
    resume(store)
    assert [folder.name for folder in (store.path / "set-aside").iterdir()] == ["1"]
    assert not find_damage(store, config)
