"""Base class of programming contests: many tests, most of them hidden, as calls or as standard input and output.

A problem about standard input and output becomes a function ``solve(stdin: str) -> str``, so that two agents can share
the work and every test is a call: the program never reads or prints, and its result is compared outside its process.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, ClassVar

from pydantic import Field

from magrpo.plugins import ConfigError
from magrpo.problems.files import FileProblems, format_docstring, format_signature, indent_body
from magrpo.problems.rows import Row
from magrpo.types import Problem

MAX_DIGITS = 4300
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
    """Maximum number of shown tests, and of hidden tests, of a problem: the first that are short enough."""
    max_test_chars: int = Field(4000, ge=1)
    """Maximum length of a test, input and output together, in characters. Longer tests are left out, and so are
    problems without a shorter test to show."""

    def make_stdin_problem(self, task_id: str, statement: str, shown: list[str], hidden: list[str]) -> Problem | None:
        """Make a problem with tests written by :func:`write_stdin_test`."""
        prompt = _STDIN + indent_body(format_docstring(f"{statement.strip()}\n\n{_NOTE}"))
        return self._problem(task_id, prompt, "solve", shown, hidden, _PRINTED)

    def make_call_problem(
        self, task_id: str, statement: str, function: ast.FunctionDef, shown: list[str], hidden: list[str]
    ) -> Problem | None:
        """Make a problem with tests that call ``function``."""
        prompt = f"{_TYPES}{format_signature(function)}\n{indent_body(format_docstring(statement))}"
        return self._problem(task_id, prompt, function.name, shown, hidden, "")

    def _problem(
        self, task_id: str, prompt: str, entry_point: str, shown: list[str], hidden: list[str], definitions: str
    ) -> Problem | None:
        bodies = ["".join(f"    {line}\n" for line in self._limit_tests(tests)) for tests in (shown, hidden)]
        if not bodies[0]:
            return None
        test, hidden_test = (f"{definitions}def check(candidate):\n{body}" if body else "" for body in bodies)
        return Problem(task_id, prompt, entry_point, test, hidden_test=hidden_test)

    def _limit_tests(self, tests: list[str]) -> list[str]:
        return [test for test in tests if len(test) <= self.max_test_chars][: self.max_tests]


def write_stdin_test(given: str, expected: str) -> str:
    """The test that ``solve`` returns the expected output, up to white space and number format."""
    return f"assert printed(candidate({given!r})) == printed({expected!r})"


def write_call_test(arguments: Sequence[Any], *expected: Any) -> str:
    """The test that a call returns one of the ``expected`` values."""
    call = f"candidate({', '.join(map(repr, arguments))})"
    return f"assert {call} == {expected[0]!r}" if len(expected) == 1 else f"assert {call} in {expected!r}"


def parse_starter_code(row: Row, name: str) -> ast.FunctionDef:
    """The function ``name`` of the field ``starter_code``, without ``self`` if it is a method.

    Raises:
        ConfigError: the code is not Python, or does not define the function.
    """
    code = row.read_text("starter_code").rstrip()
    last_line = code.split("\n")[-1]
    open_body = f"{last_line[: len(last_line) - len(last_line.lstrip())]}    pass" if last_line.endswith(":") else ""
    try:
        tree = ast.parse(f"{code}\n{open_body}\n".replace("\t", "    "))
    except SyntaxError as error:
        raise ConfigError(f"{row.where}: field 'starter_code' is not Python: {error.msg}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
            return node
    raise ConfigError(f"{row.where}: field 'starter_code' does not define the function {name!r}")


def parse_json(row: Row, field: str, text: str) -> Any:
    """Parse the JSON of a field.

    Raises:
        ConfigError: the text is not JSON, or holds a number that is not finite.
    """
    try:
        return json.loads(text, parse_int=_parse_integer, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{row.where}: field {field!r} is not JSON: {error}") from None


class _Long(int):
    """An integer with more decimal digits than Python parses or prints; its repr is a call with a hex string."""

    def __repr__(self) -> str:
        return f"int({hex(self)!r}, 16)"


def _parse_integer(digits: str) -> int:
    return int(digits) if len(digits) <= MAX_DIGITS else _Long(Decimal(digits))


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")
