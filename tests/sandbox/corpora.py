"""Public corpora of honest programs with tests, and plain execution to compare the sandbox with.

HumanEval lies in ``tests/data``; the others are read from the folder that :data:`VARIABLE` names.
``tests/data/README.md`` says which files.
"""

from __future__ import annotations

import ast
import doctest
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from magrpo.types import Execution

from . import test_humaneval

VARIABLE = "MAGRPO_CORPORA"
CPU_S = 2
"""CPU seconds allowed in plain execution."""
WALL_S = 60.0
"""Wall seconds after which a plain process is given up: it waits for something."""
MAX_TEST = 1 << 20
"""Characters of the longest test: one of MBPP+ has eleven million."""
UNSUITABLE = {"ctypes", "ftplib", "http", "smtplib", "socket", "ssl", "subprocess", "telnetlib", "urllib", "webbrowser"}
"""Modules of the standard library that reach out of a process; plain execution has no jail."""

_RUN = """
import json, sys
source, entry_point, test = json.load(sys.stdin)
module = sys.modules["candidate"] = type(sys)("candidate")
names = vars(module)
exec(compile(source, "<program>", "exec"), names)
test_names = {**names, "__name__": "test", "candidate": names[entry_point]}
exec(compile(test, "<test>", "exec"), test_names)
check = test_names.get("check")
if callable(check) and check is not names.get("check"):
    check(names[entry_point])
"""


class Missing(Exception):
    """A corpus is not on this machine."""


def passes_plainly(execution: Execution) -> bool:
    """Whether program and test together end without an error in a Python process of their own."""
    given = json.dumps([execution.source, execution.entry_point, execution.test])
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _RUN],
                input=given.encode(),
                cwd=folder,
                env={"PYTHONHASHSEED": "0"},
                capture_output=True,
                timeout=WALL_S,
                preexec_fn=_limit_resources,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


def select_passing(programs: Mapping[str, Execution]) -> dict[str, Execution]:
    """The programs that pass in plain execution."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        passed = list(threads.map(passes_plainly, programs.values()))
    return {name: program for (name, program), good in zip(programs.items(), passed, strict=True) if good}


def find_corpus(name: str) -> Path:
    """The path of a corpus; :class:`Missing` if it is not there."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise Missing(f"{VARIABLE} names no folder with {name}: see tests/data/README.md")
    path = Path(folder) / name
    if not path.exists():
        raise Missing(f"there is no {path}: see tests/data/README.md")
    return path


def read_humaneval() -> dict[str, Execution]:
    return {
        problem["task_id"]: test_humaneval.execution(problem, problem["prompt"] + problem["canonical_solution"])
        for problem in test_humaneval.read_problems()
    }


def read_mbpp() -> dict[str, Execution]:
    """The programs of MBPP, each with a test of its set-up code and all asserts, including the challenge tests."""
    problems = _read_lines(find_corpus("mbpp.jsonl"))
    tests = [
        "\n".join([problem["test_setup_code"], *problem["test_list"], *problem["challenge_test_list"]])
        for problem in problems
    ]
    return _name_entry_points(problems, tests)


def read_sanitized_mbpp() -> dict[str, Execution]:
    problems = json.loads(find_corpus("sanitized-mbpp.json").read_text(encoding="utf-8"))
    return _name_entry_points(
        problems, ["\n".join([*problem["test_imports"], *problem["test_list"]]) for problem in problems]
    )


def read_cruxeval() -> dict[str, Execution]:
    problems = _read_lines(find_corpus("cruxeval.jsonl"))
    return {
        problem["id"]: Execution(problem["code"], "f", f"assert f({problem['input']}) == {problem['output']}\n")
        for problem in problems
    }


