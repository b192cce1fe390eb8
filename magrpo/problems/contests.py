"""Contests: APPS, CodeContests and their base class. Tests are calls, or input and output; most are hidden.

A problem about standard input and output becomes a function ``solve(stdin: str) -> str``. Every test is then a call:
two agents can share the work, the program never reads or prints, and its result is compared outside its process.
"""

import ast
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, ClassVar, Literal

from pydantic import Field

from magrpo.plugins import ConfigError, quote_value
from magrpo.problems.files import FileProblems, format_docstring, format_signature, indent_body
from magrpo.problems.rows import DatasetRow
from magrpo.types import Problem

_MAX_DIGITS = 4300
"""Most decimal digits of an integer that Python converts from or to text."""
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


class Contest(FileProblems):
    """Problems with shown and hidden tests; each test is one ``assert``."""

    hidden_tests: ClassVar[bool] = True

    max_tests: int = Field(20, ge=1)
    """Maximum number of shown tests, and of hidden tests, per problem; the first tests that are short enough are
    taken."""
    max_test_chars: int = Field(4000, ge=1)
    """Maximum length of a test in characters, input and output together. Longer tests are left out, and so are problems
    with no shorter test to show."""

    def make_problem(
        self, task_id: str, statement: str, function: ast.FunctionDef | None, shown: list[str], hidden: list[str]
    ) -> Problem | None:
        """Make a problem whose tests call ``function``, or ``solve`` if it is None, as :func:`write_stdin_test` does.

        Returns None if no shown test is short enough.
        """
        if function is None:
            entry_point, header, definitions = "solve", _STDIN, _PRINTED
            statement = f"{statement.strip()}\n\n{_NOTE}"
        else:
            entry_point, header, definitions = function.name, f"{_TYPES}{format_signature(function)}\n", ""
        checks = []
        for tests in (shown, hidden):
            short = [test for test in tests if len(test) <= self.max_test_chars][: self.max_tests]
            body = "".join(f"    {test}\n" for test in short)
            checks.append(f"{definitions}def check(candidate):\n{body}" if body else "")
        prompt = header + indent_body(format_docstring(statement))
        return Problem(task_id, prompt, entry_point, checks[0], hidden_test=checks[1]) if checks[0] else None


class Apps(Contest):
    """APPS (arXiv 2105.09938): ``problem_id, question, starter_code, difficulty, input_output``.

    The entry point is the starter code's function if ``input_output`` names one, else ``solve(stdin)``.
    """

    benchmark: ClassVar[str] = ""

    source: str = "codeparrot/apps:train.jsonl"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, a hub id, or one file of a hub data set:
    ``owner/name:file``."""
    difficulty: tuple[Literal["introductory", "interview", "competition"], ...] = ()
    """Difficulties to include. Empty: all."""
    shown_tests: int = Field(1, ge=1)
    """Number of tests per problem, from the first, that feedback may show; the others are hidden."""

    def parse(self, row: DatasetRow) -> Problem | None:
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
        statement = row.read_text("question")
        if name and not row.read_text("starter_code").strip():
            return None
        function = parse_starter_code(row, name) if name else None
        return self.make_problem(f"APPS/{number}", statement, function, shown, hidden)


def _write_call(arguments: list[Any], expected: Any) -> str:
    """Some rows wrap the result in a list without saying so, so both forms are accepted."""
    if isinstance(expected, list) and len(expected) == 1:
        return write_call_test(arguments, expected, expected[0])
    return write_call_test(arguments, expected)


def _join_lines(value: Any) -> str:
    """Some rows hold a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


class CodeContests(Contest):
    """CodeContests (AlphaCode, arXiv 2203.07814): ``name, description, public_tests, private_tests, generated_tests``.

    The entry point is ``solve(stdin)``. Feedback may show public tests.
    """

    benchmark: ClassVar[str] = "CodeContests"

    source: str = "deepmind/code_contests"
    """Path of a .jsonl, .jsonl.gz, .json or .parquet file, a hub id, or one file of a hub data set:
    ``owner/name:file``."""
    hub_split: str = "valid+test"
    """Split to read if ``source`` is a hub id."""

    def parse(self, row: DatasetRow) -> Problem | None:
        """The problem; None if no public test is short enough."""
        tests = []
        for field in ("public_tests", "private_tests", "generated_tests"):
            values = row.values.get(field) or {"input": [], "output": []}
            try:
                pairs = zip(values["input"], values["output"], strict=True)
                tests.append([write_stdin_test(given, expected) for given, expected in pairs])
            except (KeyError, TypeError, ValueError):
                message = f"{row.where}: field {field!r} needs lists 'input' and 'output' of equal length"
                raise ConfigError(message) from None
        shown, private, generated = tests
        task_id = f"CodeContests/{row.read_text('name')}"
        return self.make_problem(task_id, row.read_text("description"), None, shown, private + generated)


def write_stdin_test(given: str, expected: str) -> str:
    """Write the test that ``solve`` returns the expected output, up to white space and number format."""
    return f"assert printed(candidate({given!r})) == printed({expected!r})"


def write_call_test(arguments: Sequence[Any], *expected: Any) -> str:
    """Write the test that a call returns one of the ``expected`` values."""
    call = f"candidate({', '.join(map(repr, arguments))})"
    return f"assert {call} == {expected[0]!r}" if len(expected) == 1 else f"assert {call} in {expected!r}"


def parse_starter_code(row: DatasetRow, name: str) -> ast.FunctionDef:
    """Parse the function ``name`` of the field ``starter_code``, without ``self``; ConfigError if it is missing."""
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


def parse_json(row: DatasetRow, field: str, text: str) -> Any:
    """Parse the JSON of a field; ConfigError if it is not JSON, or holds a number that is not finite."""
    try:
        return json.loads(text, parse_int=_parse_integer, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{row.where}: field {field!r} is not JSON: {error}") from None


class _Long(int):
    """An integer with more decimal digits than Python parses or prints. Its repr is a call with a hex string."""

    def __repr__(self) -> str:
        return f"int({hex(self)!r}, 16)"


def _parse_integer(digits: str) -> int:
    return int(digits) if len(digits) <= _MAX_DIGITS else _Long(Decimal(digits))


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")
