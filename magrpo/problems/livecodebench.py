"""LiveCodeBench (arXiv 2403.07974): contest problems with public and private tests.

A problem about standard input and output becomes a function ``solve(stdin: str) -> str``. Every test is then a call:
two agents can share the work, the program never reads or prints, and its result is compared outside its process.
"""

import ast
import base64
import json
import pickletools
import zlib
from typing import Any, ClassVar, Literal

from pydantic import Field

from magrpo.errors import ConfigError, quote_value
from magrpo.problems.files import FileProblems, format_docstring, format_signature, indent_body
from magrpo.problems.rows import DatasetRow
from magrpo.types import Problem

MAX_BYTES = 1 << 30
"""Maximum size of a problem's private tests after decompression, in bytes."""
# Opcodes of a pickle that hold a text, and those that may stand around a single text.
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_AROUND = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}

_STDIN = "def solve(stdin: str) -> str:\n"
_NOTE = "Do not read and print: `stdin` is the whole input, and the function returns the whole output."
_TYPES = "from typing import Dict, List, Optional, Set, Tuple\n\n\n"
_PRINTED = '''\
from decimal import Decimal, InvalidOperation


def number(token):
    try:
        value = Decimal(token)
        return value if value == value else token
    except InvalidOperation:
        return token


def printed(text):
    """The tokens of each line: white space at both ends and between tokens does not matter, 1.50 is 1.5."""
    return [[number(token) for token in line.split()] for line in text.strip().split("\\n")]


'''


class LiveCodeBench(FileProblems):
    """LiveCodeBench: ``question_id, question_content, starter_code, public_test_cases, private_test_cases, metadata``.

    The entry point is the starter code's function if any, else ``solve(stdin)``. Feedback may show public tests.
    """

    benchmark: ClassVar[str] = "LiveCodeBench"
    hidden_tests: ClassVar[bool] = True

    source: str = "livecodebench/code_generation_lite:test6.jsonl"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, a hub id, or one file of a hub data set:
    ``owner/name:file``."""
    difficulty: tuple[Literal["easy", "medium", "hard"], ...] = ()
    """Difficulties to include. Empty: all."""
    max_tests: int = Field(20, ge=1)
    """Maximum number of shown tests, and of hidden tests, per problem; the first tests that are short enough are
    taken."""
    max_test_chars: int = Field(4000, ge=1)
    """Maximum length of a test in characters, input and output together. Longer tests are left out, and so are problems
    with no shorter test to show."""

    def parse(self, row: DatasetRow) -> Problem | None:
        """The problem; None if its difficulty is excluded or no public test is short enough."""
        if self.difficulty and row.read_text("difficulty") not in self.difficulty:
            return None
        shown = self._write_tests(row, "public_test_cases", row.read_text("public_test_cases"))
        hidden = self._write_tests(row, "private_test_cases", _unpack_json(row, "private_test_cases"))
        task_id = f"LiveCodeBench/{row.read_text('question_id')}"
        statement = row.read_text("question_content")
        if row.read_text("starter_code").strip():
            function = _parse_starter_code(row)
            entry_point, header, definitions = function.name, f"{_TYPES}{format_signature(function)}\n", ""
        else:
            entry_point, header, definitions = "solve", _STDIN, _PRINTED
            statement = f"{statement.strip()}\n\n{_NOTE}"
        checks = []
        for tests in (shown, hidden):
            body = "".join(f"    {test}\n" for test in tests[: self.max_tests])
            checks.append(f"{definitions}def check(candidate):\n{body}" if body else "")
        prompt = header + indent_body(format_docstring(statement))
        return Problem(task_id, prompt, entry_point, checks[0], hidden_test=checks[1]) if checks[0] else None

    def _write_tests(self, row: DatasetRow, field: str, text: str) -> list[str]:
        """Write the sources of the short tests in a field. A function's input has one argument on each line."""
        sources = []
        try:
            for test in _parse_json(row, field, text):
                kind, given, expected = test["testtype"], test["input"], test["output"]
                if len(given) + len(expected) > self.max_test_chars:
                    continue
                if kind == "functional":
                    arguments = ", ".join(repr(_parse_json(row, field, line)) for line in given.split("\n") if line)
                    sources.append(f"assert candidate({arguments}) == {_parse_json(row, field, expected)!r}")
                else:  # white space and the format of numbers do not matter
                    sources.append(f"assert printed(candidate({given!r})) == printed({expected!r})")
        except (KeyError, TypeError, AttributeError):
            message = "is not a list of tests with testtype, input, output"
            raise ConfigError(f"{row.where}: field {field!r} {message}") from None
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


def _parse_starter_code(row: DatasetRow) -> ast.FunctionDef:
    """Parse the function in ``starter_code`` that ``metadata`` names, without ``self``. ConfigError if missing."""
    metadata = _parse_json(row, "metadata", row.read_text("metadata"))
    if not isinstance(metadata, dict) or "func_name" not in metadata:
        raise ConfigError(f"{row.where}: field 'metadata' has no func_name, although there is starter_code")
    name = metadata["func_name"]
    code = row.read_text("starter_code").rstrip()
    last_line = code.split("\n")[-1]
    open_body = ""
    if last_line.endswith(":"):  # the code ends with a signature, whose body is to be written
        indent = last_line[: len(last_line) - len(last_line.lstrip())]
        open_body = f"{indent}    pass"
    tree = row.parse_python("starter_code", f"{code}\n{open_body}\n".replace("\t", "    "))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
            return node
    raise ConfigError(f"{row.where}: field 'starter_code' does not define the function {quote_value(name)}")


def _parse_json(row: DatasetRow, field: str, text: str) -> Any:
    """Parse the JSON of a field; ConfigError if it is not JSON, or holds a number that is not finite."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{row.where}: field {field!r} is not JSON: {error}") from None


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")
