"""CodeContests (AlphaCode, arXiv 2203.07814): contest problems with public, private and generated tests."""

from __future__ import annotations

from typing import ClassVar

from magrpo.plugins import ConfigError
from magrpo.problems.contests import Contest, write_stdin_test
from magrpo.problems.rows import Row
from magrpo.types import Problem


class CodeContests(Contest):
    """CodeContests: ``name, description, public_tests, private_tests, generated_tests``.

    The entry point is ``solve(stdin)``. Feedback may show public tests.
    """

    benchmark: ClassVar[str] = "CodeContests"

    source: str = "deepmind/code_contests"
    """A .jsonl, .jsonl.gz, .json or .parquet file, a hub id, or one file of a hub id: ``owner/name:file``."""
    hub_split: str = "valid+test"
    """Split to read if ``source`` is a hub id."""

    def parse(self, row: Row) -> Problem | None:
        """The problem; None if no public test is short enough."""
        shown = _tests(row, "public_tests")
        hidden = _tests(row, "private_tests") + _tests(row, "generated_tests")
        return self.make_stdin_problem(
            f"CodeContests/{row.read_text('name')}", row.read_text("description"), shown, hidden
        )


def _tests(row: Row, field: str) -> list[str]:
    values = row.values.get(field) or {"input": [], "output": []}
    try:
        return [
            write_stdin_test(given, expected) for given, expected in zip(values["input"], values["output"], strict=True)
        ]
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{row.where}: field {field!r} needs lists 'input' and 'output' of equal length") from None
