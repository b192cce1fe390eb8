"""Parsing Python source from several threads, walking syntax trees, and the names that imports bind."""

import ast
import threading
import warnings
from types import CodeType

MAX_DEPTH = 150
"""Deepest syntax tree of a problem's code and tests: walking a tree takes several stack frames for each level."""
_ONE_AT_A_TIME = threading.RLock()


def parse_python(source: str, name: str = "<program>") -> ast.Module:
    """``ast.parse``, in one thread at a time: threads that parse at once raise SystemError (python/cpython#106905).

    Warnings about the source, such as of an escape sequence that Python does not know, are those of its author.

    Raises:
        SyntaxError: the source is not Python, holds a lone surrogate, or is nested too deeply to parse.
    """
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source, name)
        except UnicodeEncodeError as error:
            raise SyntaxError(str(error)) from None
        except (RecursionError, MemoryError):  # MemoryError: CPython's parser has run out of its stack
            raise SyntaxError("too deeply nested") from None


def compile_tree(tree: ast.Module, name: str) -> CodeType:
    """Compile a tree, in one thread at a time and without warnings, as :func:`parse_python` does.

    Two threads that silence warnings at once may leave them silent.
    """
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile(ast.fix_missing_locations(tree), name, "exec", dont_inherit=True)


def check_depth(tree: ast.AST, limit: int) -> None:
    """Raise SyntaxError if a tree has more than ``limit`` levels, whatever the depth of the caller's stack."""
    level = [tree]
    for _ in range(limit):
        level = [child for node in level for child in _list_children(node)]
        if not level:
            return
    raise SyntaxError(f"nested deeper than {limit} levels")


def list_nodes(tree: ast.AST) -> list[ast.AST]:
    """A node and all nodes below it, in the order of ``ast.walk`` but in two thirds of the time."""
    nodes = [tree]
    for node in nodes:  # the list grows meanwhile
        nodes += _list_children(node)
    return nodes


def name_import(alias: ast.alias) -> str:
    """The name that an import binds: ``b`` in ``import a.c as b`` and ``from a import b``, ``a`` in ``import a.c``."""
    return alias.asname or alias.name.partition(".")[0]


def _list_children(node: ast.AST) -> list[ast.AST]:
    children: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            children.append(value)
        elif isinstance(value, list):
            children += [item for item in value if isinstance(item, ast.AST)]
    return children
