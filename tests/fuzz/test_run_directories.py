"""Mutated files of a finished run: whoever reads them, a command or a resume, refuses them in short lines."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.run import files, steps
from magrpo.run.manifest import MANIFEST
from magrpo.run.store import CONFIG, RunStore
from magrpo.tracking.outbox import RECORDS, encode_record
from magrpo.tracking.wall_time import read_wall_time
from pipelines.commands.runs import summarize_folder
from tests.fuzz.mutations import count_outcomes, mutate_bytes, mutate_tree, with_counts
from tests.pipelines.micro import blank_pictures, run_locally, write_config

RECORDED = [
    {"kind": "status", "value": "RUNNING", "time_ms": 1_000, "loading": {"libraries": 0.5}},
    {"kind": "tags", "values": {"magrpo.seed": "0"}},
    {"kind": "metrics", "values": {"reward/joint": 1.5, "time/rollout_s": 0.25}, "step": 1, "time_ms": 2_000},
    {"kind": "status", "value": "FINISHED", "time_ms": 3_000, "loading": {}},
]
"""Records of a run for MLflow."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a finished run of one iteration."""
    with blank_pictures():
        store, _, _ = run_locally(load_config(write_config(tmp_path_factory.mktemp("fuzz"), iterations=1)))
    (store.path / RECORDS).write_bytes(b"".join(map(encode_record, RECORDED)))
    files.keep_place(store, Place.model_validate({"ranks": {"count": 2}}))
    (store.path / files.START).write_text(json.dumps({"model": "team", "version": 3}))
    yield store.path
    shutil.rmtree(store.path)


@contextmanager
def mutated_file(path: Path, rng: random.Random) -> Iterator[None]:
    """Until the end of the block a file is deleted, empty, mutated, or a folder."""
    data = path.read_bytes()
    path.unlink()  # first, because another file may share its inode
    try:
        mutate_file(path, data, rng)
        yield
    finally:
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def mutate_file(path: Path, data: bytes, rng: random.Random) -> None:
    """Write a mutant of a file that had this content, make it a folder, or leave it out."""
    action = rng.random()
    if action < 0.1:
        return
    if action < 0.15 and path.name != CONFIG:
        path.mkdir()
    elif action < 0.2:
        path.write_bytes(b"")
    elif action < 0.6 and path.name.endswith((MANIFEST, ".json")):
        text = json.dumps(mutate_tree(json.loads(data), rng), ensure_ascii=False)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(mutate_bytes(data, rng))


def read_stage(store: RunStore, step: steps.Step) -> None:
    """Read what later stages read of a stage."""
    folder = store.stage_folder(step.output)
    if step.stage == "prepare":
        files.read_problems(folder)
    elif step.stage == "rollout":
        files.read_groups(folder)
    elif step.stage == "score":
        files.read_scored(folder)
    elif step.stage == "evaluate":
        files.read_evaluation(folder)


def inspect_run(path: Path) -> None:
    """What commands read of a run."""
    if (path / CONFIG).is_file():  # else it is not listed
        summarize_folder(path)
    read_wall_time(path)
    store = RunStore.open(path.parent, path.name)
    files.is_finished(store)
    files.describe_start(store)
    files.read_place(store)
    files.find_evaluations(store)
    steps.first_missing(store.config(), store)
    assert all(isinstance(metrics, dict) for *_, metrics in store.stage_metrics())


def resume_run(path: Path) -> None:
    """What a resume reads, and the digests that it checks before it computes from an output."""
    store = RunStore.open(path.parent, path.name)
    for step in steps.steps(store.config()):
        if pointer := store.find(step.output):
            store.metrics(pointer)
            store.check_files(pointer)
            read_stage(store, step)


@with_counts
def test_run_directories(finished: Path, count: int) -> None:
    paths = sorted(file for file in finished.rglob("*") if file.is_file())
    paths += [file for file in paths if file.name in (MANIFEST, CONFIG)] * 3
    paths += [finished / name for name in (RECORDS, files.PLACE, files.START)] * 5

    def use(rng: random.Random) -> None:
        with mutated_file(rng.choice(paths), rng):
            rng.choice((inspect_run, resume_run))(finished)

    assert count_outcomes("run directories", use, count).total() == count
