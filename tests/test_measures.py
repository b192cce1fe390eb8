"""The measures of the house: circles, imports inside functions, folders, parameters, names and docstrings.

``python -m tests.test_measures`` prints them.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("magrpo", "magrpo_kernels", "pipelines")
COMMAND_LINE = "pipelines/cli.py"
"""The module whose public functions are commands: their parameters are flags, and each imports what it needs."""
SANDBOXED = ("magrpo/rewards/stand_ins.py",)
"""Modules whose functions are copied into programs for the sandbox, with their imports."""
MAX_PARAMETERS = 6
MAX_MODULES = 20
MAX_ONE_WORD = 0.35
SHARED_FUNCTIONS = {
    "evaluate": "the command, and the stage that it runs",
    "main": "the entry of a process",
    "solve": "the function of an example program that plays an episode",
    "study": "the command, and the Prefect flow that it runs",
    "train": "the command, and the Prefect flow that it runs",
}
"""Names that functions of several modules share because they mean the same in all of them, with that meaning."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse_modules() -> Mapping[str, ast.Module]:
    """Every module of the packages by its path below the root."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of the project that ``tree`` imports anywhere, also for types only."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= submodules or {node.module}
    return found & known


def import_circles() -> list[list[str]]:
    """Groups of modules each of which reaches the others by imports."""
    modules = {module_name(path): tree for path, tree in parse_modules().items()}
    imports = {name: imported_modules(tree, set(modules)) - {name} for name, tree in modules.items()}

    def reach(start: str) -> set[str]:
        reached: set[str] = set()
        waiting = [start]
        while waiting:
            new = imports[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    reachable = {name: reach(name) for name in imports}
    circles = {
        tuple(sorted(other for other in reachable[name] if name in reachable[other]))
        for name in imports
        if name in reachable[name]
    }
    return [list(circle) for circle in sorted(circles)]


def functions_of(tree: ast.Module) -> Iterator[Function]:
    """Functions of a module and methods of its classes, but for those inside other functions."""
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else [node]
        yield from (child for child in inner if isinstance(child, Function))


def public_functions() -> Iterator[tuple[str, Function]]:
    for path, tree in parse_modules().items():
        yield from ((path, node) for node in functions_of(tree) if not node.name.startswith("_"))


def classes_and_aliases(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Names of the classes of a module, also inside others, and of its variables; whether each is that of a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, True
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)):
                yield name, False


def shared_class_names() -> list[str]:
    """Public names of classes that are also those of other classes or aliases, with the modules."""
    found: dict[str, list[str]] = defaultdict(list)
    classes = set()
    for path, tree in parse_modules().items():
        for name, is_class in classes_and_aliases(tree):
            found[name].append(path)
            if is_class and not name.startswith("_"):
                classes.add(name)
    return [f"{name}: {', '.join(found[name])}" for name in sorted(classes) if len(found[name]) > 1]


def shared_function_names() -> list[str]:
    """Public names that functions of several modules share without a reason, with the modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in parse_modules().items():
        for node in tree.body:
            if isinstance(node, Function) and not node.name.startswith("_"):
                found[node.name].append(path)
    return [
        f"{name}: {', '.join(paths)}"
        for name, paths in sorted(found.items())
        if len(paths) > 1 and name not in SHARED_FUNCTIONS
    ]


def num_parameters(node: Function) -> int:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in given if argument.arg not in ("self", "cls")])


def has_form(node: Function) -> bool:
    """Whether its parameters are those of a kernel's launch or of a form on Prefect's page."""
    return any(re.search(r"triton|\bflow\(", ast.unparse(decorator)) for decorator in node.decorator_list)


def unexplained_imports() -> list[str]:
    """Imports inside functions without a comment on their first line or the line before."""
    found = []
    for path, tree in parse_modules().items():
        if path in (COMMAND_LINE, *SANDBOXED):
            continue
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            previous = 0
            for node in function.body:
                for inner in ast.walk(node):
                    if isinstance(inner, (ast.Import, ast.ImportFrom)):
                        last = inner.end_lineno or inner.lineno
                        explained = any("#" in lines[i] for i in range(inner.lineno - 2, last))
                        if not explained and inner.lineno != previous + 1:
                            found.append(f"{path}:{inner.lineno}")
                        else:
                            previous = last
    return sorted(set(found))


def wide_functions() -> list[str]:
    return [
        f"{path}:{node.lineno} {node.name}({num_parameters(node)})"
        for path, node in public_functions()
        if num_parameters(node) > MAX_PARAMETERS and path != COMMAND_LINE and not has_form(node)
    ]


def one_word_functions() -> tuple[list[str], int]:
    """Public functions and methods whose name is one word, and how many there are in all."""
    names = [f"{path}:{node.lineno} {node.name}" for path, node in public_functions()]
    return [name for name in names if "_" not in name.partition(" ")[2]], len(names)


def fullest_folder() -> tuple[int, str]:
    """The largest number of modules in one folder, without ``__init__.py`` or subfolders, and that folder's path."""
    folders: dict[str, int] = {}
    for path in parse_modules():
        if not path.endswith("__init__.py"):
            folder = path.rpartition("/")[0]
            folders[folder] = folders.get(folder, 0) + 1
    return max((count, folder) for folder, count in folders.items())


def silent_modules() -> list[str]:
    """Modules with code whose docstring is missing."""
    return [path for path, tree in parse_modules().items() if tree.body and not ast.get_docstring(tree)]


def num_lines() -> int:
    return sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in parse_modules())


def test_no_import_circles() -> None:
    assert import_circles() == []


def test_imports_inside_functions_say_which_heavy_import_they_defer() -> None:
    assert unexplained_imports() == []


def test_folders_are_not_full() -> None:
    assert fullest_folder()[0] <= MAX_MODULES


def test_public_functions_take_few_parameters() -> None:
    assert wide_functions() == []


def test_public_names_can_be_found_by_grep() -> None:
    short, total = one_word_functions()
    assert len(short) <= MAX_ONE_WORD * total


def test_a_class_name_has_one_meaning() -> None:
    """So that a reader of a name knows which class it is, and a search for it finds no other."""
    assert shared_class_names() == []


def test_a_function_name_has_one_meaning() -> None:
    """So that a reader of a call knows which function it is, and a search for it finds no other."""
    assert shared_function_names() == []


def test_modules_say_what_they_hold() -> None:
    assert silent_modules() == []


def print_measures() -> None:
    """Print all measures, also those without a limit, and list the circles, wide functions and shared names."""
    short, total = one_word_functions()
    print(f"import circles                   {len(import_circles())}")
    for circle in import_circles():
        print(f"    {' '.join(circle)}")
    print(f"unexplained imports in functions {len(unexplained_imports())}")
    print(f"modules in the fullest folder    {fullest_folder()[0]} ({fullest_folder()[1]})")
    print(f"public functions with > {MAX_PARAMETERS} params  {len(wide_functions())}")
    for name in wide_functions():
        print(f"    {name}")
    print(f"one-word public functions        {len(short)} of {total} ({len(short) / total:.0%})")
    print(f"names with several meanings      {len(shared_class_names()) + len(shared_function_names())}")
    for name in [*shared_class_names(), *shared_function_names()]:
        print(f"    {name}")
    print(f"modules without a docstring      {len(silent_modules())}")
    print(f"lines of Python                  {num_lines():,}")


if __name__ == "__main__":
    print_measures()
