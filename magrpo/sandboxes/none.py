"""The sandbox ``none``, for rewards that run nothing."""

from collections.abc import Sequence

from magrpo.errors import ConfigError
from magrpo.interfaces import Progress, Sandbox
from magrpo.plugins import Plugin
from magrpo.types import Execution, ExecutionReport


class NoSandbox(Plugin):
    """For rewards that judge only texts, such as ``writing``. Rejects every program."""

    kind: str = "none"

    def open(self) -> Sandbox:
        return _Nothing()


class _Nothing:
    level = ""

    def run(self, executions: Sequence[Execution], progress: Progress | None = None) -> list[ExecutionReport]:
        if executions:
            raise ConfigError(
                "sandbox.kind = 'none' runs no programs, but the reward, or run_code of the program in env.run, needs "
                "them run; set sandbox.kind = 'pool'"
            )
        return []

    def close(self) -> None:
        """No-op."""
