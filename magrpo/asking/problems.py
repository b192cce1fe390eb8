"""Problems to ask: found by id in the run's problem set, or written from a user's words and tests."""

import ast
import builtins
import difflib
import doctest
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from string import ascii_lowercase
from textwrap import dedent

from magrpo.asking.teams import AskedTeam
from magrpo.checks.problems import load_problems
from magrpo.errors import ConfigError
from magrpo.interfaces import Problems, ReadsSentences, Reward
from magrpo.python_source import list_nodes, parse_python
from magrpo.rewards.common import ProgramReward
from magrpo.run.files import read_problems
from magrpo.run.steps import Step
from magrpo.text import replace_surrogates
from magrpo.types import Problem, Split

TASK_ID = "yours"
"""The id of a problem written by a user."""
_ORDER: tuple[Split, ...] = ("test", "ood", "train")
_DEFINITION = re.compile(r"^(?:async\s+)?def\s+(\w+)\s*\(", re.MULTILINE)
_INDENTED_DEFINITION = re.compile(r"\s*(?:async\s+)?def\s")
_DOCSTRING_BEHIND = re.compile(r"^(def .*:)[ \t]+(\"\"\"|''')", re.MULTILINE)
_ARGUMENTS = (("xs", r"lists?|numbers|integers|values|items"), ("s", r"strings?|text|words?|letters?|characters?"))
"""Names for the argument of a function that is only described, each with the words that suggest it."""


def load_asked_problems(team: AskedTeam) -> dict[str, Problem]:
    """The team's problems by id, held-out ones first: those its run prepared, else its problem set, loaded again."""
    prepared = Step("prepare", 0).output
    if team.store is not None and team.store.is_committed(prepared):
        splits: Mapping[Split, Sequence[Problem]] = read_problems(team.store.stage_folder(prepared))
    else:
        splits = load_problems(team.config.problems)
    return {problem.task_id: problem for split in _ORDER for problem in splits.get(split, ())}


def find_problem(problems: Mapping[str, Problem], wanted: str) -> Problem:
    """The problem with the id ``wanted``, or the only one whose id contains it; ConfigError names similar ids."""
    if wanted in problems:
        return problems[wanted]
    containing = [task_id for task_id in problems if wanted and wanted.lower() in task_id.lower()]
    if len(containing) == 1:
        return problems[containing[0]]
    if containing:
        raise ConfigError(
            f"problem {wanted!r}: {len(containing)} ids contain this text, such as {', '.join(containing[:3])}"
        )
    similar = difflib.get_close_matches(wanted, list(problems), n=3, cutoff=0.3) or list(problems)[:3]
    raise ConfigError(f"no problem {wanted!r}; similar ids: {', '.join(similar)}")


def writes_programs(reward: Reward) -> bool:
    """Whether the answers that ``reward`` prices are programs with tests."""
    return isinstance(reward, ProgramReward)


def write_problem(text: str, tests: Sequence[str], reward: Reward, problems: Problems) -> Problem:
    """Write a problem from a user's words, for agents trained on ``problems``.

    For a reward of programs, ``text`` is the signature of a function with a docstring, or a sentence that becomes the
    docstring of a function. The function is named as in the tests or examples, else by ``problems`` if they can read
    the sentence, else ``solve``. The tests are ``tests``, the asserts that begin a line of ``text``, and the examples
    (``>>>``) in the docstring; if there are none, the tests that ``problems`` make for the sentence, whose tags the
    problem then has. Tests may call the function ``candidate``.

    For any other reward, the problem is the text.

    Raises:
        ConfigError: the text is empty, a test is unusable, or the reward takes no tests.
    """
    text, tests = replace_surrogates(text), replace_surrogates(list(tests))
    if not text.strip():
        raise ConfigError("the problem is empty")
    if not writes_programs(reward):
        if tests:
            raise ConfigError("--test: these agents write texts, which have no tests")
        return Problem(TASK_ID, text.strip("\n"))
    lines = dedent(text).strip("\n").splitlines()
    # Behind ``def`` an indented assert belongs to the function.
    indentation = "" if any(_INDENTED_DEFINITION.match(line) for line in lines) else r"\s*"
    asserts, others = _split_asserts(lines, re.compile(indentation + r"assert[ (]"))
    asserts += tests
    prompt = "\n".join(others).rstrip() + "\n"
    tags: Mapping[str, str] = {}
    prompt = _DOCSTRING_BEHIND.sub(r"\1\n    \2", prompt)
    parsed = [node for test in asserts for node in _parse_test(test)]
    if names := _DEFINITION.findall(prompt):
        name = names[-1]
    else:
        known, _ = _read_sentence(prompt, problems)
        shown = [ast.Expr(example) for example in _list_examples(prompt)]
        name = _find_called_name([*parsed, *shown]) or ("solve" if known is None else known.entry_point)
        if known is not None and name == known.entry_point:
            prompt = known.prompt
            if not parsed:
                parsed, tags = _list_asserts(known.test), known.tags
        else:
            arguments = _name_arguments(prompt, name, [*parsed, *shown])
            prompt = f"def {name}({arguments}):\n    {_quote_docstring(prompt.strip())}\n"
    parsed += _parse_examples(prompt, name)
    called = {node.id for test in parsed for node in ast.walk(test) if isinstance(node, ast.Name)}
    if parsed and not called & {name, "candidate"}:
        raise ConfigError(f"no test calls {name!r}, the problem's function")
    body = "\n".join(f"    {line}" for test in parsed for line in ast.unparse(test).splitlines())
    check = f"def check(candidate):\n    {name} = candidate\n{body}\n" if parsed else ""
    return Problem(TASK_ID, prompt, name, check, tags=dict(tags))


