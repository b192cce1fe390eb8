"""Tracking: the spool and its delivery."""

from __future__ import annotations

import itertools
import json
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from magrpo.tracking.spool import (
    Record,
    Refused,
    Spool,
    SpooledTracker,
    Unavailable,
    count_damaged,
    decode_record,
    encode_record,
)
from magrpo.tracking.wall_time import read_run_records, sum_attempts
from tests.memory_tracker import MemoryTracker


class ListSink:
    """A sink that keeps deliveries in a list, and can be away or picky."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []
        self.away = False
        self.refuse: set[str] = set()
        self.tried = threading.Event()
        self.uri = "list"
        self.position = ""

    def connect(self) -> str:
        self.tried.set()
        if self.away:
            raise Unavailable("the sink is away")
        return self.position

    def note_position(self, position: str) -> None:
        self.position = position

    def deliver(self, records: Sequence[Record]) -> None:
        if self.away:
            raise Unavailable("the sink is away")
        if any(self.refuse & set(record.get("values", ())) for record in records):
            raise Refused("not this one")
        self.batches.append(list(records))

    def points(self) -> list[tuple[int, str, float]]:
        return [
            (record["step"], key, value)
            for batch in self.batches
            for record in batch
            if record["kind"] == "metrics"
            for key, value in record["values"].items()
        ]


def test_records_arrive_in_order_and_once(tmp_path: Path) -> None:
    sink = ListSink()
    tracker = SpooledTracker(Spool(tmp_path), sink)
    tracker.params({"train.seed": 0})
    for step in range(3):
        tracker.metrics({"reward/joint": step / 2}, step)
    tracker.close("FINISHED")
    assert sink.points() == [(0, "reward/joint", 0.0), (1, "reward/joint", 0.5), (2, "reward/joint", 1.0)]
    kinds = [record["kind"] for batch in sink.batches for record in batch]
    assert kinds == ["params", "metrics", "metrics", "metrics", "status"]
    assert tracker.num_undelivered == 0


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a second pass between two records: two statuses of one millisecond are a repetition."""
    ticks = itertools.count(1)
    clock = SimpleNamespace(time=lambda: float(next(ticks)), perf_counter=time.perf_counter)
    monkeypatch.setattr("magrpo.tracking.spool.time", clock)


@pytest.mark.usefixtures("slow_clock")
def test_a_reopened_run_repeats_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("{}\n")
    sink = ListSink()
    for _ in range(2):
        tracker = SpooledTracker(Spool(tmp_path / "run"), sink)
        tracker.params({"train.seed": 0})
        tracker.tags({"git.dirty": "false"})
        tracker.dataset("coopcode", file, "abc", "train")
        tracker.artifact(file, "rollouts")
        tracker.metrics({"reward/joint": 1.0}, 1)
        tracker.close("FINISHED")
    kinds = [record["kind"] for batch in sink.batches for record in batch]
    assert kinds == ["params", "tags", "dataset", "artifact", "metrics", "status", "status"]


def test_what_is_new_at_a_known_step_is_recorded(tmp_path: Path) -> None:
    sink = ListSink()
    tracker = SpooledTracker(Spool(tmp_path), sink)
    tracker.metrics({"reward/joint": 1.0, "update/loss": float("nan"), "time/rollout_s": 3.0}, 1)
    tracker.close("FAILED")
    tracker = SpooledTracker(Spool(tmp_path), sink)
    again = {"reward/joint": 1.0, "update/loss": float("nan"), "time/rollout_s": 4.0, "eval/return": 0.5}
    tracker.metrics(again, 1)
    tracker.close("FINISHED")
    assert sink.points()[3:] == [(1, "time/rollout_s", 4.0), (1, "eval/return", 0.5)]


def test_a_tag_that_returns_to_an_old_value_is_recorded(tmp_path: Path) -> None:
    sink = ListSink()
    tracker = SpooledTracker(Spool(tmp_path), sink)
    for mood in ("calm", "calm", "cross", "calm"):
        tracker.tags({"mood": mood})
    tracker.close("FINISHED")
    tags = [record["values"] for batch in sink.batches for record in batch if record["kind"] == "tags"]
    assert tags == [{"mood": "calm"}, {"mood": "cross"}, {"mood": "calm"}]


def test_an_absent_sink_stalls_nothing_and_the_next_run_delivers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    sink.away = True
    tracker = SpooledTracker(Spool(tmp_path), sink)
    for step in range(5):
        tracker.metrics({"reward/joint": float(step)}, step)
    tracker.close("FAILED")
    assert tracker.num_undelivered == 6
    assert sink.batches == []
    assert "the sink is away" in caplog.text

    sink.away = False
    tracker = SpooledTracker(Spool(tmp_path), sink)
    tracker.record_start()
    tracker.metrics({"reward/joint": 5.0}, 5)
    tracker.close("FINISHED")
    assert [step for step, _, _ in sink.points()] == [0, 1, 2, 3, 4, 5]
    statuses = [record["value"] for batch in sink.batches for record in batch if record["kind"] == "status"]
    assert statuses[-1] == "FINISHED"
    assert "FAILED" not in statuses, "a run that went on is not ended half-way by an old status"


