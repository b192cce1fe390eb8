"""LiveCodeBench (arXiv 2403.07974), code generation: contest problems with public and private tests."""

from __future__ import annotations

import base64
import pickletools
import zlib
from typing import ClassVar, Literal

from magrpo.plugins import ConfigError
from magrpo.problems.contests import Contest, parse_json, parse_starter_code, write_call_test, write_stdin_test
from magrpo.problems.rows import Row
from magrpo.types import Problem

MAX_BYTES = 1 << 30
"""Private tests of a problem are unpacked to this size at most."""
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


class LiveCodeBench(Contest):
    """LiveCodeBench: ``question_id, question_content, starter_code, public_test_cases, private_test_cases, metadata``.

    With starter code the entry point is its function, else ``solve(stdin)``. Public tests may be shown.
    """

    benchmark: ClassVar[str] = "LiveCodeBench"

    source: str = "livecodebench/code_generation_lite:test6.jsonl"
    """A .jsonl, .jsonl.gz, .json or .parquet file, a hub id, or a file of one: ``owner/name:file``."""
    difficulty: tuple[Literal["easy", "medium", "hard"], ...] = ()
    """Take problems of these difficulties only; none: all."""

    def parse(self, row: Row) -> Problem | None:
        """The problem; None for another difficulty or if no public test is short enough."""
        if self.difficulty and row.read_text("difficulty") not in self.difficulty:
            return None
        public = row.read_text("public_test_cases")
        shown = _tests(row, "public_test_cases", public)
        hidden = _tests(row, "private_test_cases", _unpacked(row, "private_test_cases"))
        task_id, statement = f"LiveCodeBench/{row.read_text('question_id')}", row.read_text("question_content")
        if not row.read_text("starter_code").strip():
            return self.make_stdin_problem(task_id, statement, shown, hidden)
        metadata = parse_json(row, "metadata", row.read_text("metadata"))
        if not isinstance(metadata, dict) or "func_name" not in metadata:
            raise ConfigError(f"{row.where}: field 'metadata' has no func_name, but there is starter_code")
        return self.make_call_problem(task_id, statement, parse_starter_code(row, metadata["func_name"]), shown, hidden)


def _tests(row: Row, field: str, text: str) -> list[str]:
    tests = parse_json(row, field, text)
    try:
        return [_test(row, field, test["testtype"], test["input"], test["output"]) for test in tests]
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{row.where}: field {field!r} is not a list of tests with testtype, input, output") from None


def _test(row: Row, field: str, kind: str, given: str, expected: str) -> str:
    """One argument a line if a function is tested."""
    if kind == "functional":
        arguments = [parse_json(row, field, line) for line in given.split("\n") if line]
        return write_call_test(arguments, parse_json(row, field, expected))
    return write_stdin_test(given, expected)


def _unpacked(row: Row, field: str) -> str:
    """JSON as it is, or packed: a text, pickled, compressed, in base 64.

    The pickle is never loaded: its opcodes are read, and nothing but a single text is accepted.
    """
    text = row.read_text(field)
    if text.lstrip().startswith("["):
        return text
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MAX_BYTES)
        found = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    except (ValueError, zlib.error) as error:
        raise ConfigError(f"{row.where}: field {field!r} is neither JSON nor a packed text: {error}") from None
    texts = [value for name, value in found if name in _TEXT]
    if len(texts) != 1 or {name for name, _ in found} - _TEXT - _AROUND:
        raise ConfigError(
            f"{row.where}: field {field!r} holds a pickle of something else than a text; it is not loaded"
        )
    return str(texts[0])
