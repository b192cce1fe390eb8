from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magrpo.config import load_config
from magrpo.plugins import ConfigError
from magrpo.store import MANIFEST, RunStore, digest, read_records, write_records
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


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    (tmp_path / "run").mkdir()
    return RunStore(tmp_path, "run")


def write_text(text: str):
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


def test_damage_is_noticed(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    (store.folder(pointer) / "sub" / "a.txt").write_text("0ne")
    assert store.find("s", "k") is None


def test_a_stage_that_fails_leaves_the_last_output_and_nothing_else(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))

    def fail(folder: Path) -> dict[str, float]:
        (folder / "half.txt").write_text("half")
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        store.commit("s", "k2", fail)
    assert store.find("s", "k") == pointer
    store.commit("s", "k2", write_text("two"))
    assert [path.name for path in (store.path / "stages").iterdir()] == ["s"]


def test_a_pruned_file_leaves_the_stage_committed_and_its_pointer_unchanged(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    store.prune(pointer, "sub/a.txt")
    store.prune(pointer, "sub/a.txt")
    assert not (store.folder(pointer) / "sub" / "a.txt").exists()
    assert store.find("s", "k") == pointer


def test_a_folder_is_pruned_with_all_its_files_and_one_that_is_not_there_is_none(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    store.prune(pointer, "sub", "optimizer")
    assert store.pruned_files("s") == ["sub/a.txt"]
    assert store.find("s", "k") == pointer


def test_a_file_that_a_kill_left_while_it_was_pruned_goes(store: RunStore) -> None:
    pointer = store.commit("s", "k", write_text("one"))
    file = store.folder(pointer) / "sub" / "a.txt"
    store.prune(pointer, "sub/a.txt")
    file.write_text("one")
    store.prune(pointer, "sub/a.txt")
    assert not file.exists()


def test_a_name_is_free_again_if_a_kill_came_before_its_configuration(tmp_path: Path) -> None:
    config = load_config(_config(tmp_path))
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / ".config.json").write_text("{")
    with pytest.raises(ConfigError, match="no run 'r'"):
        RunStore.open(tmp_path / "runs", "r")
    RunStore.create(config, "r")
    assert RunStore.open(tmp_path / "runs", "r").config() == config
    assert [path.name for path in (tmp_path / "runs" / "r").iterdir()] == ["config.json"]
    with pytest.raises(ConfigError, match="run r exists"):
        RunStore.create(config, "r")


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


def test_records_from_before_supports_were_kept_are_still_read(tmp_path: Path) -> None:
    action = Action("a", "x", (5,), (-0.25,), "stop", 7, support=((4, 5),))
    sample = Sample((1, 2), (5,), (-0.25,), 1.0, 0.5, 0, 7, support=((4, 5),))
    for record, kind in ((action, Action), (sample, Sample)):
        write_records(tmp_path / "now", [record])
        assert read_records(tmp_path / "now", kind) == [record]
        old = {name: value for name, value in asdict(record).items() if name != "support"}
        write_records(tmp_path / "old", [old])
        assert read_records(tmp_path / "old", kind) == [replace(record, support=())]


def test_turns_and_scored_turns_are_told_apart(tmp_path: Path) -> None:
    group = RolloutGroup(Problem("t", "p"), (), (), {}, {}, (Turn({"a": 0}),))
    write_records(tmp_path / "g.jsonl.gz", [group])
    assert isinstance(read_records(tmp_path / "g.jsonl.gz", RolloutGroup[Turn])[0].turns[0], Turn)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive_exactly(value: float) -> None:
    assert json.loads(json.dumps(value)) == value
    assert digest(value) == digest(json.loads(json.dumps(value)))


def test_large_files_are_compressed_elsewhere_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    logps = [tuple(-rng.expovariate(2) for _ in range(100)) for _ in range(300)]
    samples = [Sample((1, 2), tuple(range(100)), some, 1.0, 0.5, 0, 7) for some in logps]
    write_records(tmp_path / "here", samples)
    monkeypatch.setattr("magrpo.store.COMPRESSED_HERE", 200_000)
    write_records(tmp_path / "elsewhere", samples)
    assert (tmp_path / "here").read_bytes() == (tmp_path / "elsewhere").read_bytes()
    assert read_records(tmp_path / "elsewhere", Sample) == samples
    with pytest.raises(OSError, match=r"none/file could not be compressed \(FileNotFoundError"):
        write_records(tmp_path / "none" / "file", samples)


def test_pruning_leaves_the_time_at_which_the_work_ended(store: RunStore) -> None:
    def write(folder: Path) -> dict[str, float]:
        (folder / "large").write_text("x")
        return {"time/update_s": 2.0}

    pointer = store.commit("00001/update", "k", write)
    os.utime(store.folder(pointer) / MANIFEST, (1000, 1000))
    store.prune(pointer, "large")
    assert store.work_interval(pointer) == (998, 1000)
