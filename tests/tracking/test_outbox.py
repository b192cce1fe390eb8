"""The outbox: what is written, what is sent, and what a kill or an absent MLflow changes about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from magrpo.tracking.connection import RecordRefused, Unavailable
from magrpo.tracking.outbox import Outbox, OutboxTracker, Record, encode_record, read_outbox
from magrpo.tracking.wall_time import sum_attempts
from tests.processes import wait_until


class ListSink:
    """A sink that keeps deliveries in a list, and can be away or picky."""

    def __init__(self, run: str = "run") -> None:
        self.run = run
        self.batches: list[list[Record]] = []
        self.away = False
        self.refuse: set[str] = set()
        self.stores_artifacts = True
        self.tried = threading.Event()

    def connect(self) -> str:
        self.tried.set()
        if self.away:
            raise Unavailable("the sink is away")
        return self.run

    def deliver(self, records: Sequence[Record]) -> None:
        if self.away:
            raise Unavailable("the sink is away")
        if any(self.refuse & set(record.get("values", ())) for record in records):
            raise RecordRefused("not this one")
        if not self.stores_artifacts and records[0]["kind"] == "artifact":
            raise Unavailable("no room")
        self.batches.append(list(records))

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch]

    def points(self) -> list[tuple[int, str, float]]:
        metrics = [record for record in self.records if record["kind"] == "metrics"]
        return [(record["step"], key, value) for record in metrics for key, value in record["values"].items()]

    def steps(self) -> list[int]:
        return [step for step, *_ in self.points()]


def open_tracker(folder: Path, sink: ListSink) -> OutboxTracker:
    return OutboxTracker(Outbox(folder), sink)


def record_steps(tracker: OutboxTracker, *steps: int) -> None:
    for step in steps:
        tracker.metrics({"reward/joint": float(step)}, step)


def test_records_arrive_in_order_and_once(tmp_path: Path) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    tracker.params({"train.seed": 0})
    record_steps(tracker, 0, 1, 2)
    tracker.close("FINISHED")
    assert sink.points() == [(0, "reward/joint", 0.0), (1, "reward/joint", 1.0), (2, "reward/joint", 2.0)]
    assert [record["kind"] for record in sink.records] == ["params", "metrics", "metrics", "metrics", "status"]
    assert tracker.num_undelivered == 0


def test_a_reopened_run_repeats_only_tags_and_statuses(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text("{}\n")
    sink = ListSink()
    for _ in range(2):
        tracker = open_tracker(tmp_path / "run", sink)
        tracker.params({"train.seed": 0})
        tracker.tags({"git.dirty": "false"})
        tracker.dataset("coopcode", file, "abc", "train")
        tracker.artifact(file, "rollouts")
        tracker.metrics({"reward/joint": 1.0}, 1)
        tracker.close("FINISHED")
    kinds = [record["kind"] for record in sink.records]
    assert kinds == ["params", "tags", "dataset", "artifact", "metrics", "status", "tags", "status"]


def test_what_is_new_at_a_known_step_is_recorded(tmp_path: Path) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    tracker.metrics({"reward/joint": 1.0, "update/loss": float("nan"), "time/rollout_s": 3.0}, 1)
    tracker.close("FAILED")
    tracker = open_tracker(tmp_path, sink)
    again = {"reward/joint": 1.0, "update/loss": float("nan"), "time/rollout_s": 4.0, "eval/return": 0.5}
    tracker.metrics(again, 1)
    tracker.close("FINISHED")
    assert sink.points()[3:] == [(1, "time/rollout_s", 4.0), (1, "eval/return", 0.5)]


def test_a_tag_that_returns_to_an_old_value_is_recorded(tmp_path: Path) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    for mood in ("calm", "cross", "calm"):
        tracker.tags({"mood": mood})
    tracker.close("FINISHED")
    tags = [record["values"]["mood"] for record in sink.records if record["kind"] == "tags"]
    assert tags == ["calm", "cross", "calm"]


def test_an_absent_sink_ends_no_run_and_the_next_start_delivers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    sink.away = True
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1, 2)
    tracker.close("FAILED")
    assert tracker.num_undelivered == 4
    assert not tracker.is_connected
    assert caplog.text.count("the sink is away") == 1
    assert "4 records could not be delivered" in caplog.text

    sink.away = False
    tracker = open_tracker(tmp_path, sink)
    tracker.record_start()
    record_steps(tracker, 3)
    tracker.close("FINISHED")
    assert sink.steps() == [0, 1, 2, 3]
    statuses = [record["value"] for record in sink.records if record["kind"] == "status"]
    assert statuses == ["FAILED", "RUNNING", "FINISHED"]


def test_a_sink_that_comes_back_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magrpo.tracking.outbox._RETRY_S", 0.01)
    sink = ListSink()
    sink.away = True
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0)
    wait_until(sink.tried.is_set)
    sink.away = False
    wait_until(lambda: not tracker.num_undelivered)
    assert sink.steps() == [0]
    tracker.close("FINISHED")


def test_a_refused_record_does_not_hold_up_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink()
    sink.away = True
    tracker = open_tracker(tmp_path, sink)
    for step, key in enumerate(["a", "b", "c"]):
        tracker.metrics({key: 1.0}, step)
    sink.refuse = {"b"}
    sink.away = False
    tracker.close("FINISHED")
    assert [key for _, key, _ in sink.points()] == ["a", "c"]
    assert "skipped: not this one" in caplog.text
    assert tracker.num_undelivered == 0


def record_artifacts(folder: Path, sink: ListSink) -> OutboxTracker:
    """Record two artifacts, between metrics of the steps 0, 1 and 2."""
    tracker = open_tracker(folder, sink)
    record_steps(tracker, 0)
    for step in (1, 2):
        file = folder / f"{step}.html"
        file.write_text("<p>")
        tracker.artifact(file, "report")
        record_steps(tracker, step)
    return tracker


def test_artifacts_that_cannot_be_stored_hold_up_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink()
    sink.stores_artifacts = False
    tracker = record_artifacts(tmp_path, sink)
    tracker.close("FINISHED")
    assert [record["kind"] for record in sink.records] == [*["metrics"] * 3, "status"]
    assert tracker.num_undelivered == 2
    assert caplog.text.count("no room; it waits in the outbox, and other records do not wait for it") == 1

    sink.stores_artifacts = True
    tracker = open_tracker(tmp_path, sink)
    tracker.flush()
    assert [Path(record["path"]).name for record in sink.records if record["kind"] == "artifact"] == [
        "1.html",
        "2.html",
    ]
    assert sink.records[-1]["kind"] == "status", "what came after an artifact is sent again"
    assert tracker.num_undelivered == 0


def test_artifacts_are_tried_again_at_the_end(tmp_path: Path) -> None:
    sink = ListSink()
    sink.stores_artifacts = False
    tracker = record_artifacts(tmp_path, sink)
    wait_until(lambda: sink.steps() == [0, 1, 2])
    sink.stores_artifacts = True
    tracker.close("FINISHED")
    assert [record["kind"] for record in sink.records[3:]] == ["status", "artifact", "artifact"]
    assert tracker.num_undelivered == 0
    again = open_tracker(tmp_path, sink)
    again.flush()
    assert len(sink.records) == 6, "nothing is sent twice"


# Appends records 0, 1, 2, ... without a sink that answers, and prints each number once it is appended.
ENDLESS = """
import itertools, sys
from pathlib import Path
from tests.tracking.test_outbox import ListSink, open_tracker, record_steps
sink = ListSink()
sink.away = True
tracker = open_tracker(Path(sys.argv[1]), sink)
for step in itertools.count():
    record_steps(tracker, step)
    print(step, flush=True)
