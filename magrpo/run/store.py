"""The run directory: stage outputs that are either whole or absent.

A run directory holds its resolved configuration and a folder for each committed stage (:mod:`magrpo.run.files`). A
stage writes into a temporary folder, which is flushed to disk and renamed into place, so that a kill loses at most the
stage in progress. The manifest of a stage (:mod:`magrpo.run.manifest`) carries a key: the digest of the stage's name,
configuration and inputs. A later call with the same key finds the output and skips the work.
"""

from __future__ import annotations

import difflib
import gzip
import json
import os
import shlex
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import msgspec

from magrpo.config.run import RunConfig
from magrpo.config.validate import validate_config
from magrpo.errors import ConfigError, check_name, first_line
from magrpo.files.locks import lock_folder
from magrpo.files.writing import DRAFT, atomic_write, hash_file, share_files, sync_path
from magrpo.process.environment import find_command, shorten_path
from magrpo.run.manifest import (
    MANIFEST,
    FileFacts,
    Manifest,
    check_files,
    digest,
    find_manifest,
    has_manifest,
    is_below,
    name_damage,
    read_manifest,
    write_manifest,
)

CONFIG = "config.json"
"""File in the run directory with its configuration."""
ENDED = "ended.json"
"""File with the number of iterations after which ``train.max_tokens`` ended training, before the planned number."""
RESERVED = (
    "prefect",
    "studies",
    "comparisons",
    "champions",
    "mlartifacts",
    *(f"mlflow.db{end}" for end in ("", "-wal", "-shm")),
)
"""Names that no run may have, because they mean something else in the folder of the runs."""
_BLOCK_BYTES = 2**20  # bytes of text that are read at once
RecordT = TypeVar("RecordT")


class Pointer(TypedDict):
    """A reference to a committed stage output: small, and plain JSON."""

    dir: str
    """Folder, relative to the run directory."""
    sha: str
    """Digest of the manifest, and thereby of every file in the folder."""


