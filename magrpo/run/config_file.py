"""The configuration of a run and its copy, by which damage to either is found and mended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from magrpo.config.run import RunConfig
from magrpo.files.writing import atomic_write
from magrpo.plugins import ConfigError, first_line, validate_config

CONFIG = "config.json"
CONFIG_COPY = "config.copy.json"
"""A copy of the configuration with its digest."""


class ConfigFile:
    """The file :data:`CONFIG` in the folder of a run, and :data:`CONFIG_COPY`."""

    def __init__(self, run: Path) -> None:
        self.path, self.copy_path = run / CONFIG, run / CONFIG_COPY

    def exists(self) -> bool:
        """Whether one of the two is there."""
        return self.path.is_file() or self.copy_path.is_file()

    def read(self) -> RunConfig:
        """The configuration; ConfigError if it is damaged, or of another version."""
        return validate_config(RunConfig, self.read_tree(), (), f"{self.path} (written by another version?)")

    def read_tree(self) -> dict[str, Any]:
        """The configuration without validation, from its copy if it is damaged; ConfigError if both are."""
        try:
            copied = self._read_copy()
            tree = json.loads(self.path.read_bytes() if copied is None else copied)
        except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.path} cannot be read ({first_line(error)}); restore it from a backup") from None
        if not isinstance(tree, dict) or not {"agents", "train"} <= tree.keys():
            raise ConfigError(f"{self.path} is not the configuration of a run")
        return tree

    def replace(self, config: RunConfig) -> None:
        """Write or replace the configuration, with its secrets."""
        data = config.resolved(secrets=True).encode()
        self._write_copy(data)
        atomic_write(self.path, data)

    def find_damage(self) -> str:
        """Which of the two is damaged, in words; empty if none is. Early versions kept no copy."""
        copied = self._read_copy()
        if copied is None:
            return f"{CONFIG_COPY} is damaged" if self.copy_path.exists() else ""
        return "" if self.path.is_file() and self.path.read_bytes() == copied else f"{CONFIG} is damaged or was changed"

    def mend(self, make_folder: Callable[[], Path]) -> str:
        """Restore one from the other; a sentence that says so, empty if both are whole.

        What stands in the place of the configuration moves into ``make_folder()``, and so does a folder in the place of
        the copy. Raises ConfigError if neither can be read.
        """
        damage, copied = self.find_damage(), self._read_copy()
        if copied is None:
            self.read()
            if self.copy_path.is_dir():
                self.copy_path.rename(make_folder() / CONFIG_COPY)
            self._write_copy(self.path.read_bytes())
            return damage and f"{damage}: rewritten"
        if not damage:
            return ""
        aside = make_folder()
        if self.path.exists():
            self.path.rename(aside / CONFIG)
        atomic_write(self.path, copied)
        return f"{damage}: restored from {CONFIG_COPY}; the damaged file is in {aside}"

    def _read_copy(self) -> bytes | None:
        """The configuration in the copy; None if there is no copy, or a damaged one."""
        try:
            copy = json.loads(self.copy_path.read_bytes())
            data = str(copy["config"]).encode()
            return data if hashlib.sha256(data).hexdigest() == copy["sha256"] else None
        except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _write_copy(self, data: bytes) -> None:
        copy = {"sha256": hashlib.sha256(data).hexdigest(), "config": data.decode()}
        atomic_write(self.copy_path, json.dumps(copy).encode())
