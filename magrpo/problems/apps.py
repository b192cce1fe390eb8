"""APPS (arXiv 2105.09938): contest and interview problems, each with one list of tests."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from magrpo.plugins import ConfigError
from magrpo.problems.contests import Contest, parse_json, parse_starter_code, write_call_test, write_stdin_test
from magrpo.problems.rows import Row
from magrpo.types import Problem


class Apps(Contest):
    """APPS: ``problem_id, question, starter_code, difficulty, input_output``.

    The entry point is the starter code's function if ``input_output`` names one, else ``solve(stdin)``.
    """

    benchmark: ClassVar[str] = ""

    source: str = "codeparrot/apps:train.jsonl"
    """A .jsonl, .jsonl.gz, .json or .parquet file, a hub id, or one file of a hub id: ``owner/name:file``."""
    difficulty: tuple[Literal["introductory", "interview", "competition"], ...] = ()
    """Difficulties to include. Empty: all."""
    shown_tests: int = Field(1, ge=1)
    """Number of tests of a problem, from the first, that feedback may show; the others are hidden."""

    def parse(self, row: Row) -> Problem | None:
        """The problem; None if its difficulty is excluded, no test is short enough, or a function has no signature."""
        if self.difficulty and row.read_text("difficulty") not in self.difficulty:
            return None
        text = row.read_text("input_output")
        values = parse_json(row, "input_output", text) if text.strip() else {"inputs": [], "outputs": []}
        try:
            pairs = zip(values["inputs"], values["outputs"], strict=True)
            name = values.get("fn_name")
            tests = [_write_call(*pair) if name else write_stdin_test(*map(_join_lines, pair)) for pair in pairs]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{row.where}: field 'input_output' needs inputs and outputs of equal length") from None
        tests = [test for test in tests if len(test) <= self.max_test_chars]
        shown, hidden = tests[: self.shown_tests], tests[self.shown_tests :]
        number = row.values.get("problem_id", row.values.get("id", row.where))
        task_id, statement = f"APPS/{number}", row.read_text("question")
        if not name:
            return self.make_stdin_problem(task_id, statement, shown, hidden)
        if not row.read_text("starter_code").strip():
            return None
        return self.make_call_problem(task_id, statement, parse_starter_code(row, name), shown, hidden)


def _write_call(arguments: list[Any], expected: Any) -> str:
    """Some rows wrap the result in a list, without saying so: both forms are accepted."""
    wrapped = isinstance(expected, list) and len(expected) == 1
    return write_call_test(arguments, expected, expected[0]) if wrapped else write_call_test(arguments, expected)


def _join_lines(value: Any) -> str:
    """Some rows hold a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
