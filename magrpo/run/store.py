"""The run directory: stage outputs that are either whole or absent.

A run directory holds its resolved configuration and a folder for each committed stage (:mod:`magrpo.run.layout`). A
stage writes into a temporary folder, which is flushed to disk and renamed into place: a kill loses at most the stage in
progress. Its manifest carries a key, the digest of the stage's name, configuration and inputs; a later call with the
same key finds the output and skips the work.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import msgspec

from magrpo.config.run import RunConfig
from magrpo.files import compress
from magrpo.files.locks import lock_folder
from magrpo.files.writing import atomic_write, hash_file, share_files, sync_path
from magrpo.plugins import ConfigError, check_name, first_line
from magrpo.run.config_file import CONFIG, ConfigFile
from magrpo.text import decode_json, encode_json

MANIFEST = "_SUCCESS"
RESERVED = (
    "prefect",
    "sweeps",
    "comparisons",
    "champions",
    "mlartifacts",
    *(f"mlflow.db{end}" for end in ("", "-wal", "-shm")),
)
"""Names in the folder of the runs that no run may have."""
_BLOCK_RECORDS, _BLOCK_BYTES = 64, 2**20  # records written, and bytes of text read, at once
COMPRESSED_HERE = 2**23
"""Largest text, in bytes, that is compressed in this process."""
RecordT = TypeVar("RecordT")


class Pointer(TypedDict):
    """A reference to a committed stage output: small, and plain JSON."""

    dir: str
    """Folder, relative to the run directory."""
    sha: str
    """Digest of the manifest, and so of every file in the folder."""


class FileFacts(TypedDict):
    """A file of a committed stage, as its manifest has it."""

    bytes: int
    sha256: str
    pruned: NotRequired[bool]
    """Whether :meth:`RunStore.prune` deleted it."""


class Manifest(TypedDict):
    """The file :data:`MANIFEST` of a committed stage."""

    stage: str
    key: str
    files: dict[str, FileFacts]
    """By path in the folder."""
    metrics: dict[str, float]
    digest: NotRequired[str]
    """Of all the rest."""


class RunStore:
    """One run directory."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.run_id = run_id
        self.path = (root / run_id).resolve()
        self.config_file = ConfigFile(self.path)
        self._intact: set[str] = set()
        """The stages that :meth:`verify` found undamaged; their files are not read again."""

    @classmethod
    def create(cls, config: RunConfig, name: str | None = None) -> RunStore:
        """A new run directory under ``config.root``; ConfigError if ``name`` is taken or unusable as a folder."""
        run_id = name or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
        store = cls(config.root, check_run_name(run_id))
        store.path.mkdir(parents=True, exist_ok=True)  # it exists if a kill came before the next lines
        with lock_folder(store.path):  # of two that create the run at once, the second one is refused
            if store.exists():
                raise ConfigError(
                    f"run {run_id} exists in {config.root}: choose another name, or: magrpo resume {run_id}"
                )
            store.config_file.replace(config)
        return store

    @classmethod
    def open(cls, root: Path, run_id: str) -> RunStore:
        """An existing run directory.

        Raises ConfigError, with runs of similar names or the newest, if there is none, or if ``run_id`` is no name.
        """
        store = cls(root, check_run_name(run_id))
        if not store.exists():
            runs = sorted((path.parent for path in root.glob(f"*/{CONFIG}")), key=lambda run: run.stat().st_mtime)
            names = [run.name for run in runs]
            if similar := difflib.get_close_matches(run_id, names, n=3):
                raise ConfigError(f"no run {run_id!r} in {root}; did you mean {', '.join(similar)}?")
            newest = ", ".join(names[-5:]) or "none"
            raise ConfigError(f"no run {run_id!r} in {root}; the newest runs there: {newest}")
        return store

    def exists(self) -> bool:
        """Whether there is such a run, with its configuration."""
        return self.config_file.exists()

    def config(self) -> RunConfig:
        """The configuration the run was created with; ConfigError if it is damaged, or of another version."""
        return self.config_file.read()

    def mend_config(self) -> str:
        """See :meth:`magrpo.run.config_file.ConfigFile.mend`."""
        return self.config_file.mend(self._new_folder_aside)

    def is_committed(self, name: str) -> bool:
        """Whether a stage has an output with a readable manifest, whatever its key and the state of its files."""
        return _find_manifest(self.stage_folder(name)) is not None

    def find_damage(self, name: str) -> str:
        """What is wrong with the output of a stage, in words; empty if it is whole, or there is none."""
        folder = self.stage_folder(name)
        if not os.path.lexists(folder):
            return ""
        manifest = _find_manifest(folder)
        if manifest is None:
            return f"{MANIFEST} is damaged" if (folder / MANIFEST).exists() else f"{MANIFEST} is missing"
        if manifest["stage"] != name:
            return f"holds the output of {manifest['stage']}"
        damaged = [file for file, facts in manifest["files"].items() if not _is_intact(folder / file, facts)]
        words = [f"{file} is {'damaged' if (folder / file).exists() else 'missing'}" for file in damaged]
        return ", ".join(words[:3]) + f" and {len(words) - 3} more" * (len(words) > 3)

    def verify(self, name: str) -> str:
        """As :meth:`find_damage`; :meth:`find` trusts the files of an undamaged stage from then on."""
        damage = self.find_damage(name)
        self._intact.discard(name)
        if not damage:
            self._intact.add(name)
        return damage

    def find(self, name: str, key: str | None = None) -> Pointer | None:
        """The committed output of a stage, if it has this key (None: whatever its key) and is undamaged."""
        folder = self.stage_folder(name)
        manifest = _find_manifest(folder)
        if manifest is None or key not in (None, manifest["key"]):
            return None
        is_intact = name in self._intact or all(_is_intact(folder / f, facts) for f, facts in manifest["files"].items())
        return self._pointer(name) if is_intact else None

    def commit(self, name: str, key: str, write: Callable[[Path], Mapping[str, float]]) -> Pointer:
        """Make the files of ``write(folder)``, and the metrics it returns, durable as the output of stage ``name``."""
        target = self.stage_folder(name)
        self._intact.discard(name)
        partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
        for stale in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(stale)
        partial.mkdir(parents=True)
        metrics = {key: float(value) for key, value in write(partial).items()}
        files: dict[str, FileFacts] = {
            str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": hash_file(path)}
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        _write_manifest(partial, {"stage": name, "key": key, "files": files, "metrics": metrics})
        share_files(partial)
        for path in (partial, *partial.rglob("*")):
            sync_path(path)
        if target.is_dir():
            shutil.rmtree(target)
        partial.rename(target)
        sync_path(target.parent)
        return self._pointer(name)

    def metrics(self, pointer: Pointer) -> dict[str, float]:
        """The metrics of a committed stage."""
        return dict(_read_manifest(self.folder(pointer))["metrics"])

    def manifest_of(self, name: str) -> Manifest:
        """The manifest of a committed stage; ConfigError if it has none that can be read."""
        return _read_manifest(self.stage_folder(name))

    def stored_metrics(self, name: str) -> dict[str, float]:
        """The metrics of a committed stage by its name, whatever its key and state."""
        return dict(self.manifest_of(name)["metrics"])

    def file_digest(self, pointer: Pointer, file: str) -> str:
        """SHA-256 of a file of a committed stage."""
        return str(_read_manifest(self.folder(pointer))["files"][file]["sha256"])

    def work_interval(self, pointer: Pointer) -> tuple[float, float]:
        """When the work of a stage began and ended, in seconds since 1970."""
        ended = (self.folder(pointer) / MANIFEST).stat().st_mtime
        stage = Path(pointer["dir"]).name.partition(".")[0]
        return ended - self.metrics(pointer)[f"time/{stage}_s"], ended

    def stage_metrics(self) -> Iterator[tuple[int, str, dict[str, float]]]:
        """Iteration, stage and metrics of everything committed, in no particular order."""
        for path in self.path.glob(f"stages/[0-9]*/[!.]*/{MANIFEST}"):
            manifest = _find_manifest(path.parent)
            if manifest is not None and path.parts[-3].isdecimal():
                yield int(path.parts[-3]), path.parts[-2], manifest["metrics"]

    def stage_folder(self, name: str) -> Path:
        """The folder of a stage by its name, committed or not."""
        return self.path / "stages" / name

    def folder(self, pointer: Pointer) -> Path:
        """The folder a pointer refers to."""
        return self.path / pointer["dir"]

    def prune(self, name: str, *names: str) -> None:
        """Delete large files, and those of folders, that a committed stage no longer needs; it stays committed."""
        folder, manifest = self.stage_folder(name), self.manifest_of(name)
        pruned = [file for file in manifest["files"] if any(Path(file).is_relative_to(name) for name in names)]
        if not all(manifest["files"][file].get("pruned") for file in pruned):
            for file in pruned:
                manifest["files"][file]["pruned"] = True
            times = (folder / MANIFEST).stat()
            _write_manifest(folder, manifest)
            os.utime(folder / MANIFEST, ns=(times.st_atime_ns, times.st_mtime_ns))  # work_interval reads it
        for file in pruned:
            (folder / file).unlink(missing_ok=True)  # a kill may have come after the manifest

    def pruned_files(self, name: str) -> list[str]:
        """The files of a committed stage that :meth:`prune` deleted."""
        return [file for file, facts in self.manifest_of(name)["files"].items() if facts.get("pruned")]

    def set_aside(self, names: Sequence[str]) -> Path:
        """Move the outputs of stages into a new folder of the run and return it; a kill leaves the earlier stages."""
        folder = self._new_folder_aside()
        for name in reversed(names):
            source, target = self.stage_folder(name), folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            sync_path(source.parent)
            sync_path(target.parent)
        return folder

    def _new_folder_aside(self) -> Path:
        parent = self.path / "set-aside"
        parent.mkdir(exist_ok=True)
        folder = parent / str(
            1 + max((int(path.name) for path in parent.iterdir() if path.name.isdecimal()), default=0)
        )
        folder.mkdir()
        return folder

    def _pointer(self, name: str) -> Pointer:
        manifest = self.manifest_of(name)
        digests = {file: facts["sha256"] for file, facts in manifest["files"].items()}
        return {"dir": f"stages/{name}", "sha": digest(manifest["key"], digests)}


def read_json(path: Path, remedy: str = "restore it from a backup") -> Any:
    """What is in a JSON file of a run directory; ConfigError, with the remedy, if it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is damaged ({first_line(error)}): {remedy}") from None


def check_run_name(name: str, longest: int = 200) -> str:
    """Return ``name`` if a run can have it; else ConfigError. Names of runs derived from it may be longer by half."""
    return check_name(name, "run name", RESERVED, longest, signs="-_.")


def digest(*parts: Any) -> str:
    """A short stable digest of plain JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def write_records(path: Path, records: Iterable[Any]) -> None:
    """Write dataclasses as gzipped JSON lines. Equal records give equal bytes. Raises OSError if the disk is full.

    Large files are compressed in a process of their own: that takes three quarters of the CPU time.
    """
    texts, first, size = _encode_blocks(records), [], 0
    for text in texts:
        first.append(text)
        size += len(text)
        if size > COMPRESSED_HERE:
            break
    write = _compress_apart if size > COMPRESSED_HERE else compress.compress_texts
    write(path, chain(first, texts))


def _encode_blocks(records: Iterable[Any]) -> Iterator[bytes]:
    encode_lines, remaining = msgspec.json.Encoder().encode_lines, iter(records)
    while block := list(islice(remaining, _BLOCK_RECORDS)):
        try:
            yield encode_lines(block)
        except UnicodeEncodeError:
            yield b"".join(encode_json(record) + b"\n" for record in block)


def _compress_apart(path: Path, texts: Iterable[bytes]) -> None:
    command = [sys.executable, "-I", "-S", compress.__file__, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # its error follows
            for text in texts:
                process.stdin.write(text)
        _, errors = process.communicate()
    if process.returncode:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2] or f"status {process.returncode}"
        raise OSError(f"{path} could not be compressed ({reason})")


def read_records(path: Path, record_type: type[RecordT]) -> list[RecordT]:
    """Read what :func:`write_records` wrote."""
    decode_lines = msgspec.json.Decoder(record_type).decode_lines
    records: list[RecordT] = []
    with gzip.open(path, "rb") as file:
        while block := b"".join(file.readlines(_BLOCK_BYTES)):
            try:
                records += decode_lines(block)
            except msgspec.DecodeError:
                records += [decode_json(line, record_type) for line in block.splitlines()]
    return records


def merge_metrics(merged: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Add the metrics of another turn: sum ``time/*``, replace every other metric."""
    for key, value in metrics.items():
        merged[key] = merged.get(key, 0.0) + value if key.startswith("time/") else value


def _find_manifest(folder: Path) -> Manifest | None:
    """The manifest of a stage; None if it has none, or a damaged one."""
    try:
        manifest = msgspec.convert(json.loads((folder / MANIFEST).read_bytes()), Manifest)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None
    is_inside = all(".." not in Path(file).parts and not Path(file).is_absolute() for file in manifest["files"])
    return manifest if is_inside and manifest.get("digest") == _digest_manifest(manifest) else None


def _read_manifest(folder: Path) -> Manifest:
    manifest = _find_manifest(folder)
    if manifest is None:
        raise ConfigError(f"{folder / MANIFEST} is damaged or missing: resume the run, which computes the stage again")
    return manifest


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    manifest["digest"] = _digest_manifest(manifest)
    atomic_write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def _digest_manifest(manifest: Manifest) -> str:
    return digest({key: value for key, value in manifest.items() if key != "digest"})


def _is_intact(path: Path, facts: Mapping[str, Any]) -> bool:
    return bool(facts.get("pruned")) or (
        path.is_file() and path.stat().st_size == facts["bytes"] and hash_file(path) == facts["sha256"]
    )