class RunStore:
    """One run directory."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.run_id = run_id
        # The folder itself may be a link to another disk, and still belongs to this root.
        self.path = root.resolve() / run_id
        self._checked: set[str] = set()
        """Folders of outputs that this object has committed or checked; they are not read again for a check."""

    @classmethod
    def create(cls, config: RunConfig, name: str | None = None) -> RunStore:
        """Create a run directory under ``config.root``.

        Raises ConfigError if ``name`` is no valid folder name or is taken, by a run or by a folder with other files.
        """
        run_id = name or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
        store = cls(config.root, check_run_name(run_id))
        store.path.mkdir(parents=True, exist_ok=True)  # exists if a kill came before the next lines
        with lock_folder(store.path):  # of two processes that create the run at once, the second one is refused
            if store.exists():
                raise ConfigError(
                    f"run {run_id} exists in {config.root}: choose another name, or: {store.format_command('resume')}"
                )
            if any(path.name != DRAFT.format(CONFIG) for path in store.path.iterdir()):
                raise ConfigError(f"{store.path} contains other files: choose another name")
            store.write_config(config)
        return store

    @classmethod
    def open(cls, root: Path, run_id: str) -> RunStore:
        """Open an existing run directory, by its name or by its path below ``root``.

        Raises ConfigError if ``run_id`` is no valid name, is a path to elsewhere, or has no run; it suggests similar
        names, or the newest runs.
        """
        if os.sep in run_id:
            path = Path(run_id)
            if (folder := path.parent.resolve()) != root.resolve():
                raise ConfigError(
                    f"{run_id} is not in {root}: name its folder of runs, --root {shlex.quote(shorten_path(folder))}"
                )
            run_id = path.name
        store = cls(root, check_run_name(run_id))
        if not store.exists():
            runs = sorted((path.parent for path in root.glob(f"*/{CONFIG}")), key=lambda run: run.stat().st_mtime)
            names = [run.name for run in runs]
            if similar := difflib.get_close_matches(run_id, names, n=3):
                raise ConfigError(f"no run {run_id!r} in {root}; did you mean {', '.join(similar)}?")
            newest = ", ".join(names[-5:]) or "none"
            raise ConfigError(f"no run {run_id!r} in {root}; the newest runs there: {newest}")
        return store

    def format_arguments(self, *, from_anywhere: bool = False) -> str:
        """Format the arguments by which a command finds the run: ``one``, or ``one --root 'my runs'``.

        They are for the working directory, or with an absolute root ``from_anywhere``.
        """
        root = self.path.parent
        if root == Path("runs").resolve() and not from_anywhere:
            return self.run_id
        return f"{self.run_id} --root {shlex.quote(str(root) if from_anywhere else shorten_path(root))}"

    def format_command(self, command: str, *, from_anywhere: bool = False) -> str:
        """Format a command on the run, as ``magrpo resume one``, for the working directory or ``from_anywhere``."""
        program = "magrpo" if from_anywhere else find_command("magrpo")
        return f"{program} {command} {self.format_arguments(from_anywhere=from_anywhere)}"

    # ----------------------------------------------------------------------------------------------- configuration
    def exists(self) -> bool:
        """Whether the run and its configuration exist."""
        return (self.path / CONFIG).is_file()

    def config(self) -> RunConfig:
        """Load the configuration, with the last iteration at which training ended if that was before the planned one.

        Raises ConfigError if it is unreadable or of another version.
        """
        return self._validate_config(self.config_tree())

    def planned_config(self) -> RunConfig:
        """Load the configuration the run was created with; ConfigError if it is unreadable or of another version."""
        return self._validate_config(self._planned_tree())

    def _validate_config(self, tree: dict[str, Any]) -> RunConfig:
        return validate_config(RunConfig, tree, (), f"{self.path / CONFIG} (written by another version?)")

    def config_tree(self) -> dict[str, Any]:
        """Load what :meth:`config` does without validation; ConfigError if it is unreadable or is something else."""
        tree, path = self._planned_tree(), self.path / ENDED
        if path.exists():
            remedy = "delete it; the next resume writes it again"
            ended = read_json(path, remedy)
            if not (isinstance(ended, dict) and isinstance(tree["train"], dict)):
                raise ConfigError(f"{path} is damaged: {remedy}")
            tree["train"] |= ended
        return tree

    def end_training(self, iteration: int) -> RunConfig:
        """Make ``iteration`` the last one of the run for all who read its configuration; return that."""
        if self.planned_config().train.num_iterations != iteration:
            atomic_write(self.path / ENDED, json.dumps({"num_iterations": iteration}).encode())
        return self.config()

    def _planned_tree(self) -> dict[str, Any]:
        path = self.path / CONFIG
        tree = read_json(path)
        if not isinstance(tree, dict) or not {"agents", "train"} <= tree.keys():
            raise ConfigError(f"{path} is not the configuration of a run")
        return tree

    def write_config(self, config: RunConfig) -> None:
        """Write or replace the configuration, with its secrets."""
        atomic_write(self.path / CONFIG, config.resolved(secrets=True).encode())

    # ------------------------------------------------------------------------------------------- committing, finding
    def is_committed(self, output: str) -> bool:
        """Whether a stage has an output with an undamaged manifest, whatever its key and the state of its files."""
        return has_manifest(self.stage_folder(output))

    def find(self, output: str, key: str | None = None) -> Pointer | None:
        """Return the committed output of a stage if it has this key (None: any key), without reading its files.

        Raises ConfigError, naming the folder, if the manifest is damaged.
        """
        manifest = find_manifest(self.stage_folder(output))
        if manifest is None or (key is not None and key != manifest["key"]):
            return None
        return self._pointer(output, manifest)

    def commit(self, output: str, key: str, write: Callable[[Path], Mapping[str, float]]) -> Pointer:
        """Commit the files that ``write(folder)`` writes and the metrics it returns as ``output``."""
        target = self.stage_folder(output)
        partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
        for stale in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(stale)
        partial.mkdir(parents=True)
        try:
            metrics = {metric: float(value) for metric, value in write(partial).items()}
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # it may have filled the disk
            raise
        files: dict[str, FileFacts] = {
            str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": hash_file(path)}
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        manifest: Manifest = {"stage": output, "key": key, "files": files, "metrics": metrics}
        write_manifest(partial, manifest)
        share_files(partial)
        for path in (partial, *partial.rglob("*")):
            sync_path(path)
        if target.is_dir():
            shutil.rmtree(target)
        partial.rename(target)
        sync_path(target.parent)
        pointer = self._pointer(output, manifest)
        self._checked.add(pointer["dir"])
        return pointer

    def set_aside(self, outputs: Sequence[str]) -> Path:
        """Move ``outputs``, in order of their steps, into a new folder of the run and return it.

        After a kill in between, the earlier ones are where they were. Training may end at another iteration afterwards,
        if ``train.max_tokens`` decides.
        """
        parent = self.path / "set-aside"
        parent.mkdir(exist_ok=True)
        taken = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
        folder = parent / str(1 + max(taken, default=0))
        folder.mkdir()
        for output in reversed(outputs):
            source = self.stage_folder(output)
            target = folder / output
            target.parent.mkdir(parents=True, exist_ok=True)
            if output == outputs[0]:  # not earlier: after a kill, the old end still tells which outputs there are
                (self.path / ENDED).unlink(missing_ok=True)
            source.rename(target)
            sync_path(source.parent)
            sync_path(target.parent)
        return folder

    def pointer(self, output: str) -> Pointer:
        """Return the reference to a committed stage, whatever the state of its files."""
        return self._pointer(output, self.manifest_of(output))

    def _pointer(self, output: str, manifest: Manifest) -> Pointer:
        digests = {file: facts["sha256"] for file, facts in manifest["files"].items()}
        return {"dir": f"stages/{output}", "sha": digest(manifest["key"], digests)}

    # ----------------------------------------------------------------------------------------------------- reading
    def stage_folder(self, output: str) -> Path:
        """Return the folder of an output by its name (:attr:`magrpo.run.steps.Step.output`), committed or not."""
        return self.path / "stages" / output

    def folder(self, pointer: Pointer) -> Path:
        """Return the folder a pointer refers to."""
        return self.path / pointer["dir"]

    def check_files(self, pointer: Pointer, *names: str) -> None:
        """Compare the files ``names`` of a stage, or all files below such folders, with their digests; by default all.

        Files that this object has committed or checked are not read again. Raises ConfigError, naming the folder
        and the files, if one is damaged or missing.
        """
        if pointer["dir"] in self._checked:
            return
        check_files(self.folder(pointer), *names)
        if not names:
            self._checked.add(pointer["dir"])

    def metrics(self, pointer: Pointer) -> dict[str, float]:
        """Return the metrics of a committed stage."""
        return read_manifest(self.folder(pointer))["metrics"]

    def manifest_of(self, output: str) -> Manifest:
        """Read the manifest of a committed stage; ConfigError if it is missing or damaged."""
        return read_manifest(self.stage_folder(output))

    def stage_metrics(self) -> Iterator[tuple[int, str, dict[str, float]]]:
        """Yield iteration, stage and metrics of everything committed, in no particular order."""
        for path in self.path.glob(f"stages/[0-9]*/[!.]*/{MANIFEST}"):
            iteration, stage = path.parts[-3:-1]
            if iteration.isdecimal():
                yield int(iteration), stage, read_manifest(path.parent)["metrics"]

    def file_digest(self, pointer: Pointer, file: str) -> str:
        """Return the SHA-256 digest of a file of a committed stage."""
        return read_manifest(self.folder(pointer))["files"][file]["sha256"]

    def work_interval(self, pointer: Pointer) -> tuple[float, float]:
        """Return when the work of a stage began and ended, in seconds since 1970."""
        ended = (self.folder(pointer) / MANIFEST).stat().st_mtime
        [seconds] = [value for key, value in self.metrics(pointer).items() if key.startswith("time/")]
        return ended - seconds, ended

    # ----------------------------------------------------------------------------------------------------- pruning
    def prune(self, output: str, *files: str) -> None:
        """Delete large files, or all files of folders, that a committed stage no longer needs; it stays committed."""
        folder = self.stage_folder(output)
        manifest = self.manifest_of(output)
        pruned = [file for file in manifest["files"] if is_below(file, files)]
        if not all(manifest["files"][file].get("pruned") for file in pruned):
            for file in pruned:
                manifest["files"][file]["pruned"] = True
            times = (folder / MANIFEST).stat()
            write_manifest(folder, manifest)
            os.utime(folder / MANIFEST, ns=(times.st_atime_ns, times.st_mtime_ns))  # work_interval reads the time
        for file in pruned:
            (folder / file).unlink(missing_ok=True)  # already gone if an earlier prune was killed after the manifest

    def pruned_files(self, output: str) -> list[str]:
        """List the files of a committed stage that :meth:`prune` deleted."""
        return [file for file, facts in self.manifest_of(output)["files"].items() if facts.get("pruned")]


def read_json(path: Path, remedy: str = "restore it from a backup") -> Any:
    """Read a JSON file of a run directory; ConfigError, with the remedy, if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({first_line(error)}): {remedy}") from None


