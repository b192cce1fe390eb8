"""The outbox in front of MLflow: records go to a file at once, and a thread sends them on.

A run never waits for MLflow and never fails because of it. Each record becomes a line of ``tracking.jsonl`` in the run
directory. A thread sends the lines in order and saves its position in ``tracking.sent``. Records that MLflow did not
receive are sent when the run is started again, or by ``magrpo sync RUN_ID``. A process that is killed after sending
records and before saving the position sends them twice, which changes nothing: a metric is stored once for each step,
time and value. An artifact may fail where everything else succeeds, so nothing waits for it: it is tried again at the
end, and until it succeeds the saved position stays before it.
"""

import hashlib
import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from errno import ENOSPC
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from magrpo.files.writing import atomic_write
from magrpo.tracking.connection import RecordRefused, Unavailable

log = logging.getLogger(__name__)

FINAL = ("FINISHED", "FAILED", "KILLED")
"""The final statuses of a run."""
RECORDS = "tracking.jsonl"
"""The file of a run directory that holds its records, one on each line."""
SENT = "tracking.sent"
"""The file of a run directory with the number of bytes of :data:`RECORDS` sent, and the MLflow run that got them."""
FOLDER_TAG = "magrpo.folder"
"""The tag with the id of a run directory, which distinguishes runs of the same name in several roots."""
Record = dict[str, Any]

_KEY = re.compile(r"[A-Za-z0-9_\-.:/ ]{1,250}")
_ALWAYS = ("tags", "status")
"""Kinds of records that are kept even if repeated: tags may return to an old value, and every start and end counts."""
_BATCH = 1000
"""Largest number of records to send at once."""
_RETRY_S = 15.0
"""Seconds between attempts to reach MLflow."""


class Sink(Protocol):
    """The destination of records. All methods raise :class:`Unavailable`."""

    def connect(self) -> str:
        """Find or create the run at the destination; returns its id there. May be called again."""

    def deliver(self, records: Sequence[Record]) -> None:
        """Store records of one kind, or raise :class:`RecordRefused`; twice leaves what once does."""


# ---------------------------------------------------------------------------------------------------------- the files
def encode_record(record: Record) -> bytes:
    """Encode a record as a line with a checksum."""
    text = json.dumps(record)
    return f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}\n'.encode()