def test_a_status_that_another_overtakes_is_not_delivered(tmp_path: Path) -> None:
    sink = ListSink()
    sink.away = True
    SpooledTracker(Spool(tmp_path), sink).close("FAILED")
    sink.away = False
    tracker = SpooledTracker(Spool(tmp_path), sink)
    tracker.record_start()
    tracker.flush()
    assert [record["value"] for batch in sink.batches for record in batch] == ["RUNNING"]


def test_a_sink_that_comes_back_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magrpo.tracking.spool._RETRY_S", (0.01,))
    sink = ListSink()
    sink.away = True
    tracker = SpooledTracker(Spool(tmp_path), sink)
    tracker.metrics({"reward/joint": 0.0}, 0)
    assert sink.tried.wait(10)
    sink.away = False
    deadline = time.monotonic() + 10
    while tracker.num_undelivered and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sink.points() == [(0, "reward/joint", 0.0)]
    tracker.close("FINISHED")


def test_a_refused_record_does_not_hold_up_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink()
    sink.away = True
    tracker = SpooledTracker(Spool(tmp_path), sink)
    for step, key in enumerate(["a", "b", "c"]):
        tracker.metrics({key: 1.0}, step)
    sink.refuse = {"b"}
    sink.away = False
    tracker.close("FINISHED")
    assert [key for _, key, _ in sink.points()] == ["a", "c"]
    assert "skipped: not this one" in caplog.text


def test_a_line_torn_by_a_crash_is_cut_off(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"kind": "tags", "values": {"a": "b"}})
    spool.close()
    with (tmp_path / "tracking.jsonl").open("a") as file:
        file.write('{"kind": "metrics", "st')
    spool = Spool(tmp_path)
    spool.append({"kind": "tags", "values": {"c": "d"}})
    spool.close()
    lines = (tmp_path / "tracking.jsonl").read_text().splitlines()
    assert [json.loads(line)["values"] for line in lines] == [{"a": "b"}, {"c": "d"}]


def record_steps(tracker: SpooledTracker, *steps: int) -> None:
    for step in steps:
        tracker.metrics({"reward/joint": float(step)}, step)


def open_tracker(folder: Path, sink: ListSink) -> SpooledTracker:
    return SpooledTracker(Spool(folder), sink)


@pytest.mark.parametrize("position", ["", "2", "2 ", "2 0000000000000000", "99 0000000000000000", "-1 x", "9" * 5000])
def test_a_store_that_does_not_know_the_position_gets_everything(tmp_path: Path, position: str) -> None:
    first, other = ListSink(), ListSink()
    tracker = open_tracker(tmp_path, first)
    record_steps(tracker, 0, 1, 2)
    tracker.close("FINISHED")
    other.position = position
    tracker = open_tracker(tmp_path, other)
    tracker.flush()
    assert other.points() == first.points() == [(step, "reward/joint", float(step)) for step in range(3)]
    assert other.position == first.position
    assert tracker.num_undelivered == 0


@pytest.mark.usefixtures("slow_clock")
def test_a_store_restored_from_a_backup_gets_what_it_lacks(tmp_path: Path) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1)
    tracker.close("KILLED")
    backup = sink.position
    tracker = open_tracker(tmp_path, sink)
    tracker.record_start()
    record_steps(tracker, 2, 3)
    tracker.close("FINISHED")
    restored = ListSink()
    restored.position = backup
    tracker = open_tracker(tmp_path, restored)
    tracker.flush()
    assert [step for step, *_ in restored.points()] == [2, 3]
    assert restored.batches[-1][-1]["value"] == "FINISHED"


def test_what_waits_for_another_store_is_counted_while_that_is_away(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path, ListSink())
    record_steps(tracker, 0, 1)
    tracker.close("FINISHED")
    assert tracker.is_connected
    away = ListSink()
    away.away, away.uri = True, "elsewhere"
    tracker = open_tracker(tmp_path, away)
    tracker.flush()
    assert tracker.num_undelivered == 3
    assert not tracker.is_connected


@pytest.mark.parametrize("text", [b"", b"abc", b"3", b"\xff", b"3 abc def"])
def test_a_damaged_position_is_forgotten(tmp_path: Path, text: bytes) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1)
    tracker.close("FINISHED")
    (tmp_path / "tracking.sent").write_bytes(text)
    sink.away = True
    tracker = open_tracker(tmp_path, sink)
    tracker.flush()
    assert tracker.num_undelivered == 3
    sink.away = False
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 2)
    tracker.close("FINISHED")
    assert [step for step, *_ in sink.points()] == [0, 1, 2], "the store knows"


