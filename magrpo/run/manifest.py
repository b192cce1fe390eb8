"""The manifest of a committed stage: its files with their digests, which detect and name damage."""

import hashlib
import json
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec

from magrpo.errors import ConfigError
from magrpo.files.writing import atomic_write, hash_file

MANIFEST = "_SUCCESS"


class FileFacts(TypedDict):
    """A file of a committed stage, as recorded in its manifest."""

    bytes: int
    sha256: str
    pruned: NotRequired[bool]
    """Whether :meth:`magrpo.run.store.RunStore.prune` deleted it."""


class Manifest(TypedDict):
    """The file :data:`MANIFEST` of a committed stage."""

    stage: str
    key: str
    files: dict[str, FileFacts]
    """Each file by its path in the folder."""
    metrics: dict[str, float]
    digest: NotRequired[str]
    """Digest of all other fields."""


def find_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a stage, None if there is none; ConfigError if it is damaged."""
    if not (folder / MANIFEST).exists():
        return None
    manifest = _parse_manifest(folder)
    if manifest is None:
        raise name_damage(folder, f"{MANIFEST} is damaged")
    return manifest


def has_manifest(folder: Path) -> bool:
    """Whether a stage has an undamaged manifest."""
    return _parse_manifest(folder) is not None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a committed stage; ConfigError if it is missing or damaged."""
    manifest = find_manifest(folder)
    if manifest is None:
        raise name_damage(folder, f"{MANIFEST} is missing")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace the manifest of a stage, with its digest."""
    manifest["digest"] = _digest_manifest(manifest)
    atomic_write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def check_files(folder: Path, *names: str) -> None:
    """Compare files of a committed stage, or all files below its folders ``names``, with their digests; by default all.

    Raises ConfigError, naming the folder and the files, if one is damaged or missing. Pruned files are skipped.
    """
    faults = []
    for file, facts in read_manifest(folder)["files"].items():
        is_asked_for = not names or is_below(file, names)
        if is_asked_for and not facts.get("pruned"):
            path = folder / file
            if not path.is_file():
                faults.append(f"{file} is missing")
            elif path.stat().st_size != facts["bytes"] or hash_file(path) != facts["sha256"]:
                faults.append(f"{file} is damaged")
    if faults:
        num_others = len(faults) - 3
        others = f" and {num_others} more" if num_others > 0 else ""
        raise name_damage(folder, ", ".join(faults[:3]) + others)


def is_below(file: str, names: tuple[str, ...]) -> bool:
    """Whether ``file`` is one of ``names``, or lies in one of these folders."""
    return any(Path(file).is_relative_to(name) for name in names)


def name_damage(folder: Path, fault: str) -> ConfigError:
    """Build the error to raise for damaged output of a stage."""
    return ConfigError(f"{folder}: {fault}; delete this folder and resume the run, which computes it again")


def digest(*parts: Any) -> str:
    """Return a short stable digest of plain JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _parse_manifest(folder: Path) -> Manifest | None:
    """Parse the manifest in a folder; None if it is missing or malformed."""
    try:
        manifest = msgspec.convert(json.loads((folder / MANIFEST).read_bytes()), Manifest)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None
    return manifest if manifest.get("digest") == _digest_manifest(manifest) else None


def _digest_manifest(manifest: Manifest) -> str:
    return digest({key: value for key, value in manifest.items() if key != "digest"})