def decode_record(line: bytes) -> Record | None:
    """Decode the record in a line; None if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    checksum = record.pop("crc", None) if isinstance(record, dict) else None
    return record if checksum == zlib.crc32(json.dumps(record).encode()) else None


def read_outbox(folder: Path) -> Iterator[Record]:
    """Read the records in a run directory, oldest first, skipping damaged lines and a line that is being written."""
    path = folder / RECORDS
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and (record := decode_record(line)) is not None:
                    yield record


def find_folder_id(folder: Path) -> str:
    """The :data:`FOLDER_TAG` of a run directory; empty if no record has it."""
    tags = (record["values"].get(FOLDER_TAG) for record in read_outbox(folder) if record["kind"] == "tags")
    return next(filter(None, tags), "")


def find_beginning(folder: Path) -> float | None:
    """The time of the first record in a run directory that has one, in seconds since 1970; None if none has."""
    times_ms = (record["time_ms"] for record in read_outbox(folder) if "time_ms" in record)
    first_ms = next(times_ms, None)
    return None if first_ms is None else first_ms / 1000


class Outbox:
    """The records of a run on disk, in order, and the position up to which they were sent. Positions count bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._path, self._sent_path = folder, folder / RECORDS, folder / SENT
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        with self._path.open("rb") as file:
            self.size = sum(len(line) for line in file if line.endswith(b"\n"))
        self._file.truncate(self.size)  # cut off a line that a killed process left unfinished
        sent = self._sent_path.read_bytes().decode(errors="replace") if self._sent_path.is_file() else ""
        found = re.fullmatch(r"([0-9]{1,15}) (.+)", sent)
        self.position, self._destination = (int(found[1]), found[2]) if found else (0, "")
        if self.position > self.size:
            self.position = 0

    def append(self, record: Record) -> None:
        """Append a record. If it cannot be written completely, raises OSError and leaves no part of it."""
        line = encode_record(record)
        if self._file.write(line) < len(line):
            self._file.truncate(self.size)
            raise OSError(ENOSPC, os.strerror(ENOSPC), str(self._path))
        self.size += len(line)

    def choose_destination(self, destination: str) -> bool:
        """Send to the MLflow run with this id; return whether from the first record on, if that is another run."""
        if destination == self._destination:
            return False
        self._destination, self.position = destination, 0
        return True

    def read_next(self) -> tuple[list[Record], int]:
        """The next records to send, all of the same kind and at most ``_BATCH``, and the position after them."""
        records, position = list[Record](), self.position
        with self._path.open("rb") as file:
            file.seek(position)
            for line in islice(file, _BATCH):
                record = decode_record(line)
                if not line.endswith(b"\n") or (records and record and record["kind"] != records[0]["kind"]):
                    break
                position += len(line)
                if record:
                    records.append(self._locate(record))
                else:
                    log.warning("tracking: skipped a damaged line of %s", self._path)
        return records, position

    def _locate(self, record: Record) -> Record:
        """Make the path of an artifact absolute, since the run directory may have moved."""
        if record["kind"] != "artifact":
            return record
        return record | {"path": str(self.folder / record["path"])}

    def save_position(self) -> None:
        """Save that the records before :attr:`position` were sent."""
        atomic_write(self._sent_path, f"{self.position} {self._destination}".encode())

    def count_unsent(self) -> int:
        """The number of records after the position."""
        with self._path.open("rb") as file:
            file.seek(self.position)
            return sum(1 for _ in file)

    def close(self) -> None:
        self._file.close()


