"""Completions as Python modules: extracting code from text, and joining modules into one program.

Nothing here compiles or runs a completion. Texts may be hostile: their size is bounded, and whatever Python's parser
rejects (syntax, nesting, null bytes) counts as unparsable instead of raising an error.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from textwrap import dedent

from magrpo.python_source import check_depth, list_nodes, name_import, parse_python

MAX_CHARS = 32_768
"""Longest completion, in characters; the rest is cut off."""
MAX_DEPTH = 300
"""Deepest syntax tree, so that the result does not depend on the depth of the caller's stack."""
_PARSE_CHARS = 8 * MAX_CHARS
"""Characters parsed for one completion over all attempts, which bounds the time that a hostile text takes."""
_FENCE = "```"
_PYTHON = frozenset({"", "py", "python", "python3"})
_MAY_BE_CALLABLE = ast.Lambda | ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.IfExp | ast.BoolOp
_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


@dataclass(frozen=True, slots=True)
class Module:
    """The top-level statements of a text. ``futures``: its ``from __future__`` imports, which a program begins with."""

    futures: tuple[str, ...]
    source: str


@lru_cache(maxsize=16)  # several questions about one completion follow each other
def parse_source(source: str) -> ast.Module:
    """Parse ``source``. Raises one of :data:`_UNPARSABLE` if it is not Python or nested too deeply.

    Trees are cached and shared, so do not change them.
    """
    tree = parse_python(source)
    check_depth(tree, MAX_DEPTH)
    return tree


@lru_cache(maxsize=4096)
def extract_module(text: str, defines: str, prompt: str = "", drop: str = "") -> Module:
    """Extract the program from a completion that should define the function ``defines``.

    A text that parses is used whole, else its fenced blocks, else every run of lines that parses. An indented text is
    also read as the continuation of ``prompt``.

    Drops ``if __name__ == ...`` blocks, top-level demonstrations (``print(...)``, ``assert``, expressions without
    effect) and definitions of ``drop``. Keeps everything else.
    """
    text = _clean_text(text)
    readings = [text, text.lstrip()]
    if prompt and text.lstrip("\n")[:1].isspace():
        readings.append(f"{_clean_text(prompt).rstrip()}\n{text}")
    found: list[list[tuple[ast.stmt, str]]] = []
    for reading in dict.fromkeys(readings):
        found.append(_parse_statements(reading))
        if any(isinstance(node, ast.FunctionDef) and node.name == defines for node, _ in found[-1]):
            return _make_module(found[-1], drop)
    return _make_module(found[0], drop)


@lru_cache(maxsize=1024)
def extract_preamble(prompt: str, entry_point: str) -> Module:
    """Extract the imports and definitions of a prompt, and the constants above the entry point.

    Other statements are examples (``result = add(1, 2)``): a program that begins with them calls the entry point before
    it is defined.
    """
    prompt = _clean_text(prompt)
    try:
        parse_source(prompt)
    except _UNPARSABLE:
        prompt = f"{prompt.rstrip()}\n    pass\n"
    kept, is_above = [], True
    for node, source in _parse_statements(prompt):
        is_above = is_above and not (isinstance(node, ast.FunctionDef) and node.name == entry_point)
        if isinstance(node, _DEFINES) or (is_above and not _reads_name(node, entry_point)):
            kept.append((node, source))
    return _make_module(kept, drop=entry_point)


def separate_futures(source: str) -> Module:
    """Make a module of all of ``source``. Its text stays as it is if it has no ``__future__`` imports, or no syntax."""
    try:
        statements = list(_with_source(source, parse_source(source)))
    except _UNPARSABLE:
        return Module((), source)
    futures = tuple(text for node, text in statements if _is_future(node))
    kept = "\n\n".join(text for node, text in statements if not _is_future(node))
    return Module(futures, kept) if futures else Module((), source)


def join_modules(modules: Sequence[Module]) -> str:
    """Join modules into one program. ``from __future__`` imports come first; later definitions win."""
    futures = dict.fromkeys(line for module in modules for line in module.futures)
    parts = ["\n".join(futures), *(module.source for module in modules)]
    return "\n\n\n".join(part for part in parts if part) + "\n"


@lru_cache(maxsize=4096)
def returns_value(source: str, name: str) -> bool:
    """Whether the module defines a function ``name`` at top level that returns (or yields) a value."""
    for function in find_functions(parse_source(source), name)[-1:]:
        for node in walk_own_scope(function):
            match node:
                case ast.Return(value=None | ast.Constant(value=None)):
                    continue
                case ast.Return() | ast.Yield() | ast.YieldFrom():
                    return True
    return False


@lru_cache(maxsize=4096)
def can_be_called(source: str, name: str) -> bool:
    """Whether the module binds ``name`` to something callable: a function at top level that returns a value.

    If there is no function of that name at top level, a definition in a branch, a class, an import, or an assignment
    other than of a literal, such as ``f = partial(g, 1)``, counts as well.
    """
    tree = parse_source(source)
    if find_functions(tree, name):
        return returns_value(source, name)
    for node in walk_own_scope(tree):
        match node:
            case ast.Assign(value=value) | ast.AnnAssign(value=value) if not isinstance(value, _MAY_BE_CALLABLE):
                continue
            case ast.stmt() if name in _list_bound_names(node):
                return True
    return False


