"""Rules for code that leaves no trace in a process, so that other code may follow in it."""

import ast
import builtins
import math
import sys
from functools import lru_cache

from magrpo.python_source import MAX_DEPTH, check_depth, list_nodes, name_import, parse_python

_STATELESS = (
    "__future__ abc bisect cmath collections copy dataclasses datetime enum fractions functools hashlib heapq "
    "itertools json math operator random re statistics string textwrap typing"
)
STATELESS = frozenset(_STATELESS.split())
"""Modules whose functions change nothing but their arguments; ``random`` is seeded before each program and test."""
_FAR_REACHING = "__builtins__ __import__ breakpoint delattr eval exec globals input open setattr vars"
FAR_REACHING = frozenset(_FAR_REACHING.split())
"""Builtin functions whose effects a syntax tree does not show."""
HARMLESS = frozenset({"__doc__", "__init__", "__name__"})

_OWN_BUILTINS = (
    "abs all any bin bool callable chr complex dict divmod enumerate filter float frozenset hash hex int isinstance "
    "iter len list map max min next oct ord pow print range repr reversed round set slice sorted str sum tuple zip"
)
_ERRORS = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
OWN_BUILTINS = frozenset(_OWN_BUILTINS.split()) | _ERRORS
"""Builtin functions and classes that only make and read data."""
_MATH = frozenset(name for name in dir(math) if not name.startswith("_"))
_DATA = (bool, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)
_CODES = frozenset({"encode", "format", "format_map"})
"""Methods that load codecs, or read attributes that a text names."""
OWN_ATTRIBUTES = _MATH | {name for kind in _DATA for name in dir(kind) if not name.startswith("_")} - _CODES
_OWN_NODES = (
    *(ast.Module, ast.arguments, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.For, ast.While),
    *(ast.If, ast.Pass, ast.Break, ast.Continue, ast.Expr, ast.Raise, ast.Try, ast.ExceptHandler, ast.Assert),
    *(ast.alias, ast.comprehension, ast.keyword, ast.expr, ast.expr_context, ast.boolop, ast.operator, ast.unaryop),
    ast.cmpop,
)
_SUSPENDED = (ast.Await, ast.Yield, ast.YieldFrom)
"""Expressions of code that may continue while other code runs."""


@lru_cache(maxsize=4096)
def leaves_no_trace(source: str) -> bool:
    """Whether, by its syntax tree, Python code changes nothing that other code in the same process could see.

    It uses only modules without state, sets none of their attributes, and uses no other special attribute or
    far-reaching function. A rule for tests, which are trusted: code that means to leave a trace finds a way.
    """
    nodes = _list_nodes(source)
    imported = {name for node in nodes for name in _list_imported_names(node)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | imported
    # instrument_test imports the modules that a test uses without importing them
    forbidden = (sys.stdlib_module_names - STATELESS - bound) | FAR_REACHING
    return bool(nodes) and not any(_leaves_trace(node, imported, forbidden) for node in nodes)


@lru_cache(maxsize=4096)
def is_self_contained(source: str) -> bool:
    """Whether, by its syntax tree, Python code reaches nothing but its own functions, its arguments and new data.

    Only the names and nodes listed above are allowed, so hostile code finds no way to leave a trace either: it sets no
    attribute, reads only methods of data, defines no class, ends before other code begins, and is held by no cache
    (like those of ``typing``) that would destroy it later.
    """
    nodes = _list_nodes(source)
    modules = {name for node in nodes if isinstance(node, ast.Import) for name in _list_imported_names(node)}
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return bool(nodes) and all(_is_own(node, modules, owners) for node in nodes)


def _is_own(node: ast.AST, modules: set[str], owners: set[int]) -> bool:
    """Whether a node stays within its code, which reads ``modules`` only as ``owners`` of attributes, by ``id``."""
    match node:
        case ast.Import(names=names):
            own = all(alias.name == "math" for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            own = (module, level) == ("math", 0) and {alias.name for alias in names} <= _MATH
        case ast.Name(id=name, ctx=ast.Load()) if name in OWN_BUILTINS:
            own = True
        case ast.Name(id=name):
            own = _is_own_name(name) and (name not in modules or id(node) in owners)
        case ast.Attribute(attr=name, ctx=context):
            own = isinstance(context, ast.Load) and name in OWN_ATTRIBUTES
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ExceptHandler(name=str(name)):
            own = _is_own_name(name)
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            own = all(map(_is_own_name, names))
        case _:
            own = isinstance(node, _OWN_NODES) and not isinstance(node, _SUSPENDED)
    return own and all(map(_is_own_name, _list_imported_names(node)))


def _is_own_name(name: str) -> bool:
    """Whether a name that code reads or binds cannot be one of Python's own."""
    return not name.startswith("__") and not hasattr(builtins, name)


def _list_nodes(source: str) -> list[ast.AST]:
    """List all nodes of the syntax tree; none if the source is not Python, or nested too deeply."""
    try:
        tree = parse_python(source)
        check_depth(tree, MAX_DEPTH)
    except (SyntaxError, ValueError):
        return []
    return list_nodes(tree)


def _list_imported_names(node: ast.AST) -> list[str]:
    """List the names that an import binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return list(map(name_import, node.names))
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