def check_run_name(name: str, longest: int = 200) -> str:
    """Return ``name`` if it is a valid run name, else ConfigError. Names derived from it may be longer by half."""
    return check_name(name, "run name", RESERVED, longest, signs="-_.")


def name_after(file: Path, longest: int = 200) -> str:
    """Return the name that a run takes from ``file``; ConfigError if no run can have it."""
    try:
        return check_run_name(file.stem, longest)
    except ConfigError as error:
        raise ConfigError(f"{error}; give one with --name") from None


def write_records(path: Path, records: Iterable[Any]) -> None:
    """Write dataclasses as gzipped JSON lines. Equal records give equal bytes. Raises OSError if the disk is full."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as file:
        for record in records:
            file.write(encoder.encode(record) + b"\n")


def read_records(path: Path, record_type: type[RecordT]) -> list[RecordT]:
    """Read records written by :func:`write_records`; ConfigError, naming the file, if it is missing or damaged."""
    decode_lines = msgspec.json.Decoder(record_type).decode_lines
    records: list[RecordT] = []
    try:
        with gzip.open(path, "rb") as file:
            while block := b"".join(file.readlines(_BLOCK_BYTES)):
                records += decode_lines(block)
    except FileNotFoundError:
        raise name_damage(path.parent, f"{path.name} is missing") from None
    except (gzip.BadGzipFile, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise name_damage(path.parent, f"{path.name} is damaged ({first_line(error)})") from None
    return records


def sort_stages(metrics: Iterable[tuple[int, str, Mapping[str, float]]]) -> list[tuple[int, str, Mapping[str, float]]]:
    """Sort metrics of stages by iteration, stage and turn: ``rollout.10`` follows ``rollout.9``."""

    def make_sort_key(entry: tuple[int, str, Mapping[str, float]]) -> tuple[int, str, int, str]:
        stage, _, part = entry[1].partition(".")
        return entry[0], stage, len(part), part

    return sorted(metrics, key=make_sort_key)


def merge_metrics(merged: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Merge the metrics of another turn into ``merged``: sum ``time/*``, replace every other metric."""
    for key, value in metrics.items():
        merged[key] = merged.get(key, 0.0) + value if key.startswith("time/") else value