DAMAGED_LINES = {
    "garbage": b"garbage\n",
    "not UTF-8": b"\xff\xfe\n",
    "a list": b"[]\n",
    "null": b"null\n",
    "no kind": b"{}\n",
    "another kind": b'{"kind": "x"}\n',
    "no values": b'{"kind": "metrics", "step": 1, "time_ms": 1}\n',
    "no time": b'{"kind": "status", "value": "RUNNING"}\n',
    "nested": b"[" * 100_000 + b"\n",
    "no checksum": b'{"kind": "tags", "values": {}}\n',
    "a wrong checksum": b'{"kind": "tags", "values": {}, "crc": 1}\n',
    "zeros": b"\0" * 512 + b"\n",
}


@pytest.mark.parametrize("line", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_damaged_lines_are_left_out_and_recorded_again(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1, 2)
    tracker.close("KILLED")
    path = tmp_path / "tracking.jsonl"
    first, _, *rest = path.read_bytes().splitlines(keepends=True)
    damaged = b"".join([first, line, *rest])
    path.write_bytes(damaged)
    sink.batches.clear()
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1, 2, 3)
    tracker.close("FINISHED")
    assert "skipped 1 damaged lines of tracking.jsonl; they are kept in tracking.damaged.jsonl" in caplog.text
    assert (tmp_path / "tracking.damaged.jsonl").read_bytes() == damaged
    assert [step for step, *_ in sink.points()] == [0, 2, 1, 3]
    assert sum_attempts(read_run_records(tmp_path), None) == 0
    assert count_damaged(tmp_path) == 0


def test_a_flipped_byte_is_found_in_any_place(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"kind": "metrics", "step": 1, "time_ms": 2, "values": {"reward/joint": 0.1, "nan": float("nan")}})
    spool.append({"kind": "params", "values": {"text": '\u00fc"\\ \n'}})
    spool.close()
    path = tmp_path / "tracking.jsonl"
    line, other = path.read_bytes().splitlines(keepends=True)
    assert decode_record(line)
    assert decode_record(other)
    for data in (line, other):
        for place in range(len(data) - 1):
            flipped = bytearray(data)
            flipped[place] ^= 1
            assert decode_record(bytes(flipped)) is None


def test_a_disk_that_is_full_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0)
    with monkeypatch.context() as patch:
        patch.setattr("magrpo.tracking.spool.encode_record", FullDisk.encode)
        record_steps(tracker, 1, 2)
    record_steps(tracker, 3)
    tracker.close("FAILED")
    assert caplog.text.count("No space left on device") == 1
    assert [step for step, *_ in sink.points()] == [0, 3]
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1, 2, 3)
    tracker.close("FINISHED")
    assert [step for step, *_ in sink.points()] == [0, 3, 1, 2]
    assert count_damaged(tmp_path) == 0


class FullDisk(bytes):
    """A line of which only the first half can be written."""

    @classmethod
    def encode(cls, record: Record) -> bytes:
        return cls(encode_record(record)[:20])

    def __len__(self) -> int:
        return 40


def test_a_long_spool_takes_little_memory(tmp_path: Path) -> None:
    values = {f"quantity/{number}": 0.1 * number for number in range(50)}
    with (tmp_path / "tracking.jsonl").open("wb") as file:
        for step in range(2000):
            file.write(encode_record({"kind": "metrics", "step": step, "time_ms": step, "values": values}))
    sink = ListSink()
    sink.away = True
    tracemalloc.start()
    tracker = open_tracker(tmp_path, sink)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tracker.flush()
    assert tracker.num_undelivered == 2000
    assert used < 100 * 50 * 2000, "bytes a value"


@pytest.mark.parametrize("make", [MemoryTracker, None])
def test_a_key_that_mlflow_refuses_is_a_programming_error(tmp_path: Path, make: type[MemoryTracker] | None) -> None:
    tracker = make() if make else SpooledTracker(Spool(tmp_path), ListSink())
    with pytest.raises(AssertionError, match="pass@1"):
        tracker.metrics({"eval/pass@1": 1.0}, 0)
    tracker.close("FAILED")


def test_memory_tracker_keeps_everything(tmp_path: Path) -> None:
    tracker = MemoryTracker()
    tracker.params({"a": 1})
    tracker.tags({"t": "x"})
    tracker.dataset("d", tmp_path, "abc", "train")
    tracker.metrics({"reward/joint": 1.0}, 3)
    tracker.artifact(tmp_path, "rollouts")
    tracker.close("FINISHED")
    assert (tracker.logged_params, tracker.logged_tags) == ({"a": 1}, {"t": "x"})
    assert tracker.history == [(3, {"reward/joint": 1.0})]
    assert tracker.artifacts == [(tmp_path, "rollouts")]
    assert tracker.datasets == [("d", tmp_path, "abc", "train")]
    assert tracker.status == "FINISHED"
