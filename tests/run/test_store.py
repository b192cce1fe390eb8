from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from magrpo.config.run import RunConfig, load_config
from magrpo.errors import ConfigError
from magrpo.process.environment import shorten_path
from magrpo.run.manifest import MANIFEST
from magrpo.run.store import ENDED, RunStore, read_records, write_records
from magrpo.types import (
    Action,
    Case,
    ExecutionReport,
    JointReward,
    Message,
    Observation,
    PastTurn,
    Problem,
    Prompt,
    RolloutGroup,
    Sample,
    ScoredTurn,
    Turn,
)
from tests.plugins import CONFIG


def write_text(text: str) -> Callable[[Path], dict[str, float]]:
    """A function for ``RunStore.commit`` that writes the text to ``sub/a.txt`` and returns one metric."""

    def write(folder: Path) -> dict[str, float]:
        (folder / "sub").mkdir()
        (folder / "sub" / "a.txt").write_text(text)
        return {"x/y": 1.5}

    return write


def test_a_committed_stage_is_found_under_its_key_only(store: RunStore) -> None:
    assert store.find("00001/score.0", "k") is None
    pointer = store.commit("00001/score.0", "k", write_text("one"))
    assert store.find("00001/score.0", "k") == pointer
    assert store.find("00001/score.0", "other") is None
    assert store.metrics(pointer) == {"x/y": 1.5}
    assert (store.folder(pointer) / "sub" / "a.txt").read_text() == "one"


def test_the_pointer_follows_the_content(store: RunStore) -> None:
    first = store.commit("s", "k", write_text("one"))
    assert store.commit("s", "k", write_text("one")) == first
    assert store.commit("s", "k", write_text("two")) != first


def test_a_stage_that_fails_leaves_the_last_output_and_nothing_else(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))

    def fail(folder: Path) -> dict[str, float]:
        (folder / "half.txt").write_text("half")
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        store.commit("s", "k2", fail)
    assert store.find("s", "k") == pointer
    assert [path.name for path in (store.path / "stages").iterdir()] == ["s"], "what it wrote may have filled the disk"
    store.commit("s", "k2", write_text("two"))
    assert [path.name for path in (store.path / "stages").iterdir()] == ["s"]


