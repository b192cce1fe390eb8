"""Which code leaves nothing behind in a process, so that other code may follow in it."""

import ast
import sys
from functools import lru_cache

from magrpo.syntax import MAX_DEPTH, check_depth, parse_python

_STATELESS = (
    "__future__ abc bisect cmath collections copy dataclasses datetime enum fractions functools hashlib heapq "
    "itertools json math operator random re statistics string textwrap typing"
)
STATELESS = frozenset(_STATELESS.split())
"""Modules whose functions change nothing but their arguments; ``random`` is seeded before each program and test."""
_FAR_REACHING = "__builtins__ __import__ breakpoint delattr eval exec globals input open setattr vars"
FAR_REACHING = frozenset(_FAR_REACHING.split())
"""Builtin names that reach what a syntax tree does not show."""
HARMLESS = frozenset({"__doc__", "__init__", "__name__"})


@lru_cache(maxsize=4096)
def leaves_no_trace(source: str) -> bool:
    """Whether, by its syntax tree, Python code changes nothing that other code in the same process could see.

    It uses modules without a state only, sets none of their attributes, and uses no other special attribute or far
    reaching function. A witness of honest code alone: code that means to leave a trace finds a way.
    """
    try:
        tree = parse_python(source)
        check_depth(tree, MAX_DEPTH)
    except (SyntaxError, ValueError):
        return False
    nodes = list(ast.walk(tree))
    imported = {name for node in nodes for name in _list_imported_names(node)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | imported
    # instrument_test imports the modules that a test uses without importing them
    forbidden = (sys.stdlib_module_names - STATELESS - bound) | FAR_REACHING
    return not any(_leaves_trace(node, imported, forbidden) for node in nodes)


def _list_imported_names(node: ast.AST) -> list[str]:
    """The names that an import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return []


def _leaves_trace(node: ast.AST, imported: set[str], forbidden: frozenset[str]) -> bool:
    match node:
        case ast.Import(names=names):
            return any(alias.name.partition(".")[0] not in STATELESS for alias in names)
        case ast.ImportFrom(module=module, level=level):
            return level > 0 or (module or "").partition(".")[0] not in STATELESS
        case ast.Name(id=name, ctx=ast.Load()):
            return name in forbidden
        case ast.Attribute(attr=name) if name.startswith("__") and name not in HARMLESS:
            return True
        case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
            while isinstance(owner, ast.Attribute | ast.Subscript):
                owner = owner.value
            return not isinstance(owner, ast.Name) or owner.id in imported
    return False
