"""Fingerprints of base models, by which a run notices that the files of its base were replaced."""

import hashlib
from pathlib import Path

from magrpo.files.hub import find_commit

_SUFFIXES = (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt")
"""Files that weights, tokenizers and templates are loaded from."""
_NUM_BLOCKS, _BLOCK_BYTES = 64, 2**16


def fingerprint_model(model: str) -> str:
    """Return the commit of a model of the hub, or a digest of the files in a folder, wherever the folder is.

    Of a large file only blocks at even distances are read: training changes all of its tensors.
    """
    folder = Path(model)
    if not folder.is_dir():
        return find_commit(model)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _SUFFIXES and path.is_file():
            _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        if size <= _NUM_BLOCKS * _BLOCK_BYTES:
            digest.update(file.read())
            return
        for number in range(_NUM_BLOCKS):
            file.seek(number * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
