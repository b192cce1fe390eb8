"""A tracker that writes to disk at once and delivers in the background, so an outage never delays or ends training.

Every record is first appended to a *spool*, two files in the run directory. A thread delivers from there in batches and
notes how many records are delivered; the rest follows when the run is resumed or by ``magrpo sync RUN_ID``. Delivering
a record twice must change nothing: a crash may come between a delivery and its note.
"""

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

FINAL = ("FINISHED", "FAILED", "KILLED")
"""How a run can end."""
RECORDS = "tracking.jsonl"
"""The file of a run directory that holds its records, one a line."""
Record = dict[str, Any]

_KEY = re.compile(r"[A-Za-z0-9_\-.:/ ]{1,250}")
_KEYED = ("params", "tags", "metrics")  # records of several values, deduplicated one by one
_RETRY_S = (1.0, 5.0, 15.0, 60.0)


class Unavailable(Exception):
    """The tracking store cannot be used at the moment."""


class Refused(Exception):
    """The tracking store rejects a record for its content; retrying is pointless."""


class Sink(Protocol):
    """The destination of a spool's records. Both methods raise :class:`Unavailable`."""

    def connect(self) -> None:
        """Find or create the run; may be called again."""

    def deliver(self, records: Sequence[Record]) -> None:
        """Store records of one kind, or raise :class:`Refused`; storing them twice changes nothing."""


class Spool:
    """Records on disk in order, and the number of those delivered.

    ``folder/tracking.jsonl`` holds one record per line and is append-only; ``folder/tracking.sent`` holds the number of
    delivered records. Opening cuts off a line torn by a crash.
    """

    def __init__(self, folder: Path) -> None:
        self._records_path, self._sent_path = folder / RECORDS, folder / "tracking.sent"
        folder.mkdir(parents=True, exist_ok=True)
        stored = self._records_path.read_bytes() if self._records_path.exists() else b""
        whole = stored[: stored.rfind(b"\n") + 1]
        self._file = self._records_path.open("ab")
        self._file.truncate(len(whole))
        self.records: list[Record] = [json.loads(line) for line in whole.splitlines()]
        self.sent = int(self._sent_path.read_text()) if self._sent_path.exists() else 0

    @property
    def pending(self) -> list[Record]:
        return self.records[self.sent :]

    def append(self, record: Record) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self.records.append(record)

    def mark_sent(self, count: int) -> None:
        self.sent += count
        draft = self._sent_path.with_suffix(".draft")
        draft.write_text(str(self.sent))
        draft.replace(self._sent_path)

    def close(self) -> None:
        self._file.close()


class SpooledTracker:
    """A Tracker that writes to a spool at once and to a sink in the background; thread-safe.

    Values already in the spool are not recorded again, so a resumed run may repeat its records. A metric with another
    value for its step is recorded: the step was repeated, and its newest value counts. ``blocked_s``: seconds spent in
    calls.
    """

    def __init__(self, spool: Spool, sink: Sink) -> None:
        self._spool, self._sink = spool, sink
        self._changed = threading.Condition()
        self._closing = self._connected = self._appended = False
        self._known = {fact: value for record in spool.records for fact, value in _facts(record)}
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
        self.append_record({"kind": "artifact", "path": str(path.absolute()), "folder": folder, "stamp": stamp})

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
        if self._spool.pending:
            log.warning("tracking: %d records could not be delivered; they are kept", len(self._spool.pending))
        self._spool.close()

    def next_step(self, prefix: str) -> int:
        """The step after the last one at which a metric that starts with ``prefix`` was recorded; 0 at first."""
        metrics = (record for record in self._spool.records if record["kind"] == "metrics")
        steps = (record["step"] for record in metrics if any(key.startswith(prefix) for key in record["values"]))
        return 1 + max(steps, default=-1)

    @property
    def num_undelivered(self) -> int:
        return len(self._spool.pending)

    def append_record(self, record: Record) -> None:
        """Append a record without the values already in the spool; ``kind`` selects the sink's method of delivery."""
        start = time.perf_counter()
        with self._changed:
            fresh = {fact: value for fact, value in _facts(record) if self._known.get(fact) != value}
            if record["kind"] in _KEYED:
                record["values"] = {k: v for k, v in record["values"].items() if _fact(record, k) in fresh}
            if fresh:
                self._known |= fresh
                self._spool.append(record)
                self._appended = True
                self._changed.notify()
            self.blocked_s += time.perf_counter() - start

    @property
    def _waiting(self) -> bool:
        """Whether to deliver now. Records of earlier processes wait for this one's first, which may supersede them."""
        return self._appended and bool(self._spool.pending)

    def _work(self) -> None:
        failures = 0
        while True:
            with self._changed:
                if failures:
                    self._changed.wait_for(lambda: self._closing, _RETRY_S[min(failures, len(_RETRY_S)) - 1])
                else:
                    self._changed.wait_for(lambda: self._closing or not self._connected or self._waiting)
                closing = self._closing
            try:
                if not self._connected:
                    self._sink.connect()
                    self._connected = True
                if closing or self._waiting:
                    self._drain()
                failures = 0
            except Unavailable as error:
                failures += 1
                if failures == 1:
                    log.warning("tracking: %s; the run goes on and its records are kept until it answers", error)
            if closing and (failures or not self._spool.pending):
                return

    def _drain(self) -> None:
        while pending := self._spool.pending:
            kind, leading = next(groupby(pending, key=itemgetter("kind")))
            if kind == "status" and any(later["kind"] == "status" for later in pending[1:]):
                self._spool.mark_sent(1)  # superseded by a later status
            else:
                self._deliver(list(leading))

    def _deliver(self, records: Sequence[Record]) -> None:
        """Deliver records of one kind; if some are refused, each alone."""
        try:
            self._sink.deliver(records)
        except Refused as error:
            if len(records) > 1:
                for record in records:
                    self._deliver([record])
                return
            log.warning("tracking: a %s record was refused and left out: %s", records[0]["kind"], error)
        self._spool.mark_sent(len(records))


def check_keys(metrics: Mapping[str, float]) -> None:
    """Assert that MLflow accepts these keys."""
    for key in metrics:
        assert _KEY.fullmatch(key), f"metric key {key!r}: MLflow allows letters, digits, _ - . : / and space"


def _fact(record: Record, key: str) -> tuple[object, ...]:
    return (record["kind"], key, record.get("step"))


def _facts(record: Record) -> Iterator[tuple[tuple[object, ...], str]]:
    """The facts of a record, name and value as text; a fact recorded before with the same value is a repetition."""
    if record["kind"] in _KEYED:
        yield from ((_fact(record, key), str(value)) for key, value in record["values"].items())
    elif record["kind"] == "status":
        yield ("status", record["time_ms"]), record["value"]
    else:
        whole = json.dumps(record, sort_keys=True).encode()
        yield (record["kind"], hashlib.sha256(whole).digest()), ""
