"""A tracker that writes to disk at once and delivers in the background, so an outage never delays or ends training.

Every record is first appended to a *spool*, two files in the run directory. A thread delivers from there in batches and
notes in the tracking store how far it is; the rest follows when the run is resumed or by ``magrpo sync RUN_ID``. A
store that was replaced, restored or moved tells by that note what it lacks. Delivering a record twice must change
nothing: a crash may come between a delivery and its note.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from errno import ENOSPC
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

FINAL = ("FINISHED", "FAILED", "KILLED")
"""How a run can end."""
RECORDS = "tracking.jsonl"
"""The file of a run directory that holds its records, one a line."""
DAMAGED = "tracking.damaged.jsonl"
"""What :data:`RECORDS` was before lines that cannot be read were left out of it."""
FOLDER_TAG = "magrpo.folder"
"""The tag with the id of a run directory, by which runs of one name in several roots are told apart."""
Record = dict[str, Any]

_KEY = re.compile(r"[A-Za-z0-9_\-.:/ ]{1,250}")
_KEYED = ("params", "tags", "metrics")  # records of several values, deduplicated one by one
_KINDS = (*_KEYED, "dataset", "artifact", "trace", "status")
_RETRY_S = (1.0, 5.0, 15.0, 60.0)
_BATCH = 1000  # records read and delivered at once
_NOTE_S = 10.0  # between two notes of the position while the run goes on


class Unavailable(Exception):
    """The tracking store cannot be used at the moment."""


class Refused(Exception):
    """The tracking store rejects a record for its content; retrying is pointless."""


class Sink(Protocol):
    """The destination of a spool's records. All methods raise :class:`Unavailable`."""

    uri: str
    """Names the tracking store."""

    def connect(self) -> str:
        """Find or create the run; returns the position noted last, empty if there is none. May be called again."""

    def deliver(self, records: Sequence[Record]) -> None:
        """Store records of one kind, or raise :class:`Refused`; storing them twice changes nothing."""

    def note_position(self, position: str) -> None:
        """Keep the position in the spool up to which records are delivered."""


# ---------------------------------------------------------------------------------------------------------- the files
def encode_record(record: Record) -> bytes:
    """A record as a line with its checksum."""
    text = json.dumps(record)
    return f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}\n'.encode()