"""


def test_a_kill_loses_no_record_that_was_appended(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        appended = [int(process.stdout.readline()) for _ in range(50)]
        os.kill(process.pid, signal.SIGKILL)
        appended += [int(line) for line in process.stdout if line.endswith("\n")]
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    tracker.close("FINISHED")
    # The process may have died between appending a record and printing its number.
    assert sink.steps()[: len(appended)] == appended
    assert sink.steps() == list(range(len(sink.steps())))
    assert tracker.num_undelivered == 0


def test_records_sent_before_a_kill_are_sent_again_unchanged(tmp_path: Path) -> None:
    """A process died after sending everything, before it saved its position."""
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1)
    tracker.close("KILLED")
    first = sink.records
    sink.batches = []
    (tmp_path / "tracking.sent").unlink()
    open_tracker(tmp_path, sink).flush()
    assert sink.records == first


def test_another_mlflow_run_gets_everything(tmp_path: Path) -> None:
    """As when the database was replaced by an empty one."""
    first, other = ListSink("first"), ListSink("other")
    tracker = open_tracker(tmp_path, first)
    record_steps(tracker, 0, 1, 2)
    tracker.close("FINISHED")
    for sink in (other, other):
        open_tracker(tmp_path, sink).flush()
    assert other.records == first.records


@pytest.mark.parametrize("text", [b"", b"abc", b"3", b"\xff", b"99999999 run", b"-1 run", b"9" * 5000 + b" run"])
def test_a_position_that_does_not_fit_is_forgotten(tmp_path: Path, text: bytes) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1)
    tracker.close("FINISHED")
    (tmp_path / "tracking.sent").write_bytes(text)
    sink.batches = []
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 2)
    tracker.close("FINISHED")
    assert sink.steps() == [0, 1, 2]


def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append({"kind": "tags", "values": {"a": "b"}})
    outbox.close()
    with (tmp_path / "tracking.jsonl").open("a") as file:
        file.write('{"kind": "metrics", "st')
    outbox = Outbox(tmp_path)
    outbox.append({"kind": "tags", "values": {"c": "d"}})
    outbox.close()
    lines = (tmp_path / "tracking.jsonl").read_text().splitlines()
    assert [json.loads(line)["values"] for line in lines] == [{"a": "b"}, {"c": "d"}]


DAMAGED_LINES = {
    "garbage": b"garbage\n",
    "not UTF-8": b"\xff\xfe\n",
    "a list": b"[]\n",
    "nested": b"[" * 100_000 + b"\n",
    "no checksum": b'{"kind": "tags", "values": {}}\n',
    "a flipped byte": encode_record({"kind": "tags", "values": {"a": "b"}}).replace(b"tags", b"tagt"),
}


@pytest.mark.parametrize("line", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_damaged_lines_are_skipped_and_recorded_again(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    sink.away = True
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1, 2)
    tracker.close("KILLED")
    path = tmp_path / "tracking.jsonl"
    first, _, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, line, *rest]))
    sink.away = False
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1, 2, 3)
    tracker.close("FINISHED")
    assert caplog.text.count(f"skipped a damaged line of {path}") == 1
    assert sink.steps() == [0, 2, 1, 3]
    assert sum_attempts(read_outbox(tmp_path), None) == 0
    assert tracker.num_undelivered == 0


def test_a_disk_that_is_full_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListSink()
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0)
    with monkeypatch.context() as patch:
        patch.setattr("magrpo.tracking.outbox.encode_record", FullDisk.encode)
        record_steps(tracker, 1, 2)
    record_steps(tracker, 3)
    tracker.close("FAILED")
    assert caplog.text.count("No space left on device") == 1
    assert sink.steps() == [0, 3]
    tracker = open_tracker(tmp_path, sink)
    record_steps(tracker, 0, 1, 2, 3)
    tracker.close("FINISHED")
    assert sink.steps() == [0, 3, 1, 2]
    assert "damaged" not in caplog.text


class FullDisk(bytes):
    """A line of which only the first half can be written."""

    @classmethod
    def encode(cls, record: Record) -> bytes:
        return cls(encode_record(record)[:20])

    def __len__(self) -> int:
        return 40


def test_a_key_that_mlflow_refuses_is_a_programming_error(tmp_path: Path) -> None:
    tracker = open_tracker(tmp_path, ListSink())
    with pytest.raises(AssertionError, match="pass@1"):
        tracker.metrics({"eval/pass@1": 1.0}, 0)
    tracker.close("FAILED")