def test_a_pruned_file_leaves_the_stage_committed_and_its_pointer_unchanged(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    store.prune("s", "sub/a.txt")
    store.prune("s", "sub/a.txt")
    assert not (store.folder(pointer) / "sub" / "a.txt").exists()
    assert store.find("s", "k") == pointer


def test_a_folder_is_pruned_with_all_its_files_and_one_that_is_not_there_is_none(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    store.prune("s", "sub", "optimizer")
    assert store.pruned_files("s") == ["sub/a.txt"]
    assert store.find("s", "k") == pointer


def test_a_file_that_a_kill_left_while_it_was_pruned_goes(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    file = store.folder(pointer) / "sub" / "a.txt"
    store.prune("s", "sub/a.txt")
    file.write_text("one")
    store.prune("s", "sub/a.txt")
    assert not file.exists()


def test_a_name_is_free_again_if_a_kill_came_before_its_configuration(tmp_path: Path) -> None:
    config = load_config(_config(tmp_path))
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / ".config.json").write_text("{")
    with pytest.raises(ConfigError, match="no run 'r'"):
        RunStore.open(tmp_path / "runs", "r")
    RunStore.create(config, "r")
    assert RunStore.open(tmp_path / "runs", "r").config() == config
    assert {path.name for path in (tmp_path / "runs" / "r").iterdir()} == {"config.json"}
    with pytest.raises(ConfigError, match="run r exists"):
        RunStore.create(config, "r")


def test_printed_commands_find_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunStore(Path("runs"), "one").format_arguments() == "one"
    assert RunStore(Path("my runs"), "one").format_arguments() == "one --root 'my runs'"
    assert RunStore(Path("old/runs"), "one").format_arguments() == "one --root old/runs", "not the default"
    anywhere = RunStore(Path("my runs"), "one").format_arguments(from_anywhere=True)
    assert anywhere == f"one --root '{tmp_path}/my runs'"
    config = load_config(_config(tmp_path), ["root=my runs"])
    store = RunStore.create(config, "one")
    monkeypatch.setenv("PATH", "")  # without the environment's own folder, as in a shell after `make setup`
    command = f"{shorten_path(Path(sys.executable).parent / 'magrpo')} resume one --root 'my runs'"
    assert store.format_command("resume") == command
    with pytest.raises(ConfigError, match=f"or: {re.escape(command)}"):
        RunStore.create(config, "one")


def test_a_folder_with_files_of_the_user_is_no_place_for_a_run(tmp_path: Path) -> None:
    """A refused run is deleted, and its folder with it."""
    config = load_config(_config(tmp_path))
    notes = tmp_path / "runs" / "mine" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.touch()
    with pytest.raises(ConfigError, match=re.escape(f"{notes.parent} contains other files: choose another name")):
        RunStore.create(config, "mine")
    assert list(notes.parent.iterdir()) == [notes]


MANIFESTS = {
    "empty": b"",
    "truncated": b'{"stage": "s", ',
    "no keys": b"{}",
    "a list": b"[]",
    "null": b"null",
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "a number": b"1" * 5000,
    "other types": b'{"stage": "s", "key": 1, "files": [], "metrics": {}}',
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_cannot_be_read_is_named(store: RunStore, manifest: bytes) -> None:
    pointer = store.commit("00001/s", "k", write_text("one"))
    (store.folder(pointer) / MANIFEST).write_bytes(manifest)
    assert not store.is_committed("00001/s")
    message = rf"^{store.folder(pointer)}: _SUCCESS is damaged; delete this folder and resume the run"
    for read in (lambda: store.find("00001/s"), lambda: store.metrics(pointer), lambda: list(store.stage_metrics())):
        with pytest.raises(ConfigError, match=message):
            read()


@pytest.mark.parametrize("change", [{"metrics": {"x/y": 2.5}}, {"digest": ""}])
def test_a_manifest_that_was_changed_is_damaged(store: RunStore, change: dict[str, object]) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    path = store.folder(pointer) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match="_SUCCESS is damaged"):
        store.find("s", "k")


def test_a_folder_without_a_manifest_is_no_output(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    (store.folder(pointer) / MANIFEST).unlink()
    assert store.find("s") is None
    with pytest.raises(ConfigError, match="_SUCCESS is missing; delete this folder and resume the run"):
        store.metrics(pointer)
    assert store.commit("s", "k", write_text("one")) == pointer


def test_damage_is_named_by_file(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    reopened = RunStore(store.path.parent, "run")
    folder = store.folder(pointer)
    file = folder / "sub" / "a.txt"
    file.write_text("0ne")
    assert reopened.find("s", "k") == pointer
    with pytest.raises(ConfigError, match=rf"^{folder}: sub/a\.txt is damaged; delete this folder and resume the run"):
        reopened.check_files(pointer)
    reopened.check_files(pointer, "other")
    with pytest.raises(ConfigError, match=r"sub/a\.txt is damaged"):
        reopened.check_files(pointer, "other", "sub")
    file.unlink()
    with pytest.raises(ConfigError, match=r"sub/a\.txt is missing"):
        reopened.check_files(pointer)
    file.write_text("one")
    reopened.check_files(pointer)


def test_files_are_read_once_to_check_them(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    (store.folder(pointer) / "sub" / "a.txt").unlink()
    store.check_files(pointer)  # it wrote them
    reopened = RunStore(store.path.parent, "run")
    (store.folder(pointer) / "sub" / "a.txt").write_text("one")
    reopened.check_files(pointer)
    (store.folder(pointer) / "sub" / "a.txt").unlink()
    reopened.check_files(pointer)


def test_pruned_files_are_not_damaged(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    store.prune("s", "sub")
    RunStore(store.path.parent, "run").check_files(pointer)


def test_many_damaged_files_are_counted(store: RunStore) -> None:
    def write(folder: Path) -> dict[str, float]:
        for number in range(5):
            (folder / str(number)).touch()
        return {}

    pointer = store.commit("s", "k", write)
    for path in store.folder(pointer).glob("[0-9]"):
        path.write_text("more")
    with pytest.raises(ConfigError, match="0 is damaged, 1 is damaged, 2 is damaged and 2 more; delete"):
        RunStore(store.path.parent, "run").check_files(pointer)


def test_foreign_folders_among_the_stages_are_left_alone(store: RunStore) -> None:
    store.commit("00001/s", "k", write_text("one"))
    for foreign in ("backup/s", "0x/s"):
        (store.path / "stages" / foreign).mkdir(parents=True)
        (store.path / "stages" / foreign / MANIFEST).write_text("{")
    assert list(store.stage_metrics()) == [(1, "s", {"x/y": 1.5})]
    (store.path / "set-aside" / "notes").mkdir(parents=True)
    assert store.set_aside(["00001/s"]).name == "1"


def test_the_end_of_training_is_forgotten_with_the_first_output_only(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end tells which outputs there are, so a process that is killed in the middle must leave it."""

    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    outputs = ["00001/s", "00002/s"]
    for output in outputs:
        store.commit(output, "k", write_text("one"))
    (store.path / ENDED).write_text("{}")
    with monkeypatch.context() as killed:
        killed.setattr("magrpo.run.store.sync_path", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.set_aside(outputs)
    assert (store.path / ENDED).exists()
    store.set_aside(outputs[:1])
    assert not (store.path / ENDED).exists()


def test_of_runs_created_at_once_with_one_name_one_wins_with_its_own_configuration(tmp_path: Path) -> None:
    configs = [load_config(_config(tmp_path), [f"train.seed={seed}"]) for seed in range(4)]

    def create(config: RunConfig) -> RunStore | None:
        barrier.wait()
        try:
            return RunStore.create(config, name)
        except ConfigError:  # it exists
            return None

    with ThreadPoolExecutor(len(configs)) as pool:
        for number in range(25):
            name, barrier = f"run-{number}", Barrier(len(configs))
            stores = list(pool.map(create, configs))
            [winner] = [seed for seed, store in enumerate(stores) if store is not None]
            assert RunStore.open(tmp_path / "runs", name).config() == configs[winner]


NAMES = ["", ".", "..", "../x", "/x", "x/y", "-x", ".x", "a b", "x\n", "Jürgen", "x?", "x#y", "[x]", "x" * 201, "a\0"]


@pytest.mark.parametrize("name", [*NAMES, "prefect", "studies", "mlflow.db", "MLFLOW.DB", "comparisons"])
def test_names_that_no_run_can_have(tmp_path: Path, name: str) -> None:
    config = load_config(_config(tmp_path))
    with pytest.raises(
        ConfigError, match=r"(?s)run name .* (cannot be used|is reserved)|is not in .* --root "
    ) as caught:
        RunStore.open(tmp_path / "runs", name)
    assert len(str(caught.value).splitlines()) == 1
    if name:
        with pytest.raises(ConfigError, match=r"run name .* (cannot be used|is reserved)"):
            RunStore.create(config, name)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", " cannot be read"),
        (b'{"agents": ', " cannot be read"),
        (b"\xff{}", " cannot be read"),
        (b"[1]", " is not the configuration of a run"),
        (b"[" * 10**5, r" cannot be read \(maximum recursion depth"),
        (b"9" * 5000, r" cannot be read \(Exceeds the limit"),
        (b'{"agents": [], "train": {}, "later": 1}', "(?s:.*) later: unknown key"),
        (b'{"agents": [], "train": {}, "optim": {"lr": NaN}}', r".* optim\.lr: must be a finite number"),
    ],
)
def test_a_configuration_that_is_damaged_is_named(store: RunStore, data: bytes, message: str) -> None:
    path = store.path / "config.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}{message}") as caught:
        RunStore.open(store.path.parent, "run").config()
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path} ") for line in lines)
    assert len(lines) == 1 or all("written by another version?" in line for line in lines), "one line for each mistake"


def test_a_run_behind_a_link_belongs_to_the_root_of_the_link(store: RunStore, tmp_path: Path) -> None:
    """As after its folder was moved to another disk."""
    elsewhere = tmp_path / "other-disk" / "moved"
    elsewhere.parent.mkdir()
    store.path.rename(elsewhere)
    store.path.symlink_to(elsewhere)
    assert RunStore(store.path.parent, "run").path == store.path


def test_a_folder_in_place_of_a_configuration_is_no_run(store: RunStore) -> None:
    (store.path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="no run 'run' in"):
        RunStore.open(store.path.parent, "run")


def _config(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(f'root = "{folder / "runs"}"\n{CONFIG}')
    return path


def test_records_round_trip_with_their_types(tmp_path: Path) -> None:
    report = ExecutionReport("wrong", (Case("pass"), Case("wrong", "1 != 2")), "landlock", watched_calls=2)
    past = PastTurn({"a": "x"}, JointReward(1.0, {"tests": 1.0}), {"program": report})
    group = RolloutGroup(
        problem=Problem("t/0", "def f(): ...\n", "f", tags={"level": "1"}),
        path=(3,),
        history=(past,),
        prompts={"a": Prompt(Observation((Message("user", "hi"),)), (1, 2))},
        actions={"a": (Action("a", "x", (5,), (-0.25,), "stop", 7),)},
        turns=(ScoredTurn({"a": 0}, past.reward, {"program": report}, masked=True),),
    )
    write_records(tmp_path / "g.jsonl.gz", [group])
    assert read_records(tmp_path / "g.jsonl.gz", RolloutGroup[ScoredTurn]) == [group]
    write_records(tmp_path / "h.jsonl.gz", [group])
    assert (tmp_path / "g.jsonl.gz").read_bytes()[10:] == (tmp_path / "h.jsonl.gz").read_bytes()[10:]


def test_turns_and_scored_turns_are_told_apart(tmp_path: Path) -> None:
    group = RolloutGroup(Problem("t", "p"), (), (), {}, {}, (Turn({"a": 0}),))
    write_records(tmp_path / "g.jsonl.gz", [group])
    assert isinstance(read_records(tmp_path / "g.jsonl.gz", RolloutGroup[Turn])[0].turns[0], Turn)


def test_an_error_of_the_disk_reaches_the_writer() -> None:
    samples = [Sample((1, 2), tuple(range(1000)), (), 1.0, 0.5, 0, 7)] * 1000
    with pytest.raises(OSError, match="No space left"):
        write_records(Path("/dev/full"), samples)


def test_damaged_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    write_records(path, [Case("pass", str(number)) for number in range(1000)])
    data = path.read_bytes()
    flipped = data[:500] + bytes([data[500] ^ 1]) + data[501:]
    for damaged in (b"plain", data[:-20], data[:100], flipped, gzip.compress(b'{"status": 1}\n')):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"^{tmp_path}: x\.jsonl\.gz is damaged .*; delete this folder"):
            read_records(path, Case)
    path.unlink()
    with pytest.raises(ConfigError, match=r"x\.jsonl\.gz is missing; delete this folder"):
        read_records(path, Case)


def test_pruning_leaves_the_time_at_which_the_work_ended(store: RunStore) -> None:
    def write(folder: Path) -> dict[str, float]:
        (folder / "large").write_text("x")
        return {"time/update_s": 2.0}

    pointer = store.commit("00001/update", "k", write)
    os.utime(store.folder(pointer) / MANIFEST, (1000, 1000))
    store.prune("00001/update", "large")
    assert store.work_interval(pointer) == (998, 1000)