def decode_record(line: bytes) -> Record | None:
    """The record of a line; None if it is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("kind") not in _KINDS:
        return None
    checksum = record.pop("crc", None)
    return record if checksum == zlib.crc32(json.dumps(record).encode()) else None


def read_records(folder: Path) -> Iterator[Record]:
    """The records in a run directory, oldest first, without damaged ones and one that is being written."""
    path = folder / RECORDS
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and (record := decode_record(line)) is not None:
                    yield record


def count_damaged(folder: Path) -> int:
    """The number of lines in the records of a run directory that cannot be read."""
    path = folder / RECORDS
    if not path.is_file():
        return int(path.exists())
    with path.open("rb") as file:
        return sum(line.endswith(b"\n") and decode_record(line) is None for line in file)


def find_folder_id(folder: Path) -> str:
    """The :data:`FOLDER_TAG` of a run directory; empty if its records have none."""
    tags = (record["values"].get(FOLDER_TAG) for record in read_records(folder) if record["kind"] == "tags")
    return next(filter(None, tags), "")


class Spool:
    """Records on disk in order, and the position up to which they are delivered.

    ``folder/tracking.jsonl`` holds one record per line and is append-only; opening it leaves out lines that are
    damaged, and one torn by a crash. ``folder/tracking.sent`` holds the position, and the store that it counts for. A
    position is a number of records and the digest of their lines: it fits no other records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._path, self._sent_path = folder, folder / RECORDS, folder / "tracking.sent"
        folder.mkdir(parents=True, exist_ok=True)
        self.num_records, self._size = self._repair()
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(self._size)
        self._lines: list[bytes] = []
        self.seek("")

    def _repair(self) -> tuple[int, int]:
        """Number of records and of their bytes, once damaged lines are left out."""
        if self._path.exists() and not self._path.is_file():
            self._path.rename(self.folder / DAMAGED)
        num_kept = num_lines = size = 0
        if self._path.exists():
            draft = self.folder / f".{RECORDS}"
            with self._path.open("rb") as file, draft.open("wb") as kept:
                for line in file:
                    if not line.endswith(b"\n"):
                        continue
                    num_lines += 1
                    if decode_record(line) is not None:
                        num_kept += 1
                        size += kept.write(line)
            if num_kept < num_lines:
                shutil.copyfile(self._path, self.folder / DAMAGED)
                draft.replace(self._path)
                lost = num_lines - num_kept
                log.warning("tracking: skipped %d damaged lines of %s; they are kept in %s", lost, RECORDS, DAMAGED)
            else:
                draft.unlink()
        return num_kept, size

    def seek(self, position: str) -> None:
        """Deliver from ``position`` on; from the first record on if it does not fit the records."""
        self._lines = []
        number, _, digest = position.partition(" ")
        for count in (int(number) if re.fullmatch(r"[0-9]{1,15}", number) else 0, 0):
            self.num_sent, self._offset, self._hash = 0, 0, hashlib.sha256()
            with self._path.open("rb") as file:
                self._skip(islice(file, count))
            if self.num_sent == count and self.position == f"{count} {digest}":
                return

    @property
    def position(self) -> str:
        """The number of records that are delivered, and the digest of their lines."""
        return f"{self.num_sent} {self._hash.hexdigest()[:16]}"

    def load_position(self, store: str) -> None:
        """Deliver from the position on that was saved for ``store``, from the first record on if there is none."""
        text = self._sent_path.read_bytes().decode(errors="replace") if self._sent_path.is_file() else ""
        position, _, of_store = text.rpartition(" ")
        self.seek(position if of_store == _hash_name(store) else "")

    def save_position(self, store: str) -> None:
        """Save the position for :meth:`load_position`."""
        draft = self._sent_path.with_suffix(".draft")
        draft.write_text(f"{self.position} {_hash_name(store)}")
        draft.replace(self._sent_path)

    def append(self, record: Record) -> None:
        """Append a record. Raises OSError, and leaves it out, if it cannot be written whole."""
        line = encode_record(record)
        if self._file.write(line) < len(line):
            self._file.truncate(self._size)
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(self._path))
        self._size += len(line)
        self.num_records += 1

    def read_pending(self) -> list[Record]:
        """The next records to deliver, at most a batch; they are on disk for good."""
        os.fsync(self._file.fileno())
        with self._path.open("rb") as file:
            file.seek(self._offset)
            self._lines = [line for line in islice(file, _BATCH) if line.endswith(b"\n")]
        return [self._locate(decode_record(line) or {"kind": "tags", "values": {}}) for line in self._lines]

    def _locate(self, record: Record) -> Record:
        """The record, with the path of an artifact where the run directory is now."""
        return record | {"path": str(self.folder / record["path"])} if record["kind"] == "artifact" else record

    def mark_sent(self, count: int) -> None:
        """Note that the next ``count`` of the records read last are delivered."""
        self._skip(iter(self._lines[:count]))
        del self._lines[:count]

    def _skip(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            self._hash.update(line)
            self._offset += len(line)
            self.num_sent += 1

    def close(self) -> None:
        self._file.close()


def _hash_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


# -------------------------------------------------------------------------------------------------------- the tracker
class SpooledTracker:
    """A Tracker that writes to a spool at once and to a sink in the background; thread-safe.

    Values already in the spool are not recorded again, so a resumed run may repeat its records. A metric with another
    value for its step is recorded: the step was repeated, and its newest value counts. ``blocked_s``: seconds spent in
    calls.
    """

    def __init__(self, spool: Spool, sink: Sink) -> None:
        self._spool, self._sink = spool, sink
        self._changed = threading.Condition()
        self._closing = self._appended = self._failed_to_write = False
        self.is_connected = False
        """Whether the sink answered last."""
        self._noted, self._noted_s = "", 0.0
        """The position that the sink has, and when it was noted."""
        self._series: dict[str, dict[int, float]] = defaultdict(dict)
        """The newest values in the spool of each metric by step."""
        self._known: dict[tuple[object, ...], str] = {}
        """The newest values in the spool of all else, by name."""
        self._last_status = 0
        """Number of records up to the newest status."""
        for number, record in enumerate(read_records(spool.folder), 1):
            self._learn(record, number)
        spool.load_position(sink.uri)
        self.blocked_s = 0.0
        self._worker = threading.Thread(target=self._work, name="magrpo-tracking", daemon=True)
        self._worker.start()

    def params(self, params: Mapping[str, object]) -> None:
        self.append_record({"kind": "params", "values": {key: str(value) for key, value in params.items()}})

    def tags(self, tags: Mapping[str, str]) -> None:
        self.append_record({"kind": "tags", "values": dict(tags)})

    def dataset(self, name: str, path: Path, digest: str, context: str) -> None:
        self.append_record({"kind": "dataset", "name": name, "path": str(path), "digest": digest, "context": context})

    def metrics(self, metrics: Mapping[str, float], step: int) -> None:
        check_keys(metrics)
        values = {key: float(value) for key, value in metrics.items()}
        self.append_record({"kind": "metrics", "step": step, "time_ms": int(time.time() * 1000), "values": values})

    def artifact(self, path: Path, folder: str) -> None:
        if not path.exists():
            raise FileNotFoundError(f"artifact {path} does not exist")
        stamp = max(file.stat().st_mtime_ns for file in (path, *path.rglob("*")))
        path = path.absolute()
        if path.is_relative_to(self._spool.folder):  # which may move
            path = path.relative_to(self._spool.folder)
        self.append_record({"kind": "artifact", "path": str(path), "folder": folder, "stamp": stamp})

    def record_start(self, began_s: float | None = None) -> None:
        """Record that the run is under way, again if it had ended, since ``began_s`` (seconds since 1970) or now."""
        time_s = time.time() if began_s is None else began_s
        self.append_record({"kind": "status", "value": "RUNNING", "time_ms": int(time_s * 1000)})

    def record_end(self, status: str, loading: Mapping[str, float] | None = None) -> None:
        """Record how the run ended, and the seconds that it spent loading, by what was loaded."""
        assert status in FINAL, status
        record = {"kind": "status", "value": status, "time_ms": int(time.time() * 1000)}
        self.append_record(record | ({"loading": dict(loading)} if loading else {}))

    def close(self, status: str) -> None:
        """Record how the run ended, and :meth:`flush`."""
        self.record_end(status)
        self.flush()

    def flush(self) -> None:
        """Deliver pending records, or warn that some are left; takes at most the sink's timeouts. The last call."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._worker.join()
        if self.num_undelivered:
            log.warning(
                "tracking: %d records could not be delivered; they stay in the retry queue", self.num_undelivered
            )
        self._spool.close()

    def next_step(self, prefix: str) -> int:
        """The step after the last one at which a metric that starts with ``prefix`` was recorded; 0 at first."""
        return 1 + max((max(values) for key, values in self._series.items() if key.startswith(prefix)), default=-1)

    @property
    def num_undelivered(self) -> int:
        return self._spool.num_records - self._spool.num_sent

    def append_record(self, record: Record) -> None:
        """Append a record without the values already in the spool; ``kind`` selects the sink's method of delivery.

        What cannot be written is left out with a warning: the next resume of the run repeats it.
        """
        start = time.perf_counter()
        with self._changed:
            if record["kind"] in _KEYED:
                values = {key: value for key, value in record["values"].items() if self._is_new(record, key, value)}
                record = record | {"values": values}
                is_new = bool(values)
            else:
                is_new = self._known.get(_name_fact(record)) != record.get("value", "")
            if is_new:
                self._write(record)
            self.blocked_s += time.perf_counter() - start

    def _write(self, record: Record) -> None:
        try:
            self._spool.append(record)
        except OSError as error:
            if not self._failed_to_write:
                log.warning("tracking: %s; the run continues, and the next resume records the missing values", error)
            self._failed_to_write = True
            return
        self._learn(record, self._spool.num_records)
        self._appended = True
        self._changed.notify()

    def _is_new(self, record: Record, key: str, value: float | str) -> bool:
        if record["kind"] == "metrics":
            known: float | None = self._series.get(key, {}).get(record["step"])
            return known is None or not (known == value or (math.isnan(known) and math.isnan(float(value))))
        return self._known.get((record["kind"], key)) != value

    def _learn(self, record: Record, number: int) -> None:
        """Remember the values of the record with this number."""
        kind = record["kind"]
        if kind == "metrics":
            for key, value in record["values"].items():
                self._series[key][record["step"]] = value
        elif kind in _KEYED:
            self._known |= {(kind, key): value for key, value in record["values"].items()}
        else:
            self._known[_name_fact(record)] = record.get("value", "")
        if kind == "status":
            self._last_status = number

    @property
    def _waiting(self) -> bool:
        """Whether to deliver now. Records of earlier processes wait for this one's first, which may supersede them."""
        return self._appended and self.num_undelivered > 0

    def _work(self) -> None:
        failures = 0
        while True:
            with self._changed:
                if failures:
                    self._changed.wait_for(lambda: self._closing, _RETRY_S[min(failures, len(_RETRY_S)) - 1])
                else:
                    self._changed.wait_for(lambda: self._closing or not self.is_connected or self._waiting)
                closing = self._closing
            try:
                if not self.is_connected:
                    self._noted = self._sink.connect()
                    self._spool.seek(self._noted)
                    self.is_connected = True
                if closing or self._waiting:
                    self._drain()
                    self._note_position(_NOTE_S if not closing else 0.0)
                failures = 0
            except (Unavailable, OSError) as error:
                self.is_connected = False
                failures += 1
                if failures == 1:
                    log.warning("tracking: %s; the run continues, and its records wait in the retry queue", error)
            if closing and (failures or not self.num_undelivered):
                return

    def _drain(self) -> None:
        while records := self._spool.read_pending():
            for kind, same in groupby(records, key=itemgetter("kind")):
                if kind == "status":
                    for record in same:
                        self._deliver_status(record)
                else:
                    self._deliver(list(same))
            self._spool.save_position(self._sink.uri)

    def _note_position(self, interval_s: float) -> None:
        """Let the sink keep the position, if the last one is older than ``interval_s``."""
        position, now = self._spool.position, time.perf_counter()
        if position != self._noted and now - self._noted_s >= interval_s:
            self._sink.note_position(position)
            self._noted, self._noted_s = position, now

    def _deliver_status(self, record: Record) -> None:
        if self._spool.num_sent + 1 < self._last_status:
            self._spool.mark_sent(1)  # superseded by a later status
        else:
            self._deliver([record])

    def _deliver(self, records: Sequence[Record]) -> None:
        """Deliver records of one kind; if some are refused, each alone."""
        try:
            self._sink.deliver(records)
        except Refused as error:
            if len(records) > 1:
                for record in records:
                    self._deliver([record])
                return
            log.warning("tracking: MLflow refused a %s record, which is skipped: %s", records[0]["kind"], error)
        self._spool.mark_sent(len(records))


def check_keys(metrics: Mapping[str, float]) -> None:
    """Assert that MLflow accepts these keys."""
    for key in metrics:
        assert _KEY.fullmatch(key), f"metric key {key!r}: MLflow allows letters, digits, _ - . : / and space"


def _name_fact(record: Record) -> tuple[object, ...]:
    """What names a record that holds a single fact; one named so before, with the same value, is a repetition."""
    if record["kind"] == "status":
        return "status", record["time_ms"]
    return record["kind"], hashlib.sha256(json.dumps(record, sort_keys=True).encode()).digest()
