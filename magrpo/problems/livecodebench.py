"""LiveCodeBench (arXiv 2403.07974): contest problems with public and private tests."""

import base64
import pickletools
import zlib
from typing import ClassVar, Literal

from magrpo.plugins import ConfigError
from magrpo.problems.contests import Contest, parse_json, parse_starter_code, write_call_test, write_stdin_test
from magrpo.problems.rows import DatasetRow
from magrpo.types import Problem

MAX_BYTES = 1 << 30
"""Maximum size of a problem's private tests after decompression, in bytes."""
# Opcodes of a pickle that hold a text, and those that may stand around a single text.
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


class LiveCodeBench(Contest):
    """LiveCodeBench: ``question_id, question_content, starter_code, public_test_cases, private_test_cases, metadata``.

    The entry point is the starter code's function if any, else ``solve(stdin)``. Feedback may show public tests.
    """

    benchmark: ClassVar[str] = "LiveCodeBench"

    source: str = "livecodebench/code_generation_lite:test6.jsonl"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, a hub id, or one file of a hub data set:
    ``owner/name:file``."""
    difficulty: tuple[Literal["easy", "medium", "hard"], ...] = ()
    """Difficulties to include. Empty: all."""

    def parse(self, row: DatasetRow) -> Problem | None:
        """The problem; None if its difficulty is excluded or no public test is short enough."""
        if self.difficulty and row.read_text("difficulty") not in self.difficulty:
            return None
        shown = _write_tests(row, "public_test_cases", row.read_text("public_test_cases"))
        hidden = _write_tests(row, "private_test_cases", _unpack_json(row, "private_test_cases"))
        task_id = f"LiveCodeBench/{row.read_text('question_id')}"
        statement = row.read_text("question_content")
        function = None
        if row.read_text("starter_code").strip():
            metadata = parse_json(row, "metadata", row.read_text("metadata"))
            if not isinstance(metadata, dict) or "func_name" not in metadata:
                raise ConfigError(f"{row.where}: field 'metadata' has no func_name, although there is starter_code")
            function = parse_starter_code(row, metadata["func_name"])
        return self.make_problem(task_id, statement, function, shown, hidden)


def _write_tests(row: DatasetRow, field: str, text: str) -> list[str]:
    """Write the sources of the tests in a field. The input of a function's test has one argument on each line."""
    sources = []
    try:
        for test in parse_json(row, field, text):
            kind, given, expected = test["testtype"], test["input"], test["output"]
            if kind == "functional":
                arguments = [parse_json(row, field, line) for line in given.split("\n") if line]
                sources.append(write_call_test(arguments, parse_json(row, field, expected)))
            else:
                sources.append(write_stdin_test(given, expected))
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{row.where}: field {field!r} is not a list of tests with testtype, input, output") from None
    return sources


def _unpack_json(row: DatasetRow, field: str) -> str:
    """Read the JSON of a field, which may be packed: a text, pickled, compressed and encoded in base 64.

    The pickle is never loaded, because that could run code. Its opcodes are read, and only a single text is accepted.
    """
    text = row.read_text(field)
    if text.lstrip().startswith("["):
        return text
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MAX_BYTES)
        found = [(code.name, value) for code, value, _ in pickletools.genops(data)]
    except (ValueError, zlib.error) as error:
        raise ConfigError(f"{row.where}: field {field!r} is neither JSON nor packed JSON: {error}") from None
    texts = [value for name, value in found if name in _TEXT]
    if len(texts) != 1 or {name for name, _ in found} - _TEXT - _AROUND:
        message = "contains a pickle of something other than a string, which is never loaded"
        raise ConfigError(f"{row.where}: field {field!r} {message}")
    return str(texts[0])
