"""No sandbox: for rewards that run nothing."""

from __future__ import annotations

from collections.abc import Sequence

from magrpo.interfaces import Progress
from magrpo.registry import ConfigError, Plugin
from magrpo.types import Execution, ExecutionReport


class NoSandbox(Plugin):
    """For rewards that judge texts by themselves, like ``writing``. A program is refused."""

    kind: str = "none"

    @property
    def level(self) -> str:
        """Empty: nothing runs."""
        return ""

    def open(self) -> NoSandbox:
        """There is nothing to open."""
        return self

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        """Nothing, of nothing.

        Raises:
            ConfigError: the reward asks for a program to be run.
        """
        if executions:
            raise ConfigError("sandbox: kind 'none' runs no programs and this reward needs them; choose 'pool'")
        return []

    def close(self) -> None:
        """There is nothing to close."""
