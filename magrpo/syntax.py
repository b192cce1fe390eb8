"""Parsing Python in a process with threads."""

import ast
import threading

MAX_DEPTH = 150
"""Deepest syntax tree of a problem's code and tests: what walks a tree takes several frames of the stack a level."""
_ONE_AT_A_TIME = threading.RLock()


def parse_python(source: str, name: str = "<program>") -> ast.Module:
    """``ast.parse``, in one thread at a time: threads that parse at once raise SystemError (python/cpython#106905).

    Raises:
        SyntaxError: the source is not Python; so is one that holds a lone surrogate, or is nested too deeply to parse.
    """
    with _ONE_AT_A_TIME:
        try:
            return ast.parse(source, name)
        except UnicodeEncodeError as error:
            raise SyntaxError(str(error)) from None
        except (RecursionError, MemoryError):  # MemoryError: CPython's parser has run out of its stack
            raise SyntaxError("too deeply nested") from None


def check_depth(tree: ast.AST, limit: int) -> None:
    """Raise SyntaxError if a tree has more than ``limit`` levels, whatever the depth of the caller's stack."""
    level = [tree]
    for _ in range(limit):
        level = [child for node in level for child in _list_children(node)]
        if not level:
            return
    raise SyntaxError(f"nested deeper than {limit} levels")


def _list_children(node: ast.AST) -> list[ast.AST]:
    """As ``ast.iter_child_nodes``, in a third of the time."""
    children: list[ast.AST] = []
    for value in vars(node).values():
        if isinstance(value, ast.AST):
            children.append(value)
        elif isinstance(value, list):
            children += [item for item in value if isinstance(item, ast.AST)]
    return children
