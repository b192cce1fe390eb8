"""Gzip files of equal bytes for equal text; as a script it compresses standard input, in a process of its own.

Standard library only: the script starts in some milliseconds under ``python -I -S``.
"""

import gzip
import sys
from collections.abc import Iterable
from pathlib import Path


def compress_texts(path: Path, texts: Iterable[bytes]) -> None:
    """Write ``texts``, one after another, into the gzip file ``path``. Their boundaries leave no trace in it."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as file:
        for text in texts:
            file.write(text)


if __name__ == "__main__":
    compress_texts(Path(sys.argv[1]), iter(lambda: sys.stdin.buffer.read(2**20), b""))