@lru_cache(maxsize=4096)
def read_signature(source: str, name: str) -> tuple[str, str]:
    """Read the head of the function ``name``, with decorators and colon, and arguments that pass its parameters on.

    If the module binds ``name`` in another way, the head accepts any arguments.
    """
    functions = find_functions(parse_source(source), name)
    if not functions:
        return f"def {name}(*args, **kwargs):", "*args, **kwargs"
    function = functions[-1]
    arguments = function.args
    call = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        call.append(f"*{arguments.vararg.arg}")
    call += [f"{arg.arg}={arg.arg}" for arg in arguments.kwonlyargs]
    if arguments.kwarg:
        call.append(f"**{arguments.kwarg.arg}")
    lines = source.encode().split(b"\n")  # columns of syntax trees count bytes
    (begin, _), (row, column) = _start_position(function), _start_position(function.body[0])
    head = b"\n".join([*lines[begin - 1 : row - 1], lines[row - 1][:column]]).decode().rstrip()
    return head, ", ".join(call)


def find_functions(tree: ast.Module, name: str) -> list[ast.FunctionDef]:
    """The definitions of the function ``name`` at top level; the last one counts."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]


def walk_own_scope(function: ast.FunctionDef | ast.Module) -> Iterator[ast.AST]:
    """The nodes of the body of a function or module, excluding those inside nested functions, lambdas and classes."""
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(node))


def _clean_text(text: str) -> str:
    text = text[:MAX_CHARS].replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")
    return text.encode("utf-8", "replace").decode()


def _parse_statements(text: str) -> list[tuple[ast.stmt, str]]:
    """The top-level statements, with their source, of the whole text, else of its fenced blocks, else of its runs."""
    try:
        return list(_with_source(text, parse_source(text)))
    except _UNPARSABLE:
        pass
    fenced = list(find_parsable_runs("\n".join(map(dedent, _find_blocks(text)))))
    if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node, _ in fenced):
        return fenced
    return list(find_parsable_runs(text))


def _find_blocks(text: str) -> list[str]:
    """The fenced Python blocks of a text; the last one may lack its end.

    A fence that is indented by four columns more than the block's first one neither ends nor begins a block, as in
    CommonMark (https://spec.commonmark.org/0.31.2/#fenced-code-blocks): a docstring of the block may hold fences. Any
    other fence with a language begins a block, also if the end of the last one is missing.
    """
    blocks: list[tuple[str, list[str]]] = []
    opened: int | None = None  # the indentation of the fence of the current block
    for line in text.split("\n"):
        start = line.lstrip(" \t")
        indentation = len(line[: len(line) - len(start)].expandtabs(4))
        is_fence = start.startswith(_FENCE) and (opened is None or indentation < opened + 4)
        language = re.split(r"\W", start.removeprefix(_FENCE).lstrip(" \t"), maxsplit=1)[0]
        if is_fence and (opened is None or language):
            opened = indentation
            blocks.append((language.lower(), []))
        elif is_fence:
            opened = None
        elif opened is not None:
            blocks[-1][1].append(line)
    return ["\n".join(lines) for language, lines in blocks if language in _PYTHON]


def find_parsable_runs(text: str) -> Iterator[tuple[ast.stmt, str]]:
    """The statements of every run of lines that parses, each starting at column 0 and as long as possible."""
    lines = text.split("\n")
    start, budget = 0, _PARSE_CHARS
    while start < len(lines) and budget > 0:
        first = lines[start][:1]
        may_begin = first.isidentifier() or first in ("@", "(", "[", '"', "'")
        stop = len(lines) if may_begin else start
        while stop > start and budget > 0:
            source = "\n".join(lines[start:stop])
            budget -= len(source)
            try:
                tree = parse_source(source)
            except SyntaxError as error:  # a prefix that reaches the error's line cannot parse
                stop = min(stop - 1, start + max(0, (error.lineno or 1) - 1))
            except _UNPARSABLE:
                stop = start
            else:
                yield from _with_source(source, tree)
                break
        start = max(stop, start + 1)


def _with_source(source: str, tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    lines = source.encode().split(b"\n")
    for node in tree.body:
        assert node.end_lineno is not None
        (row, column), end_column = _start_position(node), node.end_col_offset
        body = lines[row - 1 : node.end_lineno]
        body[-1] = body[-1][:end_column]
        body[0] = body[0][column:]
        yield node, b"\n".join(body).decode()


def _start_position(node: ast.stmt) -> tuple[int, int]:
    """The line, from 1, and the byte column where a statement begins, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return (decorators[0].lineno if decorators else node.lineno), node.col_offset


def _make_module(statements: Iterable[tuple[ast.stmt, str]], drop: str) -> Module:
    """Make a module without demonstrations and without ``drop``. An import keeps its names other than ``drop``."""
    futures, kept = [], []
    for node, source in statements:
        if _is_demonstration(node):
            continue
        if _is_future(node):
            futures.append(source)
        elif not drop or drop not in _list_bound_names(node):
            kept.append(source)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            others = [alias for alias in node.names if name_import(alias) != drop]
            if others:
                kept.append(ast.unparse(_import_names(node, others)))
    return Module(tuple(futures), "\n\n".join(kept))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _import_names(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> ast.Import | ast.ImportFrom:
    """Copy an import with other names."""
    return ast.Import(names) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, names, node.level)


def _list_bound_names(node: ast.stmt) -> set[str]:
    """The names that a top-level definition, assignment or import binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return set(map(name_import, aliases))
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _reads_name(node: ast.stmt, name: str) -> bool:
    """Whether a statement reads ``name`` as it runs, not only when a function that it makes is called."""
    nodes = walk_own_scope(ast.Module([node], []))
    return any(isinstance(part, ast.Name) and part.id == name for part in nodes)


def _is_demonstration(node: ast.stmt) -> bool:
    match node:
        case ast.If(test=test):
            return any(isinstance(part, ast.Name) and part.id == "__name__" for part in list_nodes(test))
        case ast.Expr(value=ast.Call(func=function)):
            return isinstance(function, ast.Name) and function.id == "print"
    return isinstance(node, ast.Expr | ast.Assert) or (isinstance(node, ast.AnnAssign) and node.value is None)