def explain_words(problem: Problem, problems: Problems) -> str:
    """Explain which part of a user's description ``problems`` cannot read; empty if they can read all of it."""
    docstrings = _list_docstrings(problem.prompt)
    description = docstrings[-1].partition(">>>")[0] if docstrings else ""
    _, remark = _read_sentence(description, problems) if description.strip() else (None, "")
    return remark


def _read_sentence(text: str, problems: Problems) -> tuple[Problem | None, str]:
    return problems.read_sentence(text) if isinstance(problems, ReadsSentences) else (None, "")


def _list_asserts(test: str) -> list[ast.stmt]:
    """The statements of ``check`` in a problem's test."""
    [check] = [node for node in parse_python(test).body if isinstance(node, ast.FunctionDef)]
    return check.body


def _parse_test(test: str) -> list[ast.stmt]:
    try:
        nodes = parse_python(dedent(test)).body
    except SyntaxError as error:
        raise ConfigError(f"test {test!r}: is not Python: {error.msg}") from None
    if not nodes or not all(isinstance(node, ast.Assert) for node in nodes):
        raise ConfigError(f"test {test!r}: write an assert, such as: assert twice(2) == 4")
    return nodes


def _split_asserts(lines: Sequence[str], begins: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split lines into the asserts, each with the lines that it goes on in, and all others."""
    asserts, others = [], []
    position = 0
    while position < len(lines):
        if not begins.match(lines[position]):
            others.append(lines[position])
            position += 1
            continue
        ends = range(position + 1, len(lines) + 1)
        end = next((end for end in ends if _is_python("\n".join(lines[position:end]))), position + 1)
        asserts.append("\n".join(lines[position:end]))
        position = end
    return asserts, others


def _is_python(text: str) -> bool:
    try:
        parse_python(dedent(text))
    except SyntaxError:
        return False
    return True


def _find_called_name(tests: Sequence[ast.stmt]) -> str:
    """The first function that the tests call and that is not a builtin."""
    for test in tests:
        for node in ast.walk(test):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                if name != "candidate" and not hasattr(builtins, name):
                    return name
    return ""


def _name_arguments(text: str, name: str, tests: Sequence[ast.stmt]) -> str:
    """Choose the parameters of the described function ``name``, as many as ``tests`` pass to it.

    A single one is ``xs`` for a list, ``s`` for a text, else ``n``; several are ``a``, ``b`` and so on.
    """
    nodes = [node for test in tests for node in ast.walk(test)]
    names = {name, "candidate"}
    calls = (node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) in names)
    call = max(calls, key=lambda call: len(call.args) + len(call.keywords), default=None)
    if call is not None and not any(isinstance(value, ast.Starred) for value in call.args):
        keywords = [keyword.arg for keyword in call.keywords if keyword.arg]
        if keywords or len(call.args) != 1:
            letters = [letter for letter in ascii_lowercase if letter not in keywords]
            return ", ".join([*letters[: len(call.args)], *keywords])
    found = (name for name, words in _ARGUMENTS if re.search(rf"\b(?:{words})\b", text, re.IGNORECASE))
    return next(found, "n")


def _quote_docstring(text: str) -> str:
    quotes = "'''" if '"""' in text else '"""'
    prefix = "r" if "\\" in text else ""
    # The last character must not become a part of the quotes, or take away their meaning.
    ending = "\n    " if text.endswith((quotes[0], "\\")) else ""
    return prefix + quotes + text.replace("\n", "\n    ") + ending + quotes


def _parse_examples(prompt: str, name: str) -> list[ast.stmt]:
    """Turn the examples in a prompt's docstrings into asserts.

    An example is one expression of the function ``name`` and builtins, which prints nothing, and shows its value.
    """
    known = {name, *dir(builtins)} - {"print"}
    examples = [example for docstring in _list_docstrings(prompt) for example in _list_examples(docstring)]
    return [ast.Assert(example) for example in examples if _list_free_names(example) <= known]


def _list_examples(text: str) -> list[ast.Compare]:
    """The examples (``>>>``) of a text that are one expression and show its value, as comparisons of the two."""
    found = []
    with suppress(ValueError):  # an example that is indented inconsistently
        for example in doctest.DocTestParser().get_examples(text):
            shown, value = _parse_expression(example.source), _parse_value(example.want)
            if shown is not None and value is not None and not example.options.get(doctest.SKIP):
                found.append(ast.Compare(shown, [ast.Eq()], [value]))
    return found


def _list_free_names(expression: ast.expr) -> set[str]:
    """The names that an expression reads and does not bind itself, as a comprehension or lambda does."""
    nodes = list_nodes(expression)
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return {node.id for node in names} - bound


def _parse_value(want: str) -> ast.expr | None:
    """The value that an example shows; None if it shows several, no value, or ``...`` for a part of one."""
    value = _parse_expression(want)
    if value is None:
        return None
    nodes = list_nodes(value)
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    is_part = any(isinstance(node, ast.Constant) and node.value is ... for node in nodes)
    is_text = any(isinstance(node, ast.Name) and node not in called for node in nodes)  # such as: nan
    return None if is_part or is_text else value


def _parse_expression(source: str) -> ast.expr | None:
    """The expression that is all of ``source``; None if it is anything else."""
    try:
        statements = parse_python(source).body
    except SyntaxError:
        return None
    match statements:
        case [ast.Expr(expression)]:
            return expression
    return None


def _list_docstrings(prompt: str) -> list[str]:
    """The docstring of every function in a prompt; none if the prompt is not complete Python."""
    try:
        functions = [node for node in parse_python(prompt).body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return []
    return [ast.get_docstring(function) or "" for function in functions]