# -------------------------------------------------------------------------------------------------------- the tracker
class OutboxTracker:
    """Records one training run: writes to an outbox at once and to a sink in the background; thread-safe.

    A resumed run may repeat its records, so values that the outbox already has are left out. A metric with a new value
    for an old step is recorded: the step was repeated, and the newest value counts.
    """

    def __init__(self, outbox: Outbox, sink: Sink) -> None:
        self._outbox, self._sink = outbox, sink
        self._changed = threading.Condition()
        self._closing = self._failed_to_write = False
        self._failed_artifacts: list[Record] = []
        self.is_connected = False
        """Whether the last call of the sink succeeded."""
        self._known = {name: value for record in read_outbox(outbox.folder) for name, value in _list_facts(record)}
        """The newest facts in the outbox: see :func:`_list_facts`."""
        self._pusher = threading.Thread(target=self._push_records, name="magrpo-tracking", daemon=True)
        self._pusher.start()

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
        stamp = max(file.stat().st_mtime_ns for file in (path, *path.rglob("*")))
        path = path.absolute()
        if path.is_relative_to(self._outbox.folder):  # relative, because the run directory may move
            path = path.relative_to(self._outbox.folder)
        self.append_record({"kind": "artifact", "path": str(path), "folder": folder, "stamp": stamp})

    def record_start(self, began_s: float | None = None) -> None:
        """Record that the run started, or started again, at ``began_s`` in seconds since 1970 (None: now)."""
        time_s = time.time() if began_s is None else began_s
        self.append_record({"kind": "status", "value": "RUNNING", "time_ms": int(time_s * 1000)})

    def record_end(self, status: str) -> None:
        """Record the final status of the run."""
        assert status in FINAL, status
        self.append_record({"kind": "status", "value": status, "time_ms": int(time.time() * 1000)})

    def close(self, status: str) -> None:
        """Record the final status of the run, and :meth:`flush`."""
        self.record_end(status)
        self.flush()

    def flush(self) -> None:
        """Send the remaining records, or warn that some are left. Must be the last call; may wait for timeouts."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._pusher.join()
        if self.num_undelivered:
            log.warning("tracking: %d records could not be delivered; they stay in the outbox", self.num_undelivered)
        self._outbox.close()

    @property
    def num_undelivered(self) -> int:
        return self._outbox.count_unsent() + len(self._failed_artifacts)

    def append_record(self, record: Record) -> None:
        """Append a record, without facts that the outbox already has.

        A record that cannot be written is left out with a warning; the next resume of the run repeats it.
        """
        with self._changed:
            news = {name: value for name, value in _list_facts(record) if self._known.get(name) != value}
            if record["kind"] == "metrics":
                values = {key: value for key, value in record["values"].items() if (key, record["step"]) in news}
                record = record | {"values": values}
            if news or record["kind"] in _ALWAYS:
                self._write(record, news)

    def _write(self, record: Record, news: Mapping[tuple[str, int], str]) -> None:
        try:
            self._outbox.append(record)
        except OSError as error:
            if not self._failed_to_write:
                log.warning("tracking: %s; the run continues, and the next resume records the missing values", error)
            self._failed_to_write = True
        else:
            self._known |= news
            self._changed.notify()

    def _push_records(self) -> None:
        """Send records until :meth:`flush` is called, and then once more. Runs in the thread."""
        failed = closing = False
        while not closing:
            with self._changed:
                if failed:
                    self._changed.wait_for(lambda: self._closing, _RETRY_S)
                else:
                    self._changed.wait_for(lambda: self._closing or not self.is_connected or self._has_unsent())
                closing = self._closing
            try:
                self._push_all()
                if closing:
                    self._push_failed_artifacts()
                failed = False
            except (Unavailable, OSError) as error:
                self.is_connected = False
                if not failed:
                    log.warning("tracking: %s; the run continues, and its records wait in the outbox", error)
                failed = True

    def _has_unsent(self) -> bool:
        return self._outbox.position < self._outbox.size

    def _push_all(self) -> None:
        if not self.is_connected:
            if self._outbox.choose_destination(self._sink.connect()):
                self._failed_artifacts.clear()
            self.is_connected = True
        while self._has_unsent():
            records, position = self._outbox.read_next()
            if records and records[0]["kind"] == "artifact":
                self._deliver_artifacts(records)
            elif records:
                self._deliver(records)
            self._outbox.position = position
            self._save_position()

    def _save_position(self) -> None:
        if not self._failed_artifacts:
            self._outbox.save_position()

    def _deliver_artifacts(self, records: Sequence[Record]) -> None:
        for record in records:
            try:
                self._deliver([record])
            except Unavailable as error:
                if not self._failed_artifacts:
                    log.warning(
                        "tracking: artifact %s: %s; it waits in the outbox, and other records do not wait for it",
                        record["path"],
                        error,
                    )
                self._failed_artifacts.append(record)

    def _push_failed_artifacts(self) -> None:
        """Try the artifacts again that could not be stored. They have been warned about."""
        for record in tuple(self._failed_artifacts):
            with suppress(Unavailable):
                self._deliver([record])
                self._failed_artifacts.remove(record)
        self._save_position()

    def _deliver(self, records: Sequence[Record]) -> None:
        """Deliver records of one kind; if they are refused, deliver each by itself, to skip only the faulty ones."""
        try:
            self._sink.deliver(records)
        except RecordRefused as error:
            if len(records) > 1:
                for record in records:
                    self._deliver([record])
            else:
                log.warning("tracking: MLflow refused a %s record, which is skipped: %s", records[0]["kind"], error)


def check_keys(metrics: Mapping[str, float]) -> None:
    """Assert that MLflow accepts these keys."""
    for key in metrics:
        assert _KEY.fullmatch(key), f"metric key {key!r}: MLflow allows letters, digits, _ - . : / and space"


def _list_facts(record: Record) -> Iterator[tuple[tuple[str, int], str]]:
    """The facts in a record, as pairs of name and value: metrics by key and step, any other record as a whole."""
    if record["kind"] == "metrics":
        yield from (((key, record["step"]), repr(value)) for key, value in record["values"].items())
    else:
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        yield (digest, 0), ""