def read_mbpp_plus() -> dict[str, Execution]:
    """A loop over the inputs of each problem, with the canonical solution's results as expected values."""
    problems = _read_lines(find_corpus("MbppPlus.jsonl"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        tests = list(threads.map(_write_plus_test, problems))
    return {
        problem["task_id"]: Execution(problem["canonical_solution"], problem["entry_point"], test)
        for problem, test in zip(problems, tests, strict=True)
        if test and len(test) < MAX_TEST
    }


def _write_plus_test(problem: dict[str, Any]) -> str:
    """Source of a test that expects the canonical solution's results, or an empty string if the solution fails."""
    inputs = [*problem["base_input"], *problem["plus_input"]]
    if problem["task_id"] == "Mbpp/596":  # returns the size of a tuple, which JSON has as a list
        inputs = [[tuple(items) for items in given] for given in inputs]
    answers = (
        "import sys as _sys\n_inputs = eval(_sys.stdin.read())\n_results = [repr(%s(*_input)) for _input in _inputs]\n"
        "_sys.stdout.write(chr(0) + repr(_results))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", problem["canonical_solution"] + "\n" + answers % problem["entry_point"]],
        input=repr(inputs),
        env={"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        preexec_fn=_limit_resources,
    )
    if done.returncode:
        return ""
    results = ", ".join(ast.literal_eval(done.stdout.rpartition("\0")[2]))
    return (
        f"from math import inf, nan\ndef check(candidate):\n    inputs = {inputs!r}\n    results = [{results}]\n"
        "    for given, expected in zip(inputs, results):\n        assert candidate(*given) == expected\n"
    )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def _name_entry_points(problems: Sequence[dict[str, Any]], tests: Sequence[str]) -> dict[str, Execution]:
    """Programs by task id, with a function that the test calls as entry point; programs without one are left out."""
    programs = {}
    for problem, test in zip(problems, tests, strict=True):
        defined = {node.name for node in ast.parse(problem["code"]).body if isinstance(node, ast.FunctionDef)}
        called = [node.func for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
        names = [function.id for function in called if isinstance(function, ast.Name) and function.id in defined]
        if names:
            programs[str(problem["task_id"])] = Execution(problem["code"], names[0], test)
    return programs


def read_the_algorithms() -> dict[str, Execution]:
    """Every function of a module with examples in its docstring, the examples turned into asserts."""
    folder = find_corpus("TheAlgorithms")
    return {
        f"{path.relative_to(folder)}:{name}": Execution(source, name, test)
        for path in sorted(folder.rglob("*.py"))
        for source in [path.read_text(encoding="utf-8")]
        for name, test in write_doctests(source)
    }


def write_doctests(source: str) -> Iterator[tuple[str, str]]:
    """Name and test of each function of a module whose docstring has examples.

    None if the module imports more than the standard library, or is written for a later Python.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in imported}
    if not roots <= sys.stdlib_module_names | {"__future__"} or roots & UNSUITABLE:
        return
    imports = [
        ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
        if getattr(node, "module", "") != "__future__"
    ]  # fmt: skip
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            test = write_test(text, imports)
            if test and node.name in test:
                yield node.name, test


def write_test(docstring: str, imports: Sequence[str]) -> str:
    """The examples of a docstring as asserts, below those of ``imports`` whose names they use; empty without any."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
        lines = [_write_example(example) for example in examples]
        body = "".join(lines)
        ast.parse(body)
    except (ValueError, SyntaxError):
        return ""
    if not any("assert " in line for line in lines):
        return ""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    needed = [
        statement for statement in imports
        if used & {(alias.asname or alias.name).partition(".")[0] for alias in ast.parse(statement).body[0].names}  # type: ignore[attr-defined]
    ]  # fmt: skip
    return "".join(f"{statement}\n" for statement in needed) + body


def _write_example(example: doctest.Example) -> str:
    """Statements for an example; empty for one whose output is not the value of an expression."""
    source = example.source.strip()
    if example.exc_msg is not None:
        name, _, message = example.exc_msg.strip().partition(":")
        name, message = name.strip().rpartition(".")[2], message.strip()
        says = f"    assert str(error) == {message!r}\n" if message and not example.options else ""
        indented = "".join(f"    {line}\n" for line in source.splitlines())
        return f"try:\n{indented}    assert False\nexcept {name} as error:\n{says or '    pass' + chr(10)}"
    if not example.want.strip():
        ast.parse(source)
        return f"{source}\n"
    try:
        value, expected = (ast.unparse(ast.parse(text.strip(), mode="eval")) for text in (source, example.want))
    except SyntaxError:
        return ""
    return f"assert ({value}) == ({expected})\n"


CORPORA: Mapping[str, Callable[[], dict[str, Execution]]] = {
    "HumanEval": read_humaneval,
    "MBPP": read_mbpp,
    "MBPP, sanitized": read_sanitized_mbpp,
    "MBPP+": read_mbpp_plus,
    "CRUXEval": read_cruxeval,
    "TheAlgorithms": read_the_algorithms,
}
